"""How do the ranks of a mesh join, and what do the parts of a parallel module share?"""
