"""Meet the ranks that a launcher started, in a store that those before them may have used.

torchrun's agents keep one store from restart to restart, where keys of dead ranks still stand: an early rank would call
at the address of a dead one. So does the store of a group that was destroyed, while a model or a script holds it.
The number of restarts tells no attempt from another: each machine counts its own. So rank 0 makes up a name for the
attempt, and tells it to each rank that asks with a word that it has just made up itself.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_PERIOD_S = 0.02
_ASKS, _NAME = "autopar-asks", "autopar-name"


@contextmanager
def attempt_name(store: dist.Store, own: dist.Store, rank: int, size: int) -> Iterator[str]:
    """A name that the ranks of this attempt share and none before them had. The others ask rank 0 meanwhile, in
    another connection to the store (`own`): one waits in its own."""
    if rank:
        word = uuid.uuid4().hex
        store.set(f"{_ASKS}/{rank}", word)
        yield store.get(f"{_NAME}/{word}").decode()
        return
    name, done, answered = uuid.uuid4().hex, threading.Event(), set[str]()

    def answer() -> None:
        while not done.wait(_PERIOD_S):
            for other in range(1, size):
                key = f"{_ASKS}/{other}"
                word = own.get(key).decode() if own.check([key]) else None
                if word is not None and word not in answered:
                    own.set(f"{_NAME}/{word}", name)
                    answered.add(word)

    thread = threading.Thread(target=answer, name="autopar-meet", daemon=True)
    thread.start()
    try:
        yield name
    finally:
        done.set()
        thread.join()
