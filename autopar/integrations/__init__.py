"""How do other people's training loops and trainers run a parallel model?"""
