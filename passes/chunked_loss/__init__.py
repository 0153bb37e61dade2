"""How is a loss over a large vocabulary computed some tokens at a time?"""
