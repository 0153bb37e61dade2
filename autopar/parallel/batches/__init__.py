"""Which part of a batch was each rank given, and is it the same for all?"""
