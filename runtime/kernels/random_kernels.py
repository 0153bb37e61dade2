"""`autopar::random`: numbers of the counter-based generator in three distributions, from 32 bits an element.

A float32 draw is the float64 draw rounded (uniform: cut, so that it stays below 1), and so on for the short floats: a
run in another precision sees the same numbers. What follows: a float64 uniform has 32 random bits, not 53.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.runtime.kernels.counter import Counters, PieceRuns, keys_of, number
from autopar.runtime.kernels.gpu_kernels import triton_kernels
from autopar.runtime.kernels.kernel import Kernel

_DIGITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
Draw = Callable[[Callable[[int], torch.Tensor], torch.dtype], torch.Tensor]


def random(
    seed: torch.Tensor, key: int, kind: str, shape: Sequence[int], dtype: torch.dtype, whole: Sequence[int],
    local: Sequence[int], offsets: Sequence[int], kernels: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Draws of a `shape` that, read in dims of sizes `local`, is the piece at `offsets` of dims `whole`. kernels:
    instead of those of the device (`triton_kernels`)."""
    out = torch.empty(tuple(shape), dtype=dtype, device=seed.device)
    if out.numel() == 0:
        return out
    runs, kernels = PieceRuns.of(whole, local, offsets), kernels or triton_kernels(seed.device)
    rows = out.view(runs.count, runs.width)
    if kernels is not None:
        rows.copy_(_KINDS[kind](lambda stream: kernels.bits(seed, key, stream, runs), dtype))
        return out
    counters = Counters.of(runs, seed.device)
    keys: dict[int, tuple[Any, Any]] = {}
    for block in counters.blocks():

        def bits(stream: int, block: tuple[slice, slice] = block) -> torch.Tensor:
            if stream not in keys:
                keys[stream] = keys_of(seed, key, stream)
            return counters.bits(keys[stream], *block)

        rows[block] = _KINDS[kind](bits, dtype)
    return out


def _uniform(bits: Callable[[int], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """In [0, 1), a multiple of 2^-digits."""
    digits = _DIGITS[dtype]
    state = bits(0)
    device = state.device
    if digits == 32:
        return state.bitwise_xor_(number(0x80000000, device)).to(dtype).add_(2**31).mul_(2**-32)
    top = state.bitwise_right_shift_(number(32 - digits, device)).bitwise_and_(number(2**digits - 1, device))
    return top.to(dtype).mul_(2**-digits)


def _open(state: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """In (0, 1] with 31 bits and their full relative precision at 0: what logarithms want."""
    device = state.device
    state = state.bitwise_right_shift_(number(1, device)).bitwise_and_(number(0x7FFFFFFF, device))
    return state.to(wide).add_(0.5).mul_(2**-31)


def _normal(bits: Callable[[int], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Mean 0, variance 1 (Box and Muller 1958, the cosine of each pair); no larger than 6.7."""
    wide = _wide(dtype)
    radius = _open(bits(0), wide).log_().mul_(-2).sqrt_()
    return radius.mul_(_open(bits(1), wide).mul_(2 * math.pi).cos_())


def _exponential(bits: Callable[[int], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Rate 1; above 0, because a logarithm often follows (Gumbel noise), and no larger than 22.2."""
    wide = _wide(dtype)
    return _open(bits(0), wide).log_().neg_().clamp_(min=torch.finfo(wide).eps / 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


_KINDS: Mapping[str, Draw] = {"uniform": _uniform, "normal": _normal, "exponential": _exponential}


# Opaque to a compiler: 32-bit arithmetic wraps, which C++ leaves undefined in the code that Inductor would write.
KERNELS = {"random": Kernel(random)}
