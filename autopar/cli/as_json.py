"""What `--json` of inspect and explain prints (docs/cli.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.compiled import Compiled
from autopar.compiler.lowered import Collective
from autopar.ir.mesh import PIPELINE
from autopar.report.explanation import Explanation


def inspected(compiled: Compiled, rank: int) -> Mapping[str, Any]:
    """A rank's collectives and the bytes that it holds in a step."""
    place, memory = compiled.mesh.coord(rank).get(PIPELINE, 0), compiled.memory(rank)
    return {
        "mesh": str(compiled.mesh),
        "rank": rank,
        "ranks": compiled.mesh.size,
        "peak_bytes": memory.peak,
        "collectives": [_collective(row) for row in compiled.collectives if row.place == place],
        "notes": list(compiled.notes),
    }


def explained(found: Explanation, compiled: Compiled) -> Mapping[str, Any]:
    """What decided a value's layout, and what it moves."""
    return {
        "name": found.name,
        "kind": found.kind,
        "head": found.head,
        "places": list(found.places),
        "decisions": [
            {
                "axis": each.axis, "size": each.size, "state": each.state, "by": each.by, "because": each.because,
                "alternatives": [
                    {"layout": str(one.layout), "verdict": one.verdict, "cost": one.cost, "moved_bytes": one.moved,
                     "why": one.why} for one in each.alternatives
                ],
            }
            for each in found.decisions
        ],
        "parts": [
            {"name": one.name, "kind": one.kind, "type": one.type, "layout": str(one.layout)} for one in found.parts
        ],
        "collectives": [{"link": each.link, **_collective(each.row)} for each in found.collectives],
        "groups": list(found.groups),
        "notes": list(compiled.notes),
    }  # fmt: skip


def _collective(row: Collective) -> dict[str, Any]:
    return {
        "op": row.op, "axis": row.axis, "bytes": row.bytes, "shape": list(row.shape), "value": row.value,
        "module": row.module, "source": row.source, "reason": row.reason, "phase": row.phase, "graph": row.graph,
        "times": row.times,
    }  # fmt: skip
