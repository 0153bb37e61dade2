"""Dropout and uniform numbers, from the counter-based bits of each element (`runtime/kernels/counter.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.ir.ops.ops import op
from autopar.ir.program import TensorType
from autopar.runtime.triton.lowering.values import Draw, LinearForm, Value, point, where, wide
from autopar.runtime.triton.lowering.view_maps import shaped

Types = Sequence[TensorType]
_DIGITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _bits(
    seed: Value, key: int, stream: int | None, whole: Sequence[int], local: Sequence[int], offsets: Sequence[Any]
) -> Value:
    if seed.op != "load":
        raise AssertionError("the seed of a draw is an operand")
    start, dims = _runs(whole, local, offsets)
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    draw = Draw(seed.data, key, stream, start, strides, abs(math.prod(whole)) > 2**31)
    numbers = tuple(offset for offset in offsets if isinstance(offset, Value))
    return Value("bits", (seed, *numbers), shape, torch.int32, draw)


def _runs(
    whole: Sequence[int], local: Sequence[int], offsets: Sequence[Any]
) -> tuple[LinearForm, list[tuple[int, LinearForm]]]:
    """Where a piece starts in the whole, and the sizes and strides of its elements: as `counter.Runs.of`, which says
    what negative sizes are, for offsets that the rank decides."""
    start, stride, dims = LinearForm(), 1, list[tuple[int, LinearForm]]()
    apart: LinearForm | None = None  # two places of the next dim, as the mirrored one behind it has them
    for size, part, offset in zip(reversed(whole), reversed(local), reversed(offsets), strict=True):
        stride = stride // -part if part < 0 else stride
        start += LinearForm.of(offset) * stride
        if part > 0 and size < 0:
            apart = (LinearForm.of(offset) * -2 + (-2 * size - 1)) * stride
        elif part > 0 and apart is not None:
            dims += [(2, apart), (part // 2, LinearForm(2 * stride))]
            apart = None
        elif part > 0:
            dims.append((part, LinearForm(stride)))
        stride *= abs(size)
    return start, dims[::-1]


def _dropout(
    types: Types, x: Value, seed: Value, key: int, p: float, whole: Sequence[int], local: Sequence[int],
    offsets: Sequence[Any],
) -> Value:  # fmt: skip
    if p <= 0:
        return x
    if p >= 1:
        return x * 0
    limit = min(round((1 - p) * 2**31), 2**31 - 1)  # kept: the numbers below the limit, of 31 bits
    bits = shaped(_bits(seed, key, None, whole, local, offsets), x.shape)
    kept = point(f"{{0}} < tl.full((1, 1), {2 * limit}, tl.uint32)", bits, dtype=torch.bool)
    return where(kept, x * (1 / (1 - p)), 0)


def _random(
    types: Types, seed: Value, key: int, kind: str, shape: Any, dtype: Any, whole: Sequence[int],
    local: Sequence[int], offsets: Sequence[Any],
) -> Value:  # fmt: skip
    """In [0, 1), a multiple of 2^-digits."""
    assert kind == "uniform", kind
    digits = _DIGITS[types[0].dtype]
    bits = shaped(_bits(seed, key, 0, whole, local, offsets), types[0].shape)
    own = wide(types[0].dtype)
    name = "tl.float64" if own == torch.float64 else "tl.float32"
    return point(f"({{0}} >> {32 - digits}).to({name}) * {2.0**-digits!r}", bits, dtype=own)


RULES: Mapping[Any, Callable[..., Any]] = {op("dropout"): _dropout, op("random"): _random}
