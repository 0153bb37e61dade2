"""Which choice of strategies is the cheapest?"""
