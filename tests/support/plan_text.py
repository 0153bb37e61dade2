"""Plans as golden files and docstrings write them: a line a field."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autopar.ir.layout import Layout, parse_layout
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.options import StepOptions, read_dtype
from autopar.ir.plan import Fixed, Plan
from autopar.machines import Machine


def read_plan(lines: Iterable[str], mesh: Mesh | None = None) -> Plan:
    """The plan of lines such as `mesh: dp=2,tp=2`, `layout: up.weight [tp,-]`, `zero: 3`, `microbatches: 2`,
    `machine: 4e8 2e6 1e5 10 2`.

    mesh: the one that counts if no line says it.
    """
    layouts: dict[str, Layout] = {}
    plan, options = Plan(mesh or Mesh(())), dict[str, Any]()
    for line in lines:
        key, _, value = line.strip().partition(": ")
        if key == "mesh":
            plan = replace(plan, mesh=parse_mesh(value))
        elif key == "layout":
            parameter, _, layout = value.partition(" ")
            layouts[parameter] = parse_layout(layout)
        elif key == "reduce_dtype":
            options[key] = read_dtype(value)
        elif key in ("compile", "schedule", "precision", "attention"):
            options[key] = value
        elif key == "machine":  # its figures, in the order of its fields
            plan = replace(plan, fixed=Fixed(machine=Machine.flat(*map(float, value.split()))))
        else:
            assert key in (
                "bucket_bytes",
                "chunked_loss",
                "horizon",
                "microbatches",
                "offload",
                "recompute",
                "slices",
                "zero",
            ), line
            options[key] = ast.literal_eval(value)
    return replace(plan, layouts=layouts, options=StepOptions(**options))
