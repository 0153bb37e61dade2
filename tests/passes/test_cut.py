"""The cut is the best one: against all cuts of small models, and on what a later program must keep to."""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch
from pipeline_case import compiled_as, subject
from torch import Tensor, nn

from autopar.capture import capture
from autopar.compiler.meshes import mesh_of
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import run_passes
from autopar.passes.pipeline.cuts.cut import ForwardLine, StageLimits, cut, forward_nodes
from autopar.passes.pipeline.cuts.when import When, times_of


class Uneven(nn.Module):
    """Layers of very different work, and skips of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 64, 8, 128, 16, 16, 8)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x))
            if i == 1:
                x = x + first
        return x


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@cache
def program_of(microbatches: int) -> Program:
    torch.manual_seed(0)
    captured = capture(Uneven(), square, (torch.randn(512, 8),), {})
    return run_passes(captured.program, Plan(mesh_of("pp=2"), options=StepOptions(microbatches=microbatches)))[-1][1]


def line_of(limits: StageLimits, microbatches: int = 2) -> ForwardLine:
    program = program_of(microbatches)
    return ForwardLine(program, times_of(program, microbatches), limits)


def all_cuts(line: ForwardLine, stages: int) -> list[tuple[float, float, list[int]]]:
    """(time of the slowest stage, sum of squared times, borders) of every cut."""
    end = len(line.places) - 1
    found = []
    for inner in itertools.combinations(range(1, end), stages - 1):
        borders = [*inner, end]
        costs = [
            float(line._cost(stage, border)[start])
            for stage, (start, border) in enumerate(itertools.pairwise([0, *borders]))
        ]
        found.append((max(costs), sum(cost**2 for cost in costs), borders))
    return found


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("memory", [None, 300_000])
def test_no_cut_is_better(stages: int, memory: int | None):
    line = line_of(StageLimits([stages - i for i in range(stages)], memory))
    assert len(line.places) > 8
    cuts = all_cuts(line, stages)
    slowest, _ = line.best(stages, math.inf)
    assert slowest == pytest.approx(min(one[0] for one in cuts))
    if math.isinf(slowest):
        return
    limit = slowest * (1 + 1e-9)
    squares, borders = line.best(stages, limit)
    assert squares == pytest.approx(min(one[1] for one in cuts if one[0] <= limit))
    assert any(one[2] == borders and one[0] <= limit for one in cuts)


@pytest.mark.parametrize("stages", [3, 4])
def test_the_slowest_stage_counts_before_how_even_they_are(stages: int):
    program = program_of(2)
    times, limits = times_of(program, 2), StageLimits([1] * stages)
    line = ForwardLine(program, times, limits)
    cuts = all_cuts(line, stages)
    slowest = min(one[0] for one in cuts)
    *_, borders = min((one for one in cuts if one[0] <= slowest * (1 + 1e-9)), key=lambda one: one[1])
    assert min(cuts, key=lambda one: one[1])[0] > 1.05 * slowest, "the evenest is slower"
    assert cut(program, times, stages, limits) == line.stages(borders)


def test_memory_matters():
    """Less of it never makes a step faster, and some amounts cost time."""
    times = [
        line_of(StageLimits([20, 1], memory)).best(2, math.inf)[0] for memory in range(150_000, 6_000_000, 650_000)
    ]
    free = line_of(StageLimits([20, 1])).best(2, math.inf)[0]
    assert times == sorted(times, reverse=True) and times[0] == math.inf and times[-1] == free
    assert any(free < time < math.inf for time in times), times


def test_a_stage_may_hold_all_that_there_is():
    """What fits to the byte fits; a byte less does not."""
    flying = [20, 1]
    free = line_of(StageLimits(flying))
    time, borders = free.best(2, math.inf)
    held = [
        free.held[end] - free.held[start] + count * (free.saved[end] - free.saved[start])
        for count, (start, end) in zip(flying, itertools.pairwise([0, *borders]), strict=True)
    ]
    assert line_of(StageLimits(flying, int(max(held)))).best(2, math.inf)[0] == time
    assert line_of(StageLimits(flying, int(max(held)) - 1)).best(2, math.inf)[0] > time


def test_a_later_program_keeps_parameters_where_they_are():
    """However unbalanced that is."""
    owners = {f"layers.{i}.{kind}": int(i >= 5) for i in range(6) for kind in ("weight", "bias")}
    line = line_of(StageLimits([2, 1], owners=owners))
    borders = line.best(2, math.inf)[1]
    stages = line.stages(borders)
    by_module: dict[str, set[int]] = {}
    for node, stage in stages.items():
        by_module.setdefault(node.meta["autopar"].module, set()).add(stage)
    assert by_module["layers.4"] == {0} and by_module["layers.5"] == {1}


def test_every_forward_node_has_a_stage_and_values_flow_forwards():
    pipeline = compiled_as("pp=4", 4).pipeline
    assert pipeline is not None
    program = run_passes(subject().captured.program, Plan(mesh_of("pp=4"), options=StepOptions(microbatches=4)))[-1][1]
    times = times_of(program, 4)
    forward = {node.name for node in forward_nodes(program, times)}
    owners: dict[str, int] = {}
    for (stage, kind), graph in pipeline.graphs.items():
        for node in graph.calls():
            if kind == "F" and node.name in forward:
                owners.setdefault(node.name, stage)
    assert owners.keys() == forward
    for node in forward_nodes(program, times):
        for operand in node.all_input_nodes:
            if times.of[operand] is When.BODY:
                assert owners[operand.name] <= owners[node.name]
