"""How does a rank's list of instructions run?"""
