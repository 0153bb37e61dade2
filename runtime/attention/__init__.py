"""How is attention computed: whole, in blocks, around a ring?"""
