"""Which ops ran, and what do they write and give?"""
