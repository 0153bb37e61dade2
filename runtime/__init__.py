"""How does a program run?"""
