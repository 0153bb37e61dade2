"""Which random decisions does a step make, and how are both their sides part of it?"""
