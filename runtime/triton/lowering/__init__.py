"""What does a group compute, in primitive expressions and places?"""
