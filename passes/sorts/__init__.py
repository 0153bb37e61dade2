"""What is known of rows that are sorted by a key?"""
