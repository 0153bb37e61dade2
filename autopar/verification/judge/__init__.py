"""Is what differs wrong, or rounding?"""
