"""Messages between processes: what is kept while it leaves, and what is said of a peer that is gone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.errors import RankError
from autopar.ir.mesh import parse_mesh
from autopar.ir.schedule import Action, Instruction
from autopar.parallel.agree.agreement import lost_peers
from autopar.runtime.pipeline.run_pipeline import Send
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.p2p import LEAVING, LEAVING_BYTES, Peers
from autopar.runtime.ranks.process_groups import Group


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
    peers = Peers(Group(lambda: None, 8, (6, 7)), torch.device("cpu"))  # type: ignore[arg-type]
    message = Send(Instruction("SEND", Action(0, "F", 0), 1), (torch.ones(3, 2).t(), torch.ones(2)))
    for sent in range(1, 20):
        peers.send(message)
        assert len(peers.leaving) <= LEAVING + len(message.tensors)
        assert sum(work.waited for work in works) == 2 * sent - len(peers.leaving), "the oldest are waited for"
    peers.finish()
    assert not peers.leaving and all(work.waited for work in works)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("bytes_", [LEAVING_BYTES // 2 + 1, 2 * LEAVING_BYTES])
def test_what_is_on_its_way_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch, in_order: bool, bytes_: int):
    """On a GPU as well, which else waits for no send: one message may be larger than the bound, and goes alone."""
    monkeypatch.setattr(dist, "isend", lambda tensor, group, group_dst: Leaving())
    monkeypatch.setattr(Peers, "in_order", in_order)
    peers = Peers(Group(lambda: None, 8, (6, 7)), torch.device("cpu"))  # type: ignore[arg-type]
    message = Send(Instruction("SEND", Action(0, "F", 0), 1), (torch.empty(bytes_, dtype=torch.uint8),))
    for _ in range(6):
        peers.send(message)
        assert sum(one.sent.nbytes for one in peers.leaving) <= LEAVING_BYTES + bytes_
        assert len(peers.leaving) <= 2


GONE = [
    RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"),
    RuntimeError("[unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"),
    RuntimeError("Connection reset by peer"),
    dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    dist.DistStoreError("wait timeout after 300000ms"),
    dist.DistNetworkError("The client socket has failed to connect"),
]
OWN = [
    RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
    RuntimeError("shape '[4]' is invalid for input of size 3"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    dist.DistBackendError("ncclInvalidUsage: invalid usage (run with NCCL_DEBUG=WARN for details)"),
]


@pytest.mark.parametrize("error", [*GONE, *OWN], ids=str)
def test_peers_are_lost_only_where_the_backend_says_so(error: RuntimeError, monkeypatch: pytest.MonkeyPatch):
    """Red before: every RuntimeError was said to be the loss of a peer."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    driver = DistributedDriver(parse_mesh("dp=1"), {}, rank=0)
    lost = any(error is each for each in GONE)
    with pytest.raises(RankError if lost else type(error)) as caught, lost_peers("comparing"):
        raise error
    assert ("lost its peers while comparing" in str(caught.value)) == lost
    with pytest.raises(RankError if lost else type(error)) as inside:
        try:
            raise error
        except RuntimeError as seen:
            raise driver._lost("%node", seen) from seen
    assert ("lost its peers at %node" in str(inside.value)) == lost
    assert lost or (inside.value is error and error.__notes__ == ["in %node"])
