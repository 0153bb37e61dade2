"""How does a fused group become a Triton kernel? Nothing here imports Triton until a kernel is compiled."""
