"""What does a rank give and get in a collective?"""
