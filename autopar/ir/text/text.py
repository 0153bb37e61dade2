"""Programs as text, one line a value; `parse_program(print_program(p))` is `p`, but for devices.

    LOCAL program on dp=2,tp=2
    note: 1 op stays replicated
    %x: f32[4,16] of [8,16] [dp,-] = batch "0"
    %w: f32[16,32] of [16,64] [-,tp] = parameter "up.weight"
    %mm: f32[4,32] of [8,64] [dp,tp] = aten.mm.default(%x, %w)   # up  gpt.py:41
    %sum_1: f32[] [] partial(dp,tp) = aten.sum.default(%mm)   # gpt.py:50
    %all_reduce: f32[] [] partial(tp) = autopar.all_reduce.default(%sum_1, "dp", "sum")   # gpt.py:50  by reshard
    return loss "" = %all_reduce as []

`f32[4,16] of [8,16] [dp,-]` is the local shape, the global one, and the layout; below LOCAL the global shape
stands alone. Several results stand in parentheses, `-` is a result that is no tensor, `?` a missing layout.
`in host` behind a layout: the value lies in the host's memory, or is on its way there.
`%x as [dp,-]` is the layout in which an operand is wanted where that is not the layout which it has. After `#`,
as far as they say something: module path, source line, `backward`, `by` the pass that made it, `from` the
captured value that it holds (if not written: itself, or none if a pass made it), `why: ` the reason.

A group (`ir/ops/fused.py`) stands with its kind and its name, and its body behind it, four spaces in: its operands as
it sees them, its calls, and what it returns. Names in a body are its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Layout, fits, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.ops.fused import fused_of
from autopar.ir.ops.names import dtype_name, target_name
from autopar.ir.program import Input, Level, Program, Record, TensorType, has_record, operand_nodes, record
from autopar.ir.text.parse import BODY, OUTPUT_RECORD, parse_program, usual_origin

__all__ = [
    "diff_programs",
    "diffs",
    "dtype_name",
    "parse_program",
    "print_node",
    "print_program",
    "print_result",
    "print_type",
]

_BARE_MODULE = re.compile(r"(?!backward\Z)[\w.]+\Z")
_BARE_SOURCE = re.compile(r"[^\s\"]*:\d+\Z")
_WORD = re.compile(r"[\w.]+\Z")


def quote(text: str) -> str:
    """A string on one line."""
    return json.dumps(text, ensure_ascii=False)


def print_type(type_: TensorType | None, layout: Layout | None = None, mesh: Mesh | None = None) -> str:
    """`bf16[8,512]`; with a mesh, a layout that splits and its local shape, `bf16[4,512] of [8,512]`."""
    if type_ is None:
        return "-"
    shape = f"[{','.join(map(str, type_.shape))}]"
    if mesh is not None and layout is not None and layout.axes and fits(type_.shape, layout, mesh):
        local = local_shape(type_.shape, layout, mesh)
        shape = f"[{','.join(map(str, local))}] of {shape}"
    return dtype_name(type_.dtype) + shape


def print_result(known: Record, level: Level, mesh: Mesh) -> str:
    """Types and layouts of a node's results, as they are spelled at a level."""
    layouts = known.layouts or (None,) * len(known.types)
    no_tensor = not any(known.types)
    items = []
    for type_, layout in zip(known.types, layouts, strict=True):
        text = print_type(type_, layout, mesh if level >= Level.LOCAL else None)
        if layout is not None:
            text += f" {layout}"
        elif bool(known.layouts) != (level >= Level.SHARDED) if no_tensor else (known.layouts and type_):
            text += " ?"
        items.append(text)
    if not known.several and len(items) <= 1:
        return items[0] if items else "nothing"
    assert known.several, items
    return f"({', '.join(items)})"


def _tier(known: Record) -> str:
    """Where a value lies, if not on the device."""
    return f" in {known.tier}" if known.tier else ""


def print_argument(value: Any, wanted: Iterator[str] | None = None) -> str:
    """One argument of a call. `wanted` gives, operand by operand, what is written after it."""
    match value:
        case fx.Node():
            tail = next(wanted) if wanted is not None and record(value).is_tensor else ""
            return f"%{value.name}{tail}"
        case None | True | False | int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else str(value)
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
        case str():
            return quote(value)
        case list() | tuple():
            inner = ", ".join(print_argument(item, wanted) for item in value)
            if isinstance(value, list):
                return f"[{inner}]"
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case torch.dtype():
            return dtype_name(value)
        case torch.memory_format() | torch.layout():
            return str(value)
        case torch.device():
            return "None"
    raise TypeError(f"an argument of type {type(value).__name__} has no text form: {value!r}")


def _operand_tails(node: fx.Node, known: Record | None) -> tuple[list[str], str]:
    """What is written after each operand, and what the comment says where that cannot carry it."""
    operands = operand_nodes(node)
    nothing = [""] * len(operands)
    if known is None:
        return nothing, ""
    has = [record(operand).layouts[0] if record(operand).layouts else None for operand in operands]
    # what `parse._operands` takes where nothing is written
    usual = tuple(has) if (known.layouts or node.op == "output") and None not in has else ()
    if known.operands == usual:
        return nothing, ""
    if len(known.operands) == len(operands):
        tails = ["" if got == want else f" as {want}" for got, want in zip(has, known.operands, strict=True)]
        if any(tails):
            return tails, ""
    return nothing, "wants " + ("; ".join(map(str, known.operands)) or "nothing")


def _comment(name: str, known: Record, wants: str) -> str:
    fields = []
    if known.module:
        fields.append(known.module if _BARE_MODULE.match(known.module) else f"in {quote(known.module)}")
    if known.source:
        fields.append(known.source if _BARE_SOURCE.match(known.source) else f"at {quote(known.source)}")
    if known.phase != "forward":
        fields.append("backward" if known.is_backward else f"phase {quote(known.phase)}")
    if known.made_by != "capture":
        fields.append(f"by {known.made_by if _WORD.match(known.made_by) else quote(known.made_by)}")
    if known.origin != usual_origin(name, known.made_by):
        fields.append(f"from {known.origin if _WORD.match(known.origin) else quote(known.origin)}")
    if wants:
        fields.append(wants)
    if known.reason:
        plain = known.reason.isprintable() and known.reason == known.reason.strip() and known.reason[0] != '"'
        fields.append(f"why: {known.reason if plain else quote(known.reason)}")
    return f"   # {'  '.join(fields)}" if fields else ""


def print_node(node: fx.Node, program: Program) -> str:
    """The line of one node (not the output). The program gives mesh, level and the inputs."""
    place = program.placeholders.index(node) if node.op == "placeholder" else None
    return _line(node, program, None if place is None else program.inputs[place])


def _call(node: fx.Node, tails: list[str]) -> str:
    assert node.op == "call_function", node.op
    wanted = iter(tails)
    arguments = [print_argument(arg, wanted) for arg in node.args]
    for key, arg in node.kwargs.items():
        if not isinstance(arg, torch.device):
            arguments.append(f"{key}={print_argument(arg, wanted)}")
    fused = fused_of(node)
    name = target_name(node.target) if fused is None else f"fused.{fused.kind} {quote(fused.name)}"
    return f"{name}({', '.join(arguments)})"


def _body(node: fx.Node, program: Program) -> Iterator[tuple[str, str]]:
    """(key, line) of what a group holds."""
    fused = fused_of(node)
    if fused is None:
        return
    for inner in fused.graph.nodes:
        if inner.op == "placeholder":
            line = f"%{inner.name}: {print_result(record(inner), program.level, program.mesh)} = operand"
        elif inner.op == "output":
            line = f"return {', '.join(map(print_argument, fused.results))}"
        else:
            line = _line(inner, program)
        yield f"{node.name}/{inner.name}", f"{BODY}{line}"


def _line(node: fx.Node, program: Program, entry: Input | None = None) -> str:
    known = record(node)
    tails, wants = _operand_tails(node, known)
    if node.op == "output":
        right = "return"
    elif entry is not None:
        right = f"{entry.kind} {', '.join(map(quote, entry.names))}"
    else:
        right = _call(node, tails)
    result = print_result(known, Level.CAPTURED if node.op == "output" else program.level, program.mesh)
    return f"%{node.name}: {result}{_tier(known)} = {right}{_comment(node.name, known, wants)}"


def _lines(program: Program) -> Iterator[tuple[str, str]]:
    """(key, line) of everything in the text; keys are node names, and `return ...` for outputs."""
    mesh = f" on {program.mesh}" if program.mesh.axes else ""
    yield "program", f"{program.level.name} program{mesh}"
    for note in program.notes:
        plain = note.isprintable() and note == note.strip() and note[:1] not in ("", '"')
        yield f"note {note}", f"note: {note if plain else quote(note)}"
    inputs = iter(program.inputs)
    for node in program.graph.nodes:
        if node.op == "output":
            break
        yield node.name, _line(node, program, next(inputs) if node.op == "placeholder" else None)
        yield from _body(node, program)
    output = program.graph.output_node()
    known = record(output) if has_record(output) else None
    tails, wants = _operand_tails(output, known)
    wanted = iter(tails)
    for entry, result in zip(program.outputs, program.results, strict=True):
        what = f"return {entry.kind} {quote(entry.name)}"
        yield what, f"{what} = {print_argument(result, wanted)}"
    if known is not None and (wants or known.with_(operands=()) != OUTPUT_RECORD):
        yield "%return", _line(output, program)


def print_program(program: Program) -> str:
    """The whole program, a line a value."""
    return "\n".join(line for _, line in _lines(program)) + "\n"


def diff_programs(a: Program, b: Program) -> str:
    """What changed from `a` to `b`, node by node: `-` and `+` lines with a little around them; "" if nothing did."""
    return next(diffs((a, b)))


def diffs(programs: Sequence[Program]) -> Iterator[str]:
    """What changed from each program to the next one: each is printed once."""
    old = dict(_lines(programs[0]))
    for before, after in pairwise(programs):
        new = old if after is before else dict(_lines(after))
        yield "" if after is before else _diff(old, new)
        old = new


def _diff(old: dict[str, str], new: dict[str, str]) -> str:
    """What changed between two texts, each as lines by key."""
    gone = iter([key for key in old if key not in new])
    place = {key: i for i, key in enumerate(old)}
    lines: list[str] = []
    removed = next(gone, None)
    for key, line in new.items():
        while removed is not None and key in place and place[removed] < place[key]:
            lines.append(f"- {old[removed]}")
            removed = next(gone, None)
        if old.get(key) == line:
            lines.append(f"  {line}")
        else:
            lines += [f"- {old[key]}"] if key in old else []
            lines.append(f"+ {line}")
    while removed is not None:
        lines.append(f"- {old[removed]}")
        removed = next(gone, None)
    return _around_changes(lines)


def _around_changes(lines: list[str]) -> str:
    """The changed lines and their neighbours; `...` stands for the rest."""
    changed = [i for i, line in enumerate(lines) if not line.startswith("  ")]
    keep = {j for i in changed for j in (i - 1, i, i + 1)}
    shown: list[str] = []
    for i, line in enumerate(lines):
        if i in keep:
            shown.append(line)
        elif not shown or shown[-1] != "...":
            shown.append("...")
    return "\n".join(shown) + "\n" if changed else ""
