"""What is done for cp alone is not done without it: the golden programs of these passes stay as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_golden import CASES, STEPS, read

from autopar.ir.mesh import Mesh
from autopar.ir.text.text import parse_program, print_program

OF_CONTEXT = ("reslice", "unslice", "lengthen", "shifts", "scans", "windows")
NAMES = [name for name in CASES if name.partition("/")[0] in OF_CONTEXT]


@pytest.mark.parametrize("name", NAMES)
def test_without_cp_nothing_is_done(name: str) -> None:
    case = read(name)
    axes = tuple((axis, size) for axis, size in case.plan.mesh.axes if axis not in ("cp", "ulysses", "sl"))
    plan = replace(case.plan, mesh=Mesh(axes))
    step, _ = STEPS[name.partition("/")[0]]
    assert print_program(step(parse_program(case.given), plan)) == case.given
