"""What did the compiler do, and why?"""
