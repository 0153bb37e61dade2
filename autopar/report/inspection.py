"""What `autopar inspect` shows: the table of collectives, and the bytes that a rank holds.

`inspection_pipeline.py` has what only pipelines have.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.compiler.lowered import Lowered
from autopar.ir.mesh import PIPELINE
from autopar.ir.ops.measure import human, local_bytes
from autopar.ir.ops.storage import kept_values
from autopar.ir.program import Program, record
from autopar.ir.text.text_tables import table_text


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
    for node, entry in program.entries:
        if entry.kind in kinds:
            kinds[entry.kind] += local_bytes(node, program.mesh)
    gradients = sum(
        local_bytes(node, program.mesh) for node, out in program.leaving if node is not None and out.kind == "gradient"
    )
    activations = sum(local_bytes(node, program.mesh) for node in kept_values(program))
    return Memory(kinds["parameter"], gradients, kinds["buffer"], activations)


def collectives_text(compiled: Lowered, rank: int = 0, graph: str | None = None) -> str:
    """All collectives of a rank's step (or of one of its graphs), a line each, with their bytes and reasons."""
    place, staged = compiled.mesh.coord(rank).get(PIPELINE, 0), compiled.pipeline is not None
    heads = ("op", "axis", "bytes", "shape", "value", "module", "source", "reason")
    chosen = [row for row in compiled.collectives if row.place == place and graph in (None, row.graph)]
    rows = [
        (row.op, row.axis, human(row.bytes), "x".join(map(str, row.shape)) or "scalar", f"%{row.value}", row.module,
         row.source, row.reason) for row in chosen
    ]  # fmt: skip
    if not staged and all(row.times == 1 for row in chosen):
        return table_text(heads, rows)
    if not staged:  # the messages of a ring
        return table_text(("times", *heads), [(f"{one.times}x", *row) for one, row in zip(chosen, rows, strict=True)])
    begins = [(row.graph, f"{row.times}x") for row in chosen]
    return table_text(("graph", "times", *heads), [(*begin, *row) for begin, row in zip(begins, rows, strict=True)])


def bytes_text(memory: Memory) -> str:
    """The bytes that a rank holds, a line a kind."""
    rows = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "buffers": memory.buffers,
        "activations kept for the backward pass": memory.activations,
    }
    return "\n".join(f"{name:40}{human(bytes_):>10}" for name, bytes_ in rows.items())


def batch_text(compiled: Lowered) -> str:
    """The tensors of a batch of which the user said where samples are counted, a line each; nothing if nothing was."""
    said = compiled.plan.batch_dims
    lines = []
    for node, entry in compiled.history[0][1].entries if said is not None else ():
        if entry.kind == "batch" and said is not None:
            dim = said.get(entry.name)
            how = "shared by all ranks" if dim is None else f"dim {dim} counts samples"
            lines.append(f"{entry.name:>3} {list(record(node).type.shape)!s:20} {how}")
    return "\n".join(lines)
