"""What of a step hangs on the data: branches, numbers, sizes, random draws?"""
