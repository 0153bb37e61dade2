"""How may an op of torch.library be split, that a user registers a rule for?"""
