"""How do sequences of other lengths, shifted or cut, stay whole and split?"""
