"""What does a model do with the rows that a mask selects, as many as the data say?"""
