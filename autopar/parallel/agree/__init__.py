"""Do all ranks mean the same?"""
