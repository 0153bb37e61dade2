"""Which program runs a call: found, or made and agreed on?"""
