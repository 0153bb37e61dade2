"""What does a plan cost: time and memory?"""
