"""How does a captured step become the programs of all ranks?"""
