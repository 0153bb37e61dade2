"""How does the state of a training run get to disk, whole or not at all, and back onto any mesh?"""
