"""Which layout does every value have?"""
