"""`autopar::convolution` and its gradients: aten's convolutions, with rows of their own before and after each dim; rows
around a dim alone, and sums along one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime.kernels.kernel import Kernel

_aten = torch.ops.aten
Ints = Sequence[int]
WITH_INPUT, WITH_WEIGHT = [True, False, False], [False, True, False]


def convolution(
    x: torch.Tensor, w: torch.Tensor, stride: Ints, before: Ints, after: Ints, dilation: Ints, groups: int, *,
    runs: Ints = (),
) -> torch.Tensor:  # fmt: skip
    both, rest = _padding(before, after)
    padded = _padded(_apart(x, runs), rest)
    y = _aten.convolution(padded, w, None, stride, both, dilation, False, [0] * len(both), groups)
    return _together(y, runs)


def convolution_input_backward(
    grad: torch.Tensor, w: torch.Tensor, space: Ints, stride: Ints, before: Ints, after: Ints, dilation: Ints,
    groups: int, *, runs: Ints = (),
) -> torch.Tensor:  # fmt: skip
    both, rest = _padding(before, after)
    apart = _apart(grad, runs)
    run = [size // count for size, count in zip(space, runs or [1] * len(space), strict=True)]
    sizes = [size + b + a for size, (b, a) in zip(run, rest, strict=True)]
    # of the input only its shape is read
    x = grad.new_empty(1).expand(apart.shape[0], w.shape[1] * groups, *sizes)
    found = _aten.convolution_backward(
        apart, x, w, None, stride, both, dilation, False, [0] * len(both), groups, WITH_INPUT
    )[0]
    return _together(_padded(found, [(-b, -a) for b, a in rest]), runs)


def convolution_weight_backward(
    grad: torch.Tensor, x: torch.Tensor, kernel: Ints, stride: Ints, before: Ints, after: Ints, dilation: Ints,
    groups: int, *, runs: Ints = (),
) -> torch.Tensor:  # fmt: skip
    both, rest = _padding(before, after)
    padded = _padded(_apart(x, runs), rest)
    w = grad.new_empty(1).expand(grad.shape[1], x.shape[1] // groups, *kernel)
    found: torch.Tensor = _aten.convolution_backward(
        _apart(grad, runs), padded, w, None, stride, both, dilation, False, [0] * len(both), groups, WITH_WEIGHT
    )[1]
    return found


def pad_rows(x: torch.Tensor, dim: int, before: int, after: int, *, runs: int = 1, wrap: bool = False) -> torch.Tensor:
    if wrap:
        return x.roll(before, dim)
    pads = [*[0] * 2 * (x.ndim - 1 - dim), before, after]
    if runs == 1:
        return torch.constant_pad_nd(x, pads)
    return torch.constant_pad_nd(x.unflatten(dim, (runs, -1)), pads).flatten(dim, dim + 1)


def running_sum(x: torch.Tensor, dim: int, reverse: bool, *, runs: int = 1) -> torch.Tensor:
    if runs > 1:
        return running_sum(x.unflatten(dim, (runs, -1)), dim + 1, reverse).flatten(dim, dim + 1)
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


def _padding(before: Ints, after: Ints) -> tuple[list[int], list[tuple[int, int]]]:
    """The zeros that both ends of each dim have, which aten adds, and the rows that are left to be added or dropped."""
    both = [max(0, min(pair)) for pair in zip(before, after, strict=True)]
    return both, [(b - p, a - p) for b, a, p in zip(before, after, both, strict=True)]


def _padded(x: torch.Tensor, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
    """x with rows of zeros at the ends of its dims of space, or without some of its rows."""
    if not any(map(any, rows)):
        return x
    padded: torch.Tensor = _aten.constant_pad_nd(x, [size for pair in reversed(rows) for size in pair])
    return padded


def _apart(x: torch.Tensor, runs: Ints) -> torch.Tensor:
    """Each run of a dim of space as a row of the batch."""
    for dim, count in enumerate(runs, 2):
        if count > 1:
            x = x.unflatten(dim, (count, -1)).movedim(dim, 0).flatten(0, 1)
    return x


def _together(x: torch.Tensor, runs: Ints) -> torch.Tensor:
    """The inverse of `_apart`."""
    for dim, count in reversed(list(enumerate(runs, 2))):
        if count > 1:
            x = x.unflatten(0, (count, -1)).movedim(0, dim).flatten(dim, dim + 1)
    return x


# A compiler sees aten's.
KERNELS = {
    "convolution": Kernel(convolution, traced=convolution),
    "convolution_input_backward": Kernel(convolution_input_backward, traced=convolution_input_backward),
    "convolution_weight_backward": Kernel(convolution_weight_backward, traced=convolution_weight_backward),
    "pad_rows": Kernel(pad_rows, traced=pad_rows),
    "running_sum": Kernel(running_sum, traced=running_sum),
}
