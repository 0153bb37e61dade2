"""Golden programs: what a pass makes of a small one, as text, compared and executed.

`tests/passes/golden/<pass>/<case>.txt` holds a title, the plan (see `plan_text.py`), a program, `---`, and the program
after the pass. `make golden` writes the latter anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from plan_text import read_plan
from torch import Tensor, fx

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.ir.check.check_levels import verify
from autopar.ir.layout import combine, local_part, replica_error
from autopar.ir.ops.fused import fused_of
from autopar.ir.ops.ops import is_mesh_op
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Level, Program, record
from autopar.ir.text.text import parse_program, print_program
from autopar.parallel.tensors.padding import beginning, pad_to
from autopar.passes import PASSES
from autopar.passes.collectives.check_rules import check_rules
from autopar.runtime.executor.executor import Executable
from autopar.runtime.ranks.virtual import VirtualMesh

FOLDER = Path(__file__).parent / "golden"
CASES = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/*.txt"))
STEPS = {step.__name__: (step, level) for step, level in PASSES}


@dataclass(frozen=True)
class Case:
    """One file; `head` is all that stands before the program."""

    title: str
    head: str
    plan: Plan
    given: str
    expected: str

    @property
    def text(self) -> str:
        return f"{self.head}{self.given}---\n{self.expected}"


def read(name: str) -> Case:
    lines = (FOLDER / f"{name}.txt").read_text().splitlines(keepends=True)
    start = next(i for i, line in enumerate(lines) if " program" in line and line.split()[0] in Level.__members__)
    cut = lines.index("---\n")
    head, given, expected = ("".join(part) for part in (lines[:start], lines[start:cut], lines[cut + 1 :]))
    return Case(lines[0].strip(), head, read_plan(lines[1:start]), given, expected)


def passed(name: str, case: Case) -> Program:
    """The program after the pass of the folder that the case lies in; its promises hold."""
    step, level = STEPS[name.split("/")[0]]
    program = step(parse_program(case.given), case.plan)
    verify(program, level)
    if level == Level.SHARDED:
        check_rules(program, case.plan)
    return program


@pytest.mark.parametrize("name", CASES)
def test_golden_text(name: str) -> None:
    if name in ("reroll/largest", "reroll/written") and not torch.__version__.startswith("2.13"):
        pytest.skip("the names of what is new are those of torch 2.13")
    case = read(name)
    made = print_program(passed(name, case))
    if os.environ.get("AUTOPAR_GOLDEN") == "write":
        (FOLDER / f"{name}.txt").write_text(Case(case.title, case.head, case.plan, case.given, made).text)
        return
    assert made == case.expected, f"{name} ({case.title}): read the diff; `make golden` takes it over"


@pytest.mark.parametrize("name", CASES)
def test_golden_round_trip(name: str) -> None:
    case = read(name)
    for text in (case.given, case.expected):
        assert print_program(parse_program(text)) == text


@pytest.mark.parametrize("name", CASES)
def test_golden_is_pure(name: str) -> None:
    """The same twice, and the given program is as it was."""
    case = read(name)
    program = parse_program(case.given)
    step, _ = STEPS[name.split("/")[0]]
    assert print_program(step(program, case.plan)) == print_program(step(program, case.plan))
    assert print_program(program) == case.given


ASKED_FOR = ("chunk_loss", "fuse", "host_parameters", "offload", "own_views", "precision", "recompute")


@pytest.mark.parametrize("name", [name for name in CASES if name.split("/")[0] in ASKED_FOR])
def test_what_nobody_asked_for_changes_nothing(name: str) -> None:
    """Without its option a pass gives the very program that it was given."""
    case = read(name)
    program = parse_program(case.given)
    step, _ = STEPS[name.split("/")[0]]
    assert step(program, replace(case.plan, options=StepOptions())) is program


@pytest.mark.parametrize("name", CASES)
def test_golden_program_computes_the_same(name: str) -> None:
    """The program before and the text after the pass, on random numbers."""
    case = read(name)
    compare(case.given, case.expected, case.plan, seed=sum(map(ord, name)))


def compare(given: str, expected: str, plan: Plan, seed: int) -> None:
    print(f"seed {seed}")
    before, after = parse_program(given), parse_program(expected)
    random = torch.Generator().manual_seed(seed)
    rounds = plan.options.sums_dtype is not None
    if not rounds:
        before, after = in_float64(before), in_float64(after)
    inputs = [draw(record(node).type.shape, record(node).type.dtype, random, rounds) for node in before.placeholders]
    want = on_mesh(before, inputs) if before.level == Level.LOCAL else on_one_device(before, inputs)
    stored = [pad_to(x, record(node).type.shape) for x, node in zip(inputs, after.placeholders, strict=True)]
    got = on_mesh(lowered(after, plan), stored)
    assert len(want) == len(got) == len(after.outputs) > 0
    for out, a, b in zip(after.outputs, want, got, strict=True):
        b = beginning(b, a.shape)
        if rounds:
            assert (b - a).norm() < 0.03 * a.norm(), f"{out} is {b}, not {a}"
        else:
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12, msg=lambda text, out=out: f"{out}: {text}")
        assert not a.is_floating_point() or a.norm() > 1e-6, f"{out} is zero: nothing was compared"


def in_float64(program: Program) -> Program:
    """What makes float32 numbers of its own makes float64, as `draw` does: a value is written over by its dtype."""
    bodies = [fused.calls for node in program.calls() if (fused := fused_of(node)) is not None]
    for node in (*program.calls(), *(call for calls in bodies for call in calls)):
        if node.kwargs.get("dtype") is torch.float32:
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
    return program


def draw(shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator, rounds: bool = False) -> Tensor:
    """Floats are float64, so that only rounding differs, but under a precision; integers are indices into four rows or
    more."""
    if dtype.is_floating_point and rounds:
        return torch.randn(shape, generator=random, dtype=dtype) / 2  # a softmax of large numbers enlarges rounding
    if dtype.is_floating_point:
        return torch.randn(shape, generator=random, dtype=torch.float64)
    return torch.randint(0, 4, shape, generator=random)


def on_one_device(program: Program, inputs: list[Tensor]) -> list[Tensor]:
    """What a program above LOCAL means: global shapes, and a move changes no logical value."""
    values: dict[fx.Node, object] = {}
    given = iter(inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            target: Callable[..., object] = node.target  # type: ignore[assignment]
            values[node] = args[0] if is_mesh_op(node.target) else target(*args, **kwargs)
    return [values[node] for node in program.results if node is not None]  # type: ignore[misc]


def lowered(program: Program, plan: Plan) -> Program:
    """Through the passes that are left until it can run."""
    for step, level in PASSES:
        if level > program.level:
            program = step(program, plan)
            verify(program, level)
    return program


def on_mesh(program: Program, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of all ranks, put together; replicas agree."""
    mesh = program.mesh
    layouts = [record(node).layout for node in program.placeholders]
    given = [
        [local_part(value, layout, mesh, coord) for value, layout in zip(inputs, layouts, strict=True)]
        for coord in mesh.coords()
    ]
    ranks = VirtualMesh(mesh).run(Executable(program.graph), given)
    found = []
    for place, layout in enumerate(record(program.graph.output_node()).operands):
        parts = [rank[place] for rank in ranks]
        assert replica_error(parts, layout, mesh) == 0.0
        found.append(combine(parts, layout, mesh))
    return found


def test_golden_has_cases_of_every_pass() -> None:
    for step, _ in PASSES:
        assert sum(name.startswith(f"{step.__name__}/") for name in CASES) >= 4, step.__name__


def test_golden_execution_notices_a_wrong_text() -> None:
    """Test the tester: the all-reduce is taken out of an expected text, and nobody says that it was needed."""
    case = read("reshard/row_parallel")
    lines = [line for line in case.expected.splitlines() if "= autopar.all_reduce" not in line]
    wrong = "\n".join(lines).replace("%all_reduce", "%einsum") + "\n"
    with pytest.raises(AssertionError):
        compare(case.given, wrong, case.plan, seed=1)
