"""Tell a backend's error about a lost peer from every other RuntimeError."""

from __future__ import annotations

import torch.distributed as dist

# Gloo says these by a plain RuntimeError; NCCL's, TCP's and the store's have a type, but so has a wrong call of them.
_GONE = (
    "broken pipe",
    "closed by peer",
    "closed the connection",
    "connection refused",
    "connection reset",
    "pair closure",
    "remote process exited",
    "socket closed",
    "timed out",
    "timeout",
)
_OWN_FAULT = ("invalid argument", "invalid usage", "out of memory")


def is_loss_of_peer(error: RuntimeError) -> bool:
    """True for what a backend raises where another rank has ended, or has not come in time."""
    text = str(error).lower()
    if isinstance(error, dist.DistError):
        return not any(words in text for words in _OWN_FAULT)
    return any(words in text for words in _GONE)
