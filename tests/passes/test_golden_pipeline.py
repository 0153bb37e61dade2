"""Golden pipelines: what becomes of a small captured program, as text, compared and executed.

`tests/passes/golden_pipeline/<case>.txt` holds a title, the plan (`mesh:`, `microbatches:`, `schedule:`), a CAPTURED
program, `---`, and every graph and list of the pipeline. `make golden` writes the latter anew.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from test_golden import draw, on_one_device
from torch import Tensor

import autopar.runtime.kernels  # noqa: F401  registers the kernels of our ops
from autopar.compiled import Compiled
from autopar.compiler.meshes import mesh_of
from autopar.ir.layout import Layout, combine, local_part, replica_error
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Input, record
from autopar.ir.text import parse_program, print_program
from autopar.passes import make_pipeline, run_passes
from autopar.runtime.inputs import inputs_of, slots_of
from autopar.runtime.pipeline import compile_rank
from autopar.runtime.virtual import VirtualMesh

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
    said = dict(line.strip().split(": ", 1) for line in lines[1:start])
    options = StepOptions(schedule=said["schedule"], microbatches=int(said["microbatches"]))
    plan = Plan(mesh_of(said["mesh"]), options=options)
    return Case(*("".join(lines[:start]), plan), *("".join(lines[a:b]) for a, b in ((start, cut), (cut + 1, None))))


def compiled(case: Case) -> Compiled:
    history = run_passes(parse_program(case.given), case.plan)
    return Compiled(case.plan, history, make_pipeline(history[-1][1], case.plan))


def text_of(found: Compiled) -> str:
    assert found.pipeline is not None
    graphs = [f"graph {stage}{kind}\n{print_program(graph)}" for (stage, kind), graph in found.pipeline.graphs.items()]
    lists = []
    for rank, instructions in enumerate(found.pipeline.lists):
        lists.append(f"rank {rank}\n")
        for line in instructions:
            frees = f"   # frees {', '.join(line.frees)}" if line.frees else ""
            lists.append(f"  {line}{frees}\n")
    return "".join((*graphs, *lists))


@pytest.mark.parametrize("name", CASES)
def test_text(name: str):
    case = read(name)
    made = text_of(compiled(case))
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
