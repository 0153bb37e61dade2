"""How many bytes a call reads and writes on one rank: its operands and results, but for calls that say otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import op
from autopar.ir.program import record

_aten = torch.ops.aten

# Of their first operand these read as much as they give.
LOOKUPS = frozenset(
    (op("embedding"), op("pick"), _aten.embedding.default, _aten.gather.default, _aten.index_select.default)
)
# Times that a kernel goes through memory as large as its largest operand, in float32 or wider:
# runtime/kernels/loss_kernels.py reads a piece of rows once or twice, and writes exponentials into a buffer. What it
# does there finds the buffer in a cache.
PASSES: Mapping[Any, int] = MappingProxyType({op("logsumexp"): 3, op("cross_entropy_backward"): 3})
WIDE = 4
# Times that their calls on a CPU go through memory as large as the result, but for calls that write over what was just
# written: runtime/kernels/norm_kernels.py takes them apart there.
APART: Mapping[Any, int] = MappingProxyType({op("rms_norm"): 5, op("rms_norm_backward"): 13})
# Gradients of norms, whose kernels sum over rows and over columns.
NORMS = frozenset((op("rms_norm_backward"), _aten.native_layer_norm_backward.default))
# Gradients that are written over an operand, of which nothing else is left: they need no memory of their own.
OVER = frozenset((op("cross_entropy_backward"),))


def moved_bytes(node: fx.Node, operands: Sequence[fx.Node], sizes: Mapping[fx.Node, int]) -> float:
    """operands: of the node. sizes: bytes of each value on one rank."""
    read = [sizes[operand] for operand in operands]
    if node.target in PASSES:
        largest = max(operands, key=lambda operand: sizes[operand])
        width = record(largest).type.dtype.itemsize
        return float(PASSES[node.target] * sizes[largest] / width * max(WIDE, width))
    if node.target in LOOKUPS:
        read[0] = sizes[node]
    return float(sizes[node] + sum(read))
