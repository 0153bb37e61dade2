"""How much of causal attention a rank computes: its kernels leave out the blocks of keys that no query of them sees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.layout import Factor, is_mirrored
from autopar.ir.mesh import SLICE, Mesh
from autopar.ir.ops.ops import op
from autopar.ir.ops.ring_ops import RING_ATTENTION, RING_ATTENTION_BACKWARD
from autopar.ir.program import record
from autopar.torch_compat import schema_of

_KERNELS = (op("attention"), op("attention_backward"), RING_ATTENTION, RING_ATTENTION_BACKWARD)
_LENGTH = 2  # the dim of queries and keys


@dataclass(frozen=True, slots=True)
class Pairs:
    """What the rank whose queries lie last computes, as shares of all pairs of a query and a key. before: with keys
    before a run of its queries. squares: of each run with its own keys, half of which are masked. width: of a run.
    ranks: among which queries are divided."""

    before: float
    squares: float
    width: int
    ranks: int


def causal_pairs(node: fx.Node, mesh: Mesh) -> Pairs | None:
    """The pairs of an attention that is causal and has no other mask; None of any other call.

    A rank's queries are runs of consecutive ones (`runtime/attention/attention_runs.py`, `ring_blocks.py`). Ranks with
    pieces in order wait for the last one, which has (1 + (1 - 1/n)) / 2n of the pairs; mirrored pieces have 1 / 2n
    each. Of a slice of a sequence, whatever its length, the pairs are those of one in the middle.
    """
    if node.target not in _KERNELS:
        return None
    names = [argument.name for argument in schema_of(node.target).arguments]  # type: ignore[arg-type]
    given = dict(zip(names, node.args, strict=False))
    q, k = given["q"], given["k"]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node)
    length, layout = record(q).type.shape[_LENGTH], record(q).layout
    factors = () if layout is None else layout.dims[_LENGTH]
    is_square = SLICE in factors or record(k).type.shape[_LENGTH] == length
    if not given["causal"] or given.get("mask") is not None or not is_square:
        return None
    starts, width = _runs(factors, length, mesh)
    ranks = math.prod(mesh[factor] for factor in factors if isinstance(factor, str))
    return Pairs(width * sum(starts) / length**2, len(starts) * (width / length) ** 2, width, ranks)


def _runs(factors: Sequence[Factor], length: int, mesh: Mesh) -> tuple[list[float], int]:
    """Where the runs of the last rank's queries begin, and how wide each is."""
    found, stride = [(0.0, 0)], length  # (start, its place in the factor before)
    for at, factor in enumerate(factors):
        count = mesh[factor] if isinstance(factor, str) else abs(factor)
        stride //= count
        if isinstance(factor, int):
            found = [(start + i * stride, i) for start, _ in found for i in range(count)]
        elif factor == SLICE:
            found = [(start + (count - 1) / 2 * stride, 0) for start, _ in found]
        else:
            mirrored = is_mirrored(factors, at)
            found = [(start + (0 if mirrored and i % 2 else count - 1) * stride, 0) for start, i in found]
    return [start for start, _ in found], stride
