"""Tell the ranks that go on that this one has left, and how.

Of a rank that is gone a backend knows that a connection closed. Whether an error ended it, or its loop had fewer
batches than the others', stands in the store where the ranks met: that of torchrun lives longer than all of them, and
any other one as long as the rank that keeps it, as a rule rank 0. A rank that was killed leaves no words.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from autopar.torch_compat import default_store

_KEY = "autopar-left"
_PATIENCE_S = 1.0  # for a store whose host may be stopped, or gone
_ASKED, _PERIOD_S = 10, 0.03  # a group that is destroyed closes its connections first
_LONGEST = 300  # characters of an error
_AS_MANY = (
    "Every rank must make as many steps: give each as many batches (a DistributedSampler makes parts of one length), "
    "and leave the loop at the same step."
)


def words_to_leave(group: dist.ProcessGroup, done: Callable[[], str]) -> Callable[[], object]:
    """Give what leaves word of this rank, once: as it is called, or as the default group is destroyed before. done: how
    far the rank came by then, e.g. `after 5 training steps`; it keeps nothing of the group."""
    return weakref.finalize(group, _leave, default_store(), group.rank(), done)


def _leave(store: dist.Store, rank: int, done: Callable[[], str]) -> None:
    error = getattr(sys, "last_value", None)  # what Python has just shown, where an error ended the script
    cause = None if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST]
    line = json.dumps([rank, done(), cause])
    _in_time(lambda: store.set(f"{_KEY}/{store.add(_KEY, 1)}", line))


def words_left() -> str | None:
    """Word what ranks that have left said last, with what to do; None if none did, or the store does not answer."""
    read: list[str] = []

    def ask() -> None:
        store = default_store()
        for _ in range(_ASKED):
            keys = [f"{_KEY}/{number}" for number in range(1, store.add(_KEY, 0) + 1)]
            if keys and store.check(keys):
                read.extend(store.get(key).decode() for key in keys)
                return
            time.sleep(_PERIOD_S)

    _in_time(ask)
    left: dict[int, tuple[str, str | None]] = {}
    for line in read:
        rank, done, cause = json.loads(line)
        left.setdefault(rank, (done, cause))
    if not left or dist.get_rank() in left:  # words of a group that was here before, in the same store
        return None
    said = [
        f"Rank {rank} has left {done}" + (f", with {cause}" if cause else "")
        for rank, (done, cause) in sorted(left.items())
    ]
    is_in_order = all(cause is None for _, cause in left.values())
    return f"{'. '.join(said)}." + f" {_AS_MANY}" * is_in_order


def _in_time(make: Callable[[], None]) -> None:
    """Use a store for a moment, and no longer: it may be gone, of a kind without such calls, or never answer."""

    def run() -> None:
        with suppress(RuntimeError, ValueError):
            make()

    thread = threading.Thread(target=run, name="autopar-last-words", daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
