"""The semantic ops that look at neighbours: they say how many rows lie before and after their input.

aten pads both ends of a dim alike. Here each end of each dim of space has its own number of rows: zeros if it is
positive, and rows that are dropped if it is negative. So a causal convolution, whose output is cut back to the length
of its input, is one op, and so is a piece of a convolution, given the rows of the pieces beside it. `runs`: how many
pieces of equal length lie one behind the other in each dim of space; none looks into the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.ir.ops.semantic import semantic

Ints = Sequence[int]
_SHAPE = "int[] stride, int[] before, int[] after, int[] dilation, int groups, *, int[] runs=[]"


@semantic(f"convolution(Tensor x, Tensor w, {_SHAPE}) -> Tensor", precision="low")
def convolution(
    x: torch.Tensor, w: torch.Tensor, stride: Ints, before: Ints, after: Ints, dilation: Ints, groups: int, *,
    runs: Ints = (),
) -> torch.Tensor:  # fmt: skip
    """y[n, o, j] = sum over i and k of w[o, i, k] x[n, i, j stride - before + k dilation]."""
    space = out_space(tuple(x.shape[2:]), tuple(w.shape[2:]), stride, before, after, dilation, runs)
    return x.new_empty((x.shape[0], w.shape[0], *space))


@semantic(f"convolution_input_backward(Tensor grad, Tensor w, int[] space, {_SHAPE}) -> Tensor", precision="low")
def convolution_input_backward(
    grad: torch.Tensor, w: torch.Tensor, space: Ints, stride: Ints, before: Ints, after: Ints, dilation: Ints,
    groups: int, *, runs: Ints = (),
) -> torch.Tensor:  # fmt: skip
    """The gradient of x, whose dims of space have the sizes `space`."""
    return grad.new_empty((grad.shape[0], w.shape[1] * groups, *space))


@semantic(f"convolution_weight_backward(Tensor grad, Tensor x, int[] kernel, {_SHAPE}) -> Tensor", precision="low")
def convolution_weight_backward(
    grad: torch.Tensor, x: torch.Tensor, kernel: Ints, stride: Ints, before: Ints, after: Ints, dilation: Ints,
    groups: int, *, runs: Ints = (),
) -> torch.Tensor:  # fmt: skip
    """The gradient of w, whose dims of space have the sizes `kernel`."""
    return grad.new_empty((grad.shape[1], x.shape[1] // groups, *kernel))


@semantic("pad_rows(Tensor x, int dim, int before, int after, *, int runs=1, bool wrap=False) -> Tensor")
def pad_rows(x: torch.Tensor, dim: int, before: int, after: int, *, runs: int = 1, wrap: bool = False) -> torch.Tensor:
    """x with rows of zeros before and after each of the runs of a dim, or without some of its rows. wrap: of a dim that
    keeps its length, the rows that fall out at one end in place of the zeros at the other."""
    rows = x.shape[dim] + runs * (before + after)
    return x.new_empty((*x.shape[:dim], rows, *x.shape[dim + 1 :]))


@semantic("running_sum(Tensor x, int dim, bool reverse, *, int runs=1) -> Tensor", precision="high")
def running_sum(x: torch.Tensor, dim: int, reverse: bool, *, runs: int = 1) -> torch.Tensor:
    """The sum of each row and those before it in its run of a dim, or behind it."""
    return x.new_empty(x.shape)


@semantic(
    "linear_scan(Tensor a, Tensor b, Tensor? start, int dim, bool reverse, *, int runs=1) -> Tensor", precision="high"
)
def linear_scan(
    a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None, dim: int, reverse: bool, *, runs: int = 1
) -> torch.Tensor:
    """h[t] = a[t] h[t-1] + b[t] along each run of a dim, or h[t] = a[t] h[t+1] + b[t] from its end. start: what stands
    before the first row of each run (zeros if None), with as many rows as there are runs."""
    return b.new_empty(b.shape)


def out_space(
    space: tuple[int, ...], kernel: tuple[int, ...], stride: Ints, before: Ints, after: Ints, dilation: Ints,
    runs: Ints = (),
) -> tuple[int, ...]:  # fmt: skip
    """The sizes of the dims of space of what a convolution gives."""
    out_space = []
    for i, size in enumerate(space):
        run = runs[i] if runs else 1
        read = size // run + before[i] + after[i] - dilation[i] * (kernel[i] - 1)
        out_space.append(run * ((read - 1) // stride[i] + 1))
    return tuple(out_space)


SEMANTIC = (
    convolution, convolution_input_backward, convolution_weight_backward, pad_rows, running_sum, linear_scan,
)  # fmt: skip
