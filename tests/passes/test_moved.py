"""How many bytes calls read and write: operands and results, but for lookups and for kernels of several passes."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.ir.ops.measure import local_bytes
from autopar.ir.ops.ops import op
from autopar.ir.program import operand_nodes
from autopar.machines import Machine
from autopar.passes.costs.moved import APART, LOOKUPS, OVER, PASSES
from autopar.passes.costs.node_costs import load_us, loads_of
from autopar.passes.costs.streams import run

ROWS, WORDS, WIDTH = 6, 50, 8


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.table(ids)))


def loss_fn(model: nn.Module, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids), targets)


def test_what_calls_move() -> None:
    ids = torch.zeros(ROWS, dtype=torch.int64)
    program = autopar.compile(Words(), "dp=1", loss_fn=loss_fn, batch=(ids, ids)).program
    sizes = {node: local_bytes(node, program.mesh) for node in program.graph.nodes}
    loads = {node: load for node, load in loads_of(program).items() if load is not None}
    seen = set()
    for node, load in loads.items():
        seen.add(node.target)
        every = sizes[node] + sum(sizes[operand] for operand in operand_nodes(node))
        assert (load.results == ()) == (node.target in OVER)
        if node.target in PASSES:
            assert load.moved == 3 * ROWS * WORDS * 4, node
        elif node.target in LOOKUPS:
            _, *others = operand_nodes(node)
            assert load.moved == 2 * sizes[node] + sum(sizes[other] for other in others) != every, node
        else:
            assert load.moved == every, node
    assert {op("embedding"), op("pick"), *PASSES} <= seen


def test_logits_in_a_short_float_are_widened() -> None:
    ids = torch.zeros(ROWS, dtype=torch.int64)
    program = autopar.compile(Words(), "dp=1", loss_fn=loss_fn, batch=(ids, ids), precision="bf16").program
    moved = [load.moved for node, load in loads_of(program).items() if node.target in PASSES and load is not None]
    assert moved == [3 * ROWS * WORDS * 4] * 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(x))


def test_what_a_cpu_takes_apart_goes_through_memory_more_often_there() -> None:
    """As many calls as it has there, each of which reads and writes as much."""
    x = torch.randn(ROWS, WIDTH)
    program = autopar.compile(Norm(), "dp=1", loss_fn=lambda model, x: model(x).sum(), batch=(x,)).program
    device = Machine.flat(flops=1.0, memory=2.0, link=1.0, latency_us=0.0, least_us=0.0)
    host = replace(device, is_host=True)
    seen = set()
    for node, load in loads_of(program).items():
        if load is None:
            continue
        on_device, on_host = (load_us(load, program.mesh, machine) for machine in (device, host))
        times = APART.get(node.target)
        assert on_device == load.moved / 2
        assert on_host == (on_device if times is None else times * ROWS * WIDTH * 4 / 2), node
        seen.add(node.target)
    assert APART.keys() <= seen


def test_later_micro_batches_read_the_sums_that_they_add_to() -> None:
    """Of a gradient that is a sum over micro-batches, and of nothing else."""
    ids = torch.zeros(ROWS, dtype=torch.int64)
    made = autopar.compile(Words(), "dp=1", loss_fn=loss_fn, batch=(ids, ids), microbatches=2, precision="bf16")
    graph = made.pipeline.graphs[0, "B"]
    parts = {node for node, out in graph.leaving if out.kind == "part"}
    first, later = loads_of(graph), loads_of(graph, adds=True)
    machine = Machine.flat(flops=1e9, memory=2.0, link=1.0, latency_us=0.0, least_us=0.0)
    seen = set()
    for node, load in later.items():
        if load is None:
            continue
        assert load.total == (local_bytes(node, graph.mesh) if node in parts else 0.0), node
        assert load._replace(total=0.0) == first[node]
        more = load_us(load, graph.mesh, machine) - load_us(first[node], graph.mesh, machine)
        assert more == load.total / 2, node
        seen |= {node} if load.total else set()
    assert {node.name for node in seen} == {"cast_3", "embedding_backward"}, "the weights; what is summed is a view"
    assert run(graph, machine).total > sum(load_us(load, graph.mesh, machine) for load in first.values())


def test_gradients_of_norms_reach_a_share_of_what_others_do() -> None:
    """Alone, and in a group."""
    x = torch.randn(ROWS, WIDTH)
    machine = Machine.flat(flops=1.0, memory=2.0, link=1.0, latency_us=0.0, least_us=0.0)
    slower = replace(machine, device=replace(machine.device, norm=0.5))
    for norm in (nn.RMSNorm, nn.LayerNorm):
        for compile_ in ("executor", "triton"):
            model = nn.Sequential(norm(WIDTH), nn.Tanh(), norm(WIDTH))
            program = autopar.compile(
                model, "dp=1", loss_fn=lambda model, x: model(x).square().sum(), batch=(x,), compile=compile_
            ).program
            loads = {node: load for node, load in loads_of(program).items() if load is not None}
            longer = {
                node: load_us(load, program.mesh, slower) / load_us(load, program.mesh, machine)
                for node, load in loads.items()
            }
            backward = {node for node in longer if "norm_backward" in str(node.target) or "norm_backward" in node.name}
            assert backward and longer == {node: 2.0 if node in backward else 1.0 for node in longer}
