"""Golden pipelines: what becomes of a small captured program, as text, compared and executed.

`tests/passes/golden_pipeline/<case>.txt` holds a title, the plan (see `plan_text.py`), a CAPTURED program, `---`, and
every graph and list of the pipeline. `make golden` writes the latter anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from plan_text import read_plan
from test_golden import draw, on_one_device
from torch import Tensor

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.compiled import Compiled
from autopar.ir.layout import Layout, combine, local_part, replica_error
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.program import Input, record
from autopar.ir.text.text import parse_program, print_program
from autopar.passes import make_pipeline, run_passes
from autopar.runtime.executor.inputs import inputs_of, slots_of
from autopar.runtime.pipeline.run_pipeline import compile_rank
from autopar.runtime.ranks.virtual import VirtualMesh

FOLDER = Path(__file__).parent / "golden_pipeline"
CASES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@dataclass(frozen=True)
class Case:
    head: str
    plan: Plan
    given: str
    expected: str


def read(name: str) -> Case:
    lines = (FOLDER / f"{name}.txt").read_text().splitlines(keepends=True)
    start, cut = lines.index("CAPTURED program\n"), lines.index("---\n")
    head, given, expected = ("".join(part) for part in (lines[:start], lines[start:cut], lines[cut + 1 :]))
    return Case(head, read_plan(lines[1:start]), given, expected)


def compiled(case: Case) -> Compiled:
    history = run_passes(parse_program(case.given), case.plan)
    return Compiled(case.plan, history, make_pipeline(history[-1][1], case.plan))


def text_of(pipeline: Pipeline) -> str:
    graphs = [f"graph {stage}{kind}\n{print_program(graph)}" for (stage, kind), graph in pipeline.graphs.items()]
    lists = []
    for rank, instructions in enumerate(pipeline.lists):
        lists.append(f"rank {rank}\n")
        for line in instructions:
            frees = f"   # frees {', '.join(line.frees)}" if line.frees else ""
            lists.append(f"  {line}{frees}\n")
    return "".join((*graphs, *lists))


@pytest.mark.parametrize("name", CASES)
def test_text(name: str):
    case = read(name)
    pipeline = compiled(case).pipeline
    assert pipeline is not None
    made = text_of(pipeline)
    if os.environ.get("AUTOPAR_GOLDEN") == "write":
        (FOLDER / f"{name}.txt").write_text(f"{case.head}{case.given}---\n{made}")
        return
    assert made == case.expected, f"{name}: read the diff; `make golden` takes it over"


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_computes_the_same(name: str):
    case = read(name)
    found, captured = compiled(case), parse_program(case.given)
    pipeline, program = found.pipeline, found.program
    assert pipeline is not None
    random = torch.Generator().manual_seed(sum(map(ord, name)))
    values = {entry: draw(record(node).type.shape, record(node).type.dtype, random) for node, entry in captured.entries}

    def part_of(entry: Input, layout: Layout, coord: Mapping[str, int]) -> Tensor:
        return local_part(values[entry], layout, program.mesh, coord)

    given = [inputs_of(slots_of(program, pipeline, coord), part_of) for coord in found.mesh.coords()]
    codes = [compile_rank(pipeline, place) for place in range(pipeline.flow.size)]
    finals = VirtualMesh(found.mesh).run_pipeline(codes, given)
    wanted = on_one_device(captured, list(values.values()))
    layouts = record(program.graph.output_node()).operands
    for out, layout, want in zip(captured.outputs, layouts, wanted, strict=True):
        parts = [rank[out.kind, out.name] for rank in finals if (out.kind, out.name) in rank]
        held = found.mesh if len(parts) == found.mesh.size else case.plan.mesh_of_stage
        assert replica_error(parts, layout, held) == 0.0
        torch.testing.assert_close(combine(parts, layout, held), want, rtol=1e-12, atol=1e-12)
        assert not want.is_floating_point() or want.norm() > 1e-6


def test_there_are_cases():
    assert len(CASES) >= 4
