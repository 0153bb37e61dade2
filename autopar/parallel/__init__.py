"""What does a user hold and train?"""
