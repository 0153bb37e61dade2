"""Ranks of one attempt agree on a name in a store where ranks before them left theirs, whoever comes first."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from autopar.runtime.ranks.meet import attempt_name


def test_ranks_of_an_attempt_meet_in_a_used_store() -> None:
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    server.set("autopar-asks/1", "dead")
    server.set("autopar-asks/2", "dead too")

    def client() -> dist.Store:
        return dist.TCPStore("localhost", server.port, is_master=False, timeout=timedelta(seconds=20))

    names: list[str] = []
    for first in range(3):  # the others come later
        found: dict[int, str] = {}
        everyone = threading.Barrier(3, timeout=20)

        def meet(
            rank: int, first: int = first, found: dict[int, str] = found, all_: threading.Barrier = everyone
        ) -> None:
            time.sleep(0.2 * (rank != first))
            with attempt_name(client(), client(), rank, 3) as name:
                found[rank] = name
                all_.wait()  # as ranks do that join a group

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 3 and len(set(found.values())) == 1
        names.append(found[0])
    assert len(set(names)) == 3
