"""Plans as golden files and docstrings write them: a line a field."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace

from autopar.ir.layout import Layout, parse_layout
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.plan import DTYPES, Memory, Plan, Staging


def read_plan(lines: Iterable[str], mesh: Mesh | None = None) -> Plan:
    """The plan of lines such as `mesh: dp=2,tp=2`, `layout: up.weight [tp,-]`, `zero: 3`, `microbatches: 2`.

    mesh: the one that counts if no line says it.
    """
    layouts: dict[str, Layout] = {}
    plan, memory = Plan(mesh or Mesh(())), Memory()
    for line in lines:
        key, _, value = line.strip().partition(": ")
        if key == "mesh":
            plan = replace(plan, mesh=parse_mesh(value))
        elif key == "layout":
            parameter, _, layout = value.partition(" ")
            layouts[parameter] = parse_layout(layout)
        elif key == "microbatches":
            plan = replace(plan, microbatches=int(value))
        elif key == "schedule":
            plan = replace(plan, staging=Staging(value))
        elif key == "precision":
            memory = replace(memory, precision=value)
        elif key == "reduce_dtype":
            memory = replace(memory, reduce_dtype=DTYPES[value])
        else:
            assert key in ("bucket_bytes", "recompute", "zero"), line
            memory = replace(memory, **{key: ast.literal_eval(value)})
    return replace(plan, layouts=layouts, memory=memory)
