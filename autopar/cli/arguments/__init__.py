"""What may a command line say?"""
