"""On which stage and in which phase does each call run?"""
