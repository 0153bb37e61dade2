"""The calls and transfers that are measured: the shapes of a transformer, from small to large."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

from autopar.machines.files import COLLECTIVES
from autopar.machines.model import ADAMW, ATTENTION, CONVOLUTION, MESSAGE, NORM, RankGroup
from autopar.machines.samples import LEAST, PRODUCT, STREAM, UPDATE, MeasuredCall, MeasuredTransfer

KINDS = (*COLLECTIVES, MESSAGE)
LONG_SUMS = "long sums"
# Of a product of n x n x n, all with its 2 n^3 FLOPs: batch, rows, inner, columns.
SHAPES: dict[str, Callable[[int], tuple[int, int, int, int]]] = {
    "square": lambda n: (1, n, n, n),
    "many rows": lambda n: (1, 4 * n, n // 2, n // 2),  # tokens through a weight
    LONG_SUMS: lambda n: (1, n // 2, 4 * n, n // 2),  # the gradient of a weight
    "batched": lambda n: (8, n // 2, n // 2, n // 2),  # heads
}
WIDTH = 512  # of the rows that a memory-bound call reads
HEAD = 64
IMAGES, SIDE, KERNEL = 8, 32, 3  # of a convolution: images, and the sides of these and of its kernel


def values(device: torch.device, dtype: str, *shape: int) -> torch.Tensor:
    """Random numbers, drawn once for each 4096: drawing takes longer than what is measured. Never all zero, which a
    GPU multiplies with less power and so faster."""
    count = math.prod(shape)
    drawn = torch.randn(4096, device=device).to(dtype_of(dtype))
    return drawn.repeat(-(-count // 4096))[:count].view(shape)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of the operands of a product."""
    dtype: torch.dtype = getattr(torch, "float32" if name == "tfloat32" else name)
    return dtype


def products(dtype: str, sizes: Iterable[int]) -> list[MeasuredCall]:
    """The products of n x n x n, and others of as many FLOPs."""
    return [_product(name, n, dtype) for n in sizes for name in SHAPES]


def _product(name: str, n: int, dtype: str) -> MeasuredCall:
    batch, rows, inner, columns = SHAPES[name](n)
    bytes_ = batch * (rows * inner + inner * columns + rows * columns) * dtype_of(dtype).itemsize

    def make(device: torch.device) -> Callable[[], object]:
        lead = (batch,) if batch > 1 else ()
        b = values(device, dtype, *lead, inner, columns)
        if name == LONG_SUMS:
            across = values(device, dtype, inner, rows).t()  # the rows of both operands are summed over
            return lambda: torch.matmul(across, b)
        a = values(device, dtype, *lead, rows, inner)
        return lambda: torch.matmul(a, b)

    return MeasuredCall(PRODUCT, f"{name} {n}", 2.0 * n**3, bytes_, dtype, make)


def attentions(dtype: str, sizes: Iterable[int], heads: int) -> list[MeasuredCall]:
    """Fused attention, forward and backward, of some lengths of a sequence."""
    return [_attention(n, dtype, heads) for n in sizes]


def _attention(n: int, dtype: str, heads: int) -> MeasuredCall:
    def make(device: torch.device) -> Callable[[], object]:
        q, k, v, grad = (values(device, dtype, 1, heads, n, HEAD) for _ in range(4))
        inputs = tuple(x.requires_grad_() for x in (q, k, v))

        def both() -> object:
            with torch.enable_grad():
                out = F.scaled_dot_product_attention(q, k, v)
            return torch.autograd.grad(out, inputs, grad)

        return both

    flops = 14.0 * heads * n * n * HEAD  # 2 products forward, 5 backward, as the rules count
    return MeasuredCall(
        ATTENTION, f"attention {n}", flops, 12.0 * heads * n * HEAD * dtype_of(dtype).itemsize, dtype, make
    )


def convolutions(dtype: str, channels: Iterable[int]) -> list[MeasuredCall]:
    """Convolutions of images, forward and backward, of some numbers of channels."""
    return [_convolution(n, dtype) for n in channels]


def _convolution(n: int, dtype: str) -> MeasuredCall:
    def make(device: torch.device) -> Callable[[], object]:
        x, grad = (values(device, dtype, IMAGES, n, SIDE, SIDE) for _ in range(2))
        inputs = x.requires_grad_(), values(device, dtype, n, n, KERNEL, KERNEL).requires_grad_()

        def both() -> object:
            with torch.enable_grad():
                out = F.conv2d(*inputs, padding=KERNEL // 2)
            return torch.autograd.grad(out, inputs, grad)

        return both

    image, weight = IMAGES * n * SIDE**2, n * n * KERNEL**2
    flops = 3 * 2.0 * image * n * KERNEL**2  # a product forward, 2 backward
    return MeasuredCall(
        CONVOLUTION, f"convolution {n}", flops, (6.0 * image + 3 * weight) * dtype_of(dtype).itemsize, dtype, make
    )


# Name: operands and results as large as x, and the call.
STREAMS: dict[str, tuple[int, Callable[[torch.Tensor, torch.Tensor], object]]] = {
    "add": (3, lambda x, y: x + y),
    "scale": (2, lambda x, y: x * 0.5),
    "transpose": (2, lambda x, y: x.t().contiguous()),
    "sum": (1, lambda x, y: x.sum(0)),
    "gelu": (2, lambda x, y: F.gelu(x)),
    "softmax": (2, lambda x, y: x.softmax(-1)),
    "layer_norm": (2, lambda x, y: F.layer_norm(x, x.shape[-1:])),
}


def streams(dtype: str, sizes: Iterable[int]) -> list[MeasuredCall]:
    """Memory-bound calls by the bytes that they read and write."""
    return [_stream(name, size, dtype) for size in sizes for name in STREAMS]


def _stream(name: str, size: int, dtype: str) -> MeasuredCall:
    times, call = STREAMS[name]
    rows = max(1, size // (times * dtype_of(dtype).itemsize * WIDTH))

    def make(device: torch.device) -> Callable[[], Any]:
        x = values(device, dtype, rows, WIDTH)
        y = values(device, dtype, rows, WIDTH) if times == 3 else x
        return lambda: call(x, y)

    one = float(rows * WIDTH * dtype_of(dtype).itemsize)
    return MeasuredCall(STREAM, name, 0.0, times * one, dtype, make, one if times > 1 else 0.0)


def norms(dtype: str, sizes: Iterable[int]) -> list[MeasuredCall]:
    """Gradients of LayerNorm, by the bytes that they read and write."""
    return [_norm(size, dtype) for size in sizes]


def _norm(size: int, dtype: str) -> MeasuredCall:
    rows = max(1, size // (3 * dtype_of(dtype).itemsize * WIDTH))
    aten = torch.ops.aten

    def make(device: torch.device) -> Callable[[], object]:
        x, grad = (values(device, dtype, rows, WIDTH) for _ in range(2))
        weight, bias = (values(device, dtype, WIDTH) for _ in range(2))
        _, mean, scale = aten.native_layer_norm.default(x, [WIDTH], weight, bias, 1e-5)
        operands = grad, x, [WIDTH], mean, scale, weight, bias
        return lambda: aten.native_layer_norm_backward.default(*operands, [True, True, True])

    bytes_ = 3.0 * rows * WIDTH * dtype_of(dtype).itemsize
    return MeasuredCall(NORM, "layer_norm", 0.0, bytes_, dtype, make, bytes_ / 3)


def updates(dtype: str, sizes: Iterable[int]) -> list[MeasuredCall]:
    """Steps of a fused AdamW on one weight, by the bytes of that."""
    return [_update(size, dtype) for size in sizes]


def _update(size: int, dtype: str) -> MeasuredCall:
    def make(device: torch.device) -> Callable[[], object]:
        weight = torch.nn.Parameter(values(device, dtype, size // dtype_of(dtype).itemsize))
        weight.grad = torch.full_like(weight, 1e-3)
        return torch.optim.AdamW([weight], fused=True).step

    return MeasuredCall(UPDATE, "adamw", 0.0, float(ADAMW * size), dtype, make)


def least(dtype: str) -> MeasuredCall:
    """A call on one number."""

    def make(device: torch.device) -> Callable[[], object]:
        x, add = values(device, dtype, 1), torch.ops.aten.add.Tensor
        return lambda: add(x, x)

    return MeasuredCall(LEAST, "add", 0.0, 3.0 * dtype_of(dtype).itemsize, dtype, make)


def transfers(groups: Iterable[RankGroup], sizes: Iterable[int]) -> list[MeasuredTransfer]:
    """Each collective, and a message, by the bytes of its value."""
    return [MeasuredTransfer(kind, float(size), group) for group in groups for size in sizes for kind in KINDS]
