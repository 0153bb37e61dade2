"""Tell a backend's error about a lost peer from every other RuntimeError."""

from __future__ import annotations

import torch.distributed as dist

from autopar.errors import RankError
from autopar.runtime.ranks.last_words import words_left

LOST = "lost its peers"
IN_VAIN = "waited in vain for"
OTHERS = "the other ranks"

# Gloo says these by a plain RuntimeError; NCCL's, TCP's and the store's have a type, but so has a wrong call of them.
_GONE = (
    "broken pipe",
    "closed by peer",
    "closed by remote peer",
    "closed the connection",
    "connection refused",
    "connection reset",
    "pair closure",
    "remote process exited",
    "socket closed",
    "timed out",
    "timeout",
)
# What a rank's own device, machine or call did, though NCCL says it of a collective.
_OWN_FAULT = (
    "cuda failure",
    "device-side assert",
    "illegal memory access",
    "invalid argument",
    "invalid usage",
    "no network interface",
    "no space left on device",
    "out of memory",
    "unhandled cuda error",
)
_UNCLEAR = ("internal error", "system error")  # of NCCL: a peer's, where it says that the peer went away


def is_loss_of_peer(error: RuntimeError) -> bool:
    """True for what a backend raises where another rank has ended, or has not come in time."""
    text = str(error).lower()
    is_gone = any(words in text for words in _GONE)
    if not isinstance(error, dist.DistError):
        return is_gone
    if any(words in text for words in _OWN_FAULT):
        return False
    return is_gone or not any(words in text for words in _UNCLEAR)


def loss_of_peers(rank: str, where: str, awaited: str, error: RuntimeError) -> RankError:
    """Word the loss of a peer. rank: `rank 0 (dp=0)`. where: this rank stood. awaited: whom it waited for there, as
    far as it can know."""
    advice = words_left()
    if advice is None and any(words in str(error).lower() for words in ("timed out", "timeout")):
        advice = (
            f"It {IN_VAIN} {awaited}: stopped, hanging, or busy for longer than the timeout, which must be above the "
            f"longest that a rank is on its own."
        )
    advice = advice or f"Look for the first error of {awaited}."
    return RankError(f"{rank} {LOST} {where}\n  {advice} The backend says: {str(error).strip()}")
