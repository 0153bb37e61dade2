"""How does a rank's graph run?"""
