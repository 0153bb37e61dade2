"""What of Python was read while a step was captured, and has it changed since?"""
