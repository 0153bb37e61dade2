"""Ops of torch.library that a user registers a rule for."""
