"""How does a program run as code that a compiler writes, or as a recording?"""
