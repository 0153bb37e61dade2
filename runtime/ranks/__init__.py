"""How do ranks run together: over torch.distributed, or in one process?"""
