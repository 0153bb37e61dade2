"""Messages between processes: what is kept while it leaves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.ir.schedule import Action, Instruction
from autopar.runtime.peers import LEAVING, Peers
from autopar.runtime.pipeline import Send


class Leaving:
    """As Gloo has it: a send says that it is done only after somebody has waited for it."""

    def __init__(self) -> None:
        self.waited = False

    def is_completed(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True


def test_what_has_left_is_let_go(monkeypatch: pytest.MonkeyPatch):
    works: list[Leaving] = []

    def isend(tensor: torch.Tensor, group: object, group_dst: int) -> Leaving:
        assert tensor.is_contiguous() and group_dst == 7
        works.append(Leaving())
        return works[-1]

    monkeypatch.setattr(dist, "isend", isend)
    peers = Peers(None, lambda place: place + 6, torch.device("cpu"))  # type: ignore[arg-type]
    letter = Send(Instruction("SEND", Action(0, "F", 0), 1), (torch.ones(3, 2).t(), torch.ones(2)))
    for sent in range(1, 20):
        peers.send(letter)
        assert len(peers.leaving) <= LEAVING + len(letter.tensors)
        assert sum(work.waited for work in works) == 2 * sent - len(peers.leaving), "the oldest are waited for"
    peers.finish()
    assert not peers.leaving and all(work.waited for work in works)
