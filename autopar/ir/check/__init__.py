"""Does a program keep what its level promises?"""
