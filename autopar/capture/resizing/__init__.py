"""How does the program of another size come from those of earlier sizes?"""
