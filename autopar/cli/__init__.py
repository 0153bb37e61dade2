"""What does the command line do?"""
