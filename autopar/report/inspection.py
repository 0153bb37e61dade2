"""What `autopar inspect` shows: the table of collectives, and the bytes that a rank holds.

`inspection_pipeline.py` has what only pipelines have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.compiler.compiled import Compiled
from autopar.ir.layout import local_shape
from autopar.ir.plan import PIPELINE
from autopar.ir.program import Program, kept_values, record


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank. `activations`: what the forward pass leaves for the backward pass."""

    parameters: int
    gradients: int
    buffers: int
    activations: int


def memory_of(program: Program) -> Memory:
    """Count the bytes of a LOCAL program by the layouts of its values."""
    kinds = {"parameter": 0, "buffer": 0}
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        if entry.kind in kinds:
            kinds[entry.kind] += bytes_of(node, program)
    gradients = sum(
        bytes_of(node, program)
        for node, out in zip(program.results, program.outputs, strict=True)
        if node is not None and out.kind == "gradient"
    )
    activations = sum(bytes_of(node, program) for node in kept_values(program))
    return Memory(kinds["parameter"], gradients, kinds["buffer"], activations)


def bytes_of(node: fx.Node, program: Program) -> int:
    """The bytes of a rank's part of all results of a node."""
    total = 0
    for type_, layout in zip(record(node).types, record(node).layouts, strict=False):
        if type_ is not None and layout is not None:
            numel = 1
            for size in local_shape(type_.shape, layout, program.mesh):
                numel *= size
            total += numel * type_.dtype.itemsize
    return total


def collectives_text(compiled: Compiled, rank: int = 0, graph: str | None = None) -> str:
    """All collectives of a rank's step (or of one of its graphs), a line each, with their bytes and reasons."""
    place, staged = compiled.mesh.coord(rank).get(PIPELINE, 0), compiled.pipeline is not None
    heads = ("op", "axis", "bytes", "shape", "value", "module", "source", "reason")
    chosen = [row for row in compiled.collectives if row.place == place and graph in (None, row.graph)]
    rows = [
        (row.op, row.axis, human(row.bytes), "x".join(map(str, row.shape)) or "scalar", f"%{row.value}", row.module,
         row.source, row.reason) for row in chosen
    ]  # fmt: skip
    if not staged:
        return table_text(heads, rows)
    begins = [(row.graph, f"{row.times}x") for row in chosen]
    return table_text(("graph", "times", *heads), [(*begin, *row) for begin, row in zip(begins, rows, strict=True)])


def table_text(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what they hold; the last one is as long as it is."""
    widths = [max(len(line[i]) for line in (heads, *rows)) for i in range(len(heads) - 1)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in (heads, *rows)
    )


def bytes_text(memory: Memory) -> str:
    """The bytes that a rank holds, a line a kind."""
    rows = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "buffers": memory.buffers,
        "activations kept for the backward pass": memory.activations,
    }
    return "\n".join(f"{name:40}{human(bytes_):>10}" for name, bytes_ in rows.items())


def human(bytes_: float) -> str:
    """`12.6 MB`: bytes as a person reads them (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if bytes_ < 1000 or unit == "TB":
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    raise AssertionError
