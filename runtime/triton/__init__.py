"""Triton kernels written from fused groups. Nothing here imports Triton until a kernel is compiled."""
