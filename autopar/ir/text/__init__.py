"""How is a program written and read as text?"""
