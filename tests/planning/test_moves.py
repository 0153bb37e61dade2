"""What the planner says that a plan moves over its data axes, beside what the emitted graphs start and await."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from models import token_loss
from plan_jobs import captured, compiled_for, llama_job, on_same_captures, peaks_of, rows_of
from torch import Tensor, nn
from torch.nn import functional as F
from verified import Once

import autopar
from autopar.ir.modules import layer_of
from autopar.ir.ops.measure import local_bytes
from autopar.ir.ops.ops import is_collective, mesh_op_name, op
from autopar.ir.program import Program, record
from autopar.machines import named
from autopar.planning.planner import layers_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.pipelined import Pipelined, cost_of, data_of, pipelined
from autopar.planning.price.predict import predict
from autopar.planning.space.candidates import Candidate

MACHINE = named("h100-80g")
DEPTH, WIDTH, WORDS, LENGTH = 5, 128, 512, 32
TIME, MEMORY = 0.02, 0.05  # of what the emitted programs take
Moves = list[tuple[bool, str, int]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Words(nn.Module):
    """Of few calls, so that many plans are compiled in little time."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def job(rows: int, is_tied: bool) -> autopar.Job:
    with torch.device("meta"):
        model = Words(is_tied)
        ids = torch.empty(rows, LENGTH, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision="bf16")


@cache
def once(rows: int, is_tied: bool) -> Once:
    """A step of so many rows, captured for all plans that take them."""
    return captured(job(rows, is_tied))


@cache
def layers(is_tied: bool, bucket_bytes: int | None) -> Layers:
    if bucket_bytes is None:
        return layers_of(job(2, is_tied), MACHINE)
    return on_same_captures(layers(is_tied, None), MACHINE, bucket_bytes=bucket_bytes)


def moves_of(graph: Program) -> Moves:
    """What a graph starts and awaits of parameters and gradients: (True if it starts, kind, bytes of the whole)."""
    found = []
    for node in graph.calls():
        start = node.all_input_nodes[0] if node.target is op("wait") else node
        if is_collective(start.target) and record(start).made_by in ("bucket", "prefetch"):
            kind = mesh_op_name(start.target).removesuffix("_start")
            whole = start if kind == "all_gather" else start.all_input_nodes[0]
            found.append((node is start, kind, local_bytes(whole, graph.mesh)))
    return found


def drawn(rng: random.Random) -> tuple[Candidate, bool, int | None]:
    """A plan without a pipeline, a model, and `bucket_bytes`."""
    fsdp, cp = rng.choice((1, 1, 2)), rng.choice((1, 1, 1, 2))
    zero = rng.choice((0, 1, 2, 3)[fsdp > 1 :])
    candidate = Candidate(
        rng.choice((2, 4, 8)), 1, 1, zero, rng.choice(("none", "selective", "full")), rng.choice((1, 2)),
        rng.choice((1, 1, 2, 3)), fsdp=fsdp, cp=cp,
        reshard_after_forward=zero < 3 or rng.random() < 0.7,
    )  # fmt: skip
    return candidate, rng.random() < 0.3, rng.choice((None, None, 100_000))


@pytest.mark.parametrize("seed", range(5))
def test_the_planner_moves_what_the_emitted_graphs_move(seed: int) -> None:
    """50 plans: the passes and the planner are driven by the same decisions, in the same order, over the same sizes."""
    rng = random.Random(seed)
    for _ in range(10):
        candidate, is_tied, bucket_bytes = drawn(rng)
        compiled = compiled_for(once(rows_of(candidate), is_tied), candidate, bucket_bytes=bucket_bytes)
        step = pipelined(candidate, layers(is_tied, bucket_bytes)).stages[0].step
        assert step is not None
        graphs = {"FB": compiled.program}
        if compiled.pipeline is not None:
            graphs = {one.place[1]: one.program for one in compiled.pipeline.every_graph()}
        for kind, graph in graphs.items():
            assert step.moves.get(kind, []) == moves_of(graph), (str(candidate), is_tied, bucket_bytes, kind)


def drawn_pipeline(rng: random.Random) -> tuple[Candidate, int | None]:
    """A plan with a pipeline, and `bucket_bytes`. Not drawn: what is computed again, and halves of the backward pass
    with ZeRO-3, where graphs read parameters at other places than those that stages are cut by."""
    zero = rng.choice((0, 1, 2, 3))
    schedule, chunks = rng.choice((("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1))[: 2 + (zero < 3)])
    dp, pp, rows = rng.choice((2, 4)), rng.choice((2, 3)), rng.choice((1, 2))
    return Candidate(dp, 1, pp, zero, "none", rows, 6, schedule, chunks=chunks), rng.choice((None, 100_000))


def parameters_of(made: Pipelined) -> Counter[tuple[int, str]]:
    """The ranks of parameters, by what these are called in their layers."""
    slots = ((rank, slot) for rank, own in enumerate(made.ranks) for slot in own.slots if slot.weight)
    return Counter((rank, _in_layer(slot.weight.name)) for rank, slot in slots if slot.weight)


def _in_layer(name: str) -> str:
    return name.removeprefix(layer_of(name))


def test_pipelines_move_what_the_emitted_graphs_move() -> None:
    """20 plans. Where times of places are within a call of each other, the compiler may cut at another one of them."""
    rng, compared = random.Random(0), 0
    for _ in range(20):
        candidate, bucket_bytes = drawn_pipeline(rng)
        compiled = compiled_for(once(rows_of(candidate), False), candidate, bucket_bytes=bucket_bytes)
        costs = layers(False, bucket_bytes)
        made, data = pipelined(candidate, costs), data_of(candidate, costs)
        if parameters_of(made) != Counter((rank, _in_layer(name)) for name, rank in compiled.owners.items()):
            continue
        compared, cost, moves = compared + 1, cost_of(candidate, costs).in_stages(), dict[tuple[int, str], list[Any]]()
        for number, stage in enumerate(made.stages):
            for kind, graph in data.graphs(stage.share, stage.slots, cost, {}).items():
                moves[number, kind] = graph.moving.moves
        for number, rank in enumerate(made.ranks):
            beside = rank.cost.once(rank.share.time.layers)
            moves[number, "P"], moves[number, "E"] = data.first(rank.slots, beside).moves, data.last(rank.slots).moves
        assert compiled.pipeline is not None
        for one in compiled.pipeline.every_graph():
            assert moves.get(one.place[:2], []) == moves_of(one.program), (str(candidate), bucket_bytes, one.place)
    assert compared >= 15


def deep_job(count: int, rows: int) -> autopar.Job:
    return llama_job(count, 2048, 16, 5632, 32000, 1024, rows)


@cache
def deep(count: int) -> Layers:
    return layers_of(deep_job(count, 2), MACHINE)


@cache
def deep_once(count: int, rows: int) -> Once:
    return captured(deep_job(count, rows))


@pytest.mark.parametrize(
    ("candidate", "count"),
    [
        (Candidate(8, 1, 1, 1, "none", 2, 1), 8), (Candidate(8, 1, 1, 2, "none", 1, 4), 8),
        (Candidate(8, 1, 1, 3, "full", 2, 1), 8), (Candidate(8, 1, 1, 3, "none", 1, 2), 16),
        (Candidate(64, 1, 1, 3, "none", 1, 1), 8), (Candidate(8, 2, 1, 1, "none", 2, 2, sequence=True), 8),
    ],
    ids=str,
)  # fmt: skip
def test_time_and_memory_are_those_of_the_emitted_programs(candidate: Candidate, count: int) -> None:
    """Red before: up to 33 % too short, memory up to 34 % too much and 9 % too little."""
    compiled = compiled_for(deep_once(count, rows_of(candidate)), candidate)
    found = predict(candidate, deep(count), MACHINE)
    assert found.total == pytest.approx(compiled.time(MACHINE).total, rel=TIME)
    emitted = max(peaks_of(compiled))
    assert found.memory == pytest.approx(emitted, rel=MEMORY)
