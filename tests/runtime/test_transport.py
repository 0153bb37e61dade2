"""What the driver asks of a backend, seen by groups that count and record: NCCL's branch, without a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from test_gloo_driver import _join, _spawn
from torch import fx

from autopar.api import compile
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ops import op
from autopar.report.memory.simulate_rank import FakeGroup
from autopar.runtime.executor.executor import Executable, joined
from autopar.runtime.ranks import distributed
from autopar.runtime.ranks.distributed import DistributedDriver
from autopar.runtime.ranks.process_groups import Group


class Recording(FakeGroup):
    """Notes each collective that is asked of it, and whether somebody is to wait for it."""

    def __init__(self, size: int = 2) -> None:
        super().__init__(0, size, copies=False)
        self.asked: list[tuple[str, bool]] = []
        self.together: list[int] = []  # of each launch of several

    def _note(self, name: str, *args: Any) -> dist.Work:
        self.asked.append((name, getattr(args[-1], "asyncOp", True)))  # 2.11 has no options there
        return self._done()

    def allreduce(self, *args: Any) -> dist.Work:
        return self._note("all_reduce", *args)

    def _allgather_base(self, *args: Any) -> dist.Work:
        return self._note("all_gather", *args)

    def _reduce_scatter_base(self, *args: Any) -> dist.Work:
        return self._note("reduce_scatter", *args)

    def alltoall_base(self, *args: Any) -> dist.Work:
        return self._note("all_to_all", *args)

    def allgather_into_tensor_coalesced(self, outputs: list[torch.Tensor], *args: Any) -> dist.Work:
        self.together.append(len(outputs))
        return self._note("all_gather", *args)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
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
    driver = DistributedDriver(parse_mesh("tp=2"), {"tp": Group.of(group, 2, None)}, rank=0)
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
    driver = DistributedDriver(parse_mesh("tp=2"), {"tp": Group.of(first, 2, None, second)}, rank=0)
    driver.run(Executable(graph), [torch.ones(4, 4)])
    assert [name for name, _ in second.asked] == ["reduce_scatter"]
    assert [name for name, _ in first.asked] == ["all_reduce", "all_gather", "all_to_all"]


# -- gathers of a layer -----------------------------------------------------------------------------------------------


def _layers() -> Executable:
    """Two layers: one gathers three parameters, one of them in another dtype; the other one gathers two."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")

    def start(x: fx.Node) -> fx.Node:
        return graph.call_function(op("all_gather_start"), (x, "fsdp", 0, 1))

    short = graph.call_function(torch.ops.aten._to_copy.default, (b,), {"dtype": torch.bfloat16})
    first = [start(a), start(b), start(short)]
    whole = [graph.call_function(op("wait"), (each,)) for each in first]
    second = [start(b), start(a)]
    used = graph.call_function(torch.ops.aten.mul.Tensor, (whole[0], 2))
    whole += [graph.call_function(op("wait"), (each,)) for each in second]
    graph.output((used, *whole))
    return Executable(graph)


def _run_layers(group: Any, device: str, rank: int = 0) -> tuple[Any, ...]:
    driver = DistributedDriver(parse_mesh("fsdp=2"), {"fsdp": Group.of(group, 2, None)}, rank=rank)
    given = [torch.arange(6.0, device=device).view(2, 3) + rank, torch.ones(3, device=device) * rank]
    return driver.run(_layers(), given)


def test_the_gathers_of_a_layer_are_one_launch() -> None:
    """Red before: one for each parameter."""
    group = Recording()
    outputs = _run_layers(group, "meta")
    assert group.together == [3, 2] and len(group.asked) == 2
    assert [tuple(value.shape) for value in outputs] == [(4, 3), (4, 3), (6,), (6,), (6,), (4, 3)]
    on_cpu = Recording()
    _run_layers(on_cpu, "cpu")
    assert not on_cpu.together and len(on_cpu.asked) == 5, "Gloo gains nothing by that"


def test_a_gather_does_not_wait_for_what_others_read() -> None:
    """Only its operand is made between two starts: what computes meanwhile would run before the launch."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    first = graph.call_function(op("all_gather_start"), (a, "fsdp", 0, 1))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (b, b))
    second = graph.call_function(op("all_gather_start"), (product, "fsdp", 0, 1))
    assert joined(graph) == {first}
    third = graph.call_function(op("all_gather_start"), (product, "tp", 0, 1))
    assert joined(graph) == set(), "the product is read by another as well"
    graph.erase_node(third)
    graph.call_function(op("all_reduce"), (product, "fsdp", "sum"))
    assert joined(graph) == set()
    assert second.op == "call_function"


def test_a_step_of_zero_launches_a_layer_at_once() -> None:
    """What prefetch puts side by side: of a GPT over fsdp, far fewer launches than gathers."""
    model, loss_fn, batch = models.gpt()
    compiled = compile(model, "fsdp=2", loss_fn=loss_fn, batch=batch, zero=3, bucket_bytes=1)
    graph = compiled.program.graph
    starts = [node for node in graph.nodes if node.target is op("all_gather_start")]
    assert len(starts) - len(joined(graph)) < len(starts) / 3, (len(starts), len(joined(graph)))


def _together_over_gloo(rank: int, size: int, path: str) -> None:
    _join(rank, size, path)
    distributed.launches_together = lambda x: True  # this process ends with the test
    ours, separate = [], []
    for found, is_joined in ((ours, True), (separate, False)):
        distributed.launches_together = lambda x, is_joined=is_joined: is_joined
        found += _run_layers(dist.group.WORLD, "cpu", rank)
    for a, b in zip(ours, separate, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert ours[1].tolist() == [*(torch.arange(6.0).view(2, 3)).tolist(), *(torch.arange(6.0).view(2, 3) + 1).tolist()]
    dist.destroy_process_group()


@pytest.mark.gloo
def test_what_is_launched_together_arrives_as_alone(tmp_path: Path) -> None:
    _spawn(_together_over_gloo, 2, tmp_path)
