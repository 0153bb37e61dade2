"""Attention as the programs call it: beside its plain form in float64, timed beside that of torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.ir.ops.ops import op


@dataclass(frozen=True, slots=True)
class Shape:
    """[batch, heads, queries, keys, width], key heads, dtype, and the mask: none, causal, padding or bias."""

    sizes: tuple[int, int, int, int, int]
    key_heads: int
    dtype: torch.dtype
    mask: str

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{'x'.join(map(str, self.sizes))} | {self.key_heads} | {name} | {self.mask}"


def shapes(device: str) -> list[Shape]:
    """What models ask for; tiny on a CPU."""
    b, h, s, d = (4, 16, 2048, 128) if device == "cuda" else (2, 4, 16, 8)
    found = [
        Shape((b, h, s, s, d), heads, dtype, mask)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for mask in ("none", "causal", "padding", "bias")
        for heads in (h, h // 4)
    ]
    found += [Shape((b, h, s, s // 2, d), h, torch.bfloat16, mask) for mask in ("none", "causal")]
    return [*found, Shape((b, h, s, s, d + 4), h, torch.bfloat16, "causal")]


def attention(device: str) -> None:
    """Errors of out, dq, dk, dv relative to float64, beside those of torch; and the time of both directions."""
    print("| b x h x s x t x d | key heads | dtype | mask | our error | torch's error | ours ms | torch ms |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = []
    for shape in shapes(device):
        ours, theirs, times = _compare(shape, device)
        print(f"| {shape} | {ours:.1e} | {theirs:.1e} | {times[0]:.2f} | {times[1]:.2f} |", flush=True)
        if ours > 4 * theirs + 1e-6:
            wrong.append(str(shape))
    assert not wrong, f"less exact than torch: {wrong}"


def _compare(shape: Shape, device: str) -> tuple[float, float, tuple[float, float]]:
    b, h, s, t, d = shape.sizes
    random = torch.Generator(device).manual_seed(0)
    sizes = ((b, h, s, d), (b, shape.key_heads, t, d), (b, shape.key_heads, t, d), (b, h, s, d))
    q, k, v, grad = (torch.randn(size, device=device, generator=random).to(shape.dtype) for size in sizes)
    mask = _mask(shape, device, random)
    causal, scale = shape.mask == "causal", d**-0.5

    def ours() -> tuple[Tensor, ...]:
        out, lse = op("attention")(q, k, v, mask, causal, scale)
        return out, *op("attention_backward")(grad, q, k, v, mask, out, lse, causal, scale)

    def theirs(dtype: torch.dtype = shape.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        other = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
        out = F.scaled_dot_product_attention(*leaves, other, is_causal=causal, enable_gqa=True)
        return out, *torch.autograd.grad(out, leaves, grad.to(dtype))

    exact = _exact(theirs)
    errors = [max(_error(a, b) for a, b in zip(side(), exact, strict=True)) for side in (ours, theirs)]
    return errors[0], errors[1], (_time(ours, device), _time(theirs, device))


def _exact(theirs: Callable[[torch.dtype], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return theirs(torch.float64)


def _mask(shape: Shape, device: str, random: torch.Generator) -> Tensor | None:
    b, h, s, t, _ = shape.sizes
    if shape.mask == "padding":
        lengths = torch.randint(t // 2, t, (b, 1, 1, 1), device=device, generator=random)
        return torch.arange(t, device=device) < lengths
    if shape.mask == "bias":
        return torch.randn(1, h, s, t, device=device, generator=random).to(shape.dtype)
    return None


def _error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def _time(call: Callable[[], object], device: str) -> float:
    """Milliseconds, median."""
    times = []
    for _ in range(7 if device == "cuda" else 2):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])
