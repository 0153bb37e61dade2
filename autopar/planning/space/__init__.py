"""Which plans are there?"""
