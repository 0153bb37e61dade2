"""What is said of a model that cannot be captured, and of which line?"""
