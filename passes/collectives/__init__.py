"""What moves between ranks, and what does each rank compute of the rest?"""
