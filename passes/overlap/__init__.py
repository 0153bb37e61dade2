"""When does what moves move, and under which computation?"""
