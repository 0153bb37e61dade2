"""What the driver asks of a backend, seen by groups that count and record: NCCL's branch, without a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from autopar.ir.mesh import parse_mesh
from autopar.ir.ops import op
from autopar.report.memory.fake_group import FakeGroup
from autopar.runtime.distributed import DistributedDriver
from autopar.runtime.executor import Executable
from autopar.runtime.groups import Group


class Recording(FakeGroup):
    """Notes each collective that is asked of it, and whether somebody is to wait for it."""

    def __init__(self, size: int = 2) -> None:
        super().__init__(0, size, copies=False)
        self.asked: list[tuple[str, bool]] = []

    def _note(self, name: str, *args: Any) -> dist.Work:
        self.asked.append((name, args[-1].asyncOp))
        return self._done()

    def allreduce(self, *args: Any) -> dist.Work:
        return self._note("all_reduce", *args)

    def _allgather_base(self, *args: Any) -> dist.Work:
        return self._note("all_gather", *args)

    def _reduce_scatter_base(self, *args: Any) -> dist.Work:
        return self._note("reduce_scatter", *args)

    def alltoall_base(self, *args: Any) -> dist.Work:
        return self._note("all_to_all", *args)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


COLLECTIVES = {
    "all_reduce": ("tp", "sum"),
    "all_gather": ("tp", 0, 1),
    "reduce_scatter": ("tp", 0, 1, "sum"),
    "all_to_all": ("tp", 0, 1, 1, 1),
}


@pytest.mark.parametrize("overlap", [True, False])
def test_only_what_is_awaited_later_is_asked_for_as_work(overlap: bool) -> None:
    """Red before: everything was, and cost NCCL two events and a stream of its own."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    found = [graph.call_function(op(name), (x, *rest)) for name, rest in COLLECTIVES.items()]
    started = [name for name in COLLECTIVES if name != "all_to_all"]
    halves = [graph.call_function(op(f"{name}_start"), (x, *COLLECTIVES[name])) for name in started]
    # two moves, of which only the first is under way
    halves.append(graph.call_function(op("all_reduce_start"), (x, "tp", "logsumexp")))
    found += [graph.call_function(op("wait"), (half,)) for half in halves]
    graph.output(tuple(found))
    group = Recording()
    driver = DistributedDriver(parse_mesh("tp=2"), {"tp": Group(group, 2, None)}, rank=0)
    driver.run(Executable(graph), [torch.ones(4, 4)], observe=None if overlap else lambda node, value: None)
    awaited = Counter(name for name, later in group.asked if later)
    assert awaited == (Counter([*started, "all_reduce"]) if overlap else Counter())
    assert len(group.asked) == 4 + 3 + 2


def test_sums_that_are_scattered_have_a_queue_of_their_own() -> None:
    """Red before: across nodes they waited behind the gathers of the next layer."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(tuple(graph.call_function(op(name), (x, *rest)) for name, rest in COLLECTIVES.items()))
    first, second = Recording(), Recording()
    driver = DistributedDriver(parse_mesh("tp=2"), {"tp": Group(first, 2, None, second)}, rank=0)
    driver.run(Executable(graph), [torch.ones(4, 4)])
    assert [name for name, _ in second.asked] == ["reduce_scatter"]
    assert [name for name, _ in first.asked] == ["all_reduce", "all_gather", "all_to_all"]
