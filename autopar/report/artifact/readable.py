"""A program as Python: what a person reads of a saved program. Nothing ever imports it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.fused import fused_of
from autopar.ir.ops.names import target_name
from autopar.ir.ops.ops import is_collective
from autopar.ir.program import Program, Record, record
from autopar.ir.text.text import print_result, quote

_BOUND = ("aten.", "autopar.", "operator.")  # by the header
_HEADER = '''"""Graph '{graph}' of rank {ranks} on mesh {mesh}, for reading.

autopar loads the JSON file of the same name, never this one. A comment gives a value's shape on a rank `of` its global
shape where they differ, its layout, the module and the source line that it comes from.
"""

import operator

import torch
from torch import inf, nan

aten = torch.ops.aten
autopar = torch.ops.autopar


def {graph}(
'''


def python_text(program: Program, graph: str, ranks: str) -> str:
    """The source of a function of torch calls, with comments."""
    return "".join(_lines(program, graph, ranks))


def _lines(program: Program, graph: str, ranks: str) -> Iterator[str]:
    yield _HEADER.format(graph=graph, ranks=ranks, mesh=str(program.mesh) or "of one rank")
    for node, entry in program.entries:
        names = ", ".join(map(quote, entry.names))
        yield f"    {node.name},  # {entry.kind} {names}: {_value(record(node), program)}\n"
    yield "):\n"
    for note in program.notes:
        yield f"    # note: {_one_line(note)}\n"
    phase = "forward"
    for node in program.calls():
        known = record(node)
        if known.phase != phase:
            phase = known.phase
            yield f"\n    # {phase}\n"
        if is_collective(node.target):
            yield f"    # {_one_line(known.reason) or 'collective'}\n"
            why = ""
        else:
            why = known.reason
        place = [_value(known, program), _one_line(known.module), _one_line(known.source)]
        if known.made_by != "capture":
            place.append(f"by {_one_line(known.made_by)}")
        if why:
            place.append(_one_line(why))
        yield from _body(node, program)
        yield f"    {node.name} = {_call(node)}  # {'  '.join(filter(None, place))}\n"
    yield "    return (\n"
    for result, output in program.leaving:
        yield f"        {_argument(result)},  # {output.kind} {quote(output.name)}\n"
    yield "    )\n"


def _body(node: fx.Node, program: Program) -> Iterator[str]:
    """The function of a group."""
    fused = fused_of(node)
    if fused is None:
        return
    operands = ", ".join(operand.name for operand in fused.placeholders)
    yield f"\n    def {_function_of(node)}({operands}):  # one kernel of kind {fused.kind}\n"
    for call in fused.calls:
        known = record(call)
        place = [_value(known, program), _one_line(known.module), _one_line(known.source)]
        yield f"        {call.name} = {_call(call)}  # {'  '.join(filter(None, place))}\n"
    yield f"        return {_argument(fused.results)}\n\n"


def _function_of(node: fx.Node) -> str:
    return f"{node.name}_calls"


def _value(known: Record, program: Program) -> str:
    return print_result(known, program.level, program.mesh)


def _one_line(text: str) -> str:
    """Text that cannot leave its comment."""
    return text if text.isprintable() else quote(text).encode("ascii", "backslashreplace").decode()


def _call(node: fx.Node) -> str:
    arguments = [_argument(arg) for arg in node.args]
    arguments += [f"{key}={_argument(arg)}" for key, arg in node.kwargs.items() if not isinstance(arg, torch.device)]
    if fused_of(node) is not None:
        return f"{_function_of(node)}({', '.join(arguments)})"
    name = target_name(node.target)
    name = name if name.startswith(_BOUND) else f"torch.ops.{name}"
    return f"{name}({', '.join(arguments)})"


def _argument(value: Any) -> str:
    match value:
        case fx.Node():
            return value.name
        case float() if not math.isfinite(value):
            return str(value)
        case list():
            return f"[{', '.join(map(_argument, value))}]"
        case tuple():
            return f"({', '.join(map(_argument, value))}{',' if len(value) == 1 else ''})"
        case torch.device():
            return "None"
    return repr(value)


def rank_ranges(ranks: tuple[int, ...]) -> str:
    """`0-3,6`: rank numbers, runs of them as first-last."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranges(text: str, mesh: Mesh) -> tuple[int, ...]:
    """The inverse of `rank_ranges`; raises ValueError for what is not ranks of the mesh."""
    ranks: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        start, stop = int(first), int(last or first)
        if not 0 <= start <= stop < mesh.size:
            raise ValueError(f"'{run}' is not among the ranks of mesh '{mesh}'")
        ranks += range(start, stop + 1)
    return tuple(ranks)
