"""Does a parallel program give the numbers of the plain module?"""
