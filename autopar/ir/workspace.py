"""Memory that kernels work in beside operands and results: logits are widened some rows at a time."""

from __future__ import annotations

from torch import fx

from autopar.ir.measure import local_bytes
from autopar.ir.mesh import Mesh
from autopar.ir.ops import op
from autopar.ir.program import operand_nodes, record

PIECE_BYTES, PIECE_BYTES_CPU = 1 << 26, 1 << 20  # of rows in float32; off the CPU a launch must be worth its while
WIDE = 4  # bytes of an element
LOGITS = {op("logsumexp"): 0, op("cross_entropy_backward"): 1}  # with the place of the logits among the operands


def widened_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes of a call's logits in float32, of which a kernel makes `PIECE_BYTES` at a time; 0 for calls that work in
    their result. What is wide already a gradient is computed in."""
    place = LOGITS.get(node.target)  # type: ignore[arg-type]
    if place is None:
        return 0
    logits = operand_nodes(node)[place]
    short = record(logits).type.dtype.itemsize
    return local_bytes(logits, mesh) * WIDE // short if place == 0 or short < WIDE else 0
