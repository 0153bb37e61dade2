"""How long does a call take on a machine?"""
