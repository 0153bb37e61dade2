"""How is each op of our own computed?"""
