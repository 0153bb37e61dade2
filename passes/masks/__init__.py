"""Which masks are conditions on a query and a key?"""
