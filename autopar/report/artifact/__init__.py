"""How are programs saved as text that a person can read?"""
