"""Convolutions. Batch, channels and groups may be split; of space the dims along which each place is read once: of
patches, whose kernel is as wide as the stride (one 1 wide, with stride 1, is a product). Others: windows.py.

Names: n batch, g groups, i and o channels of a group on the way in and out, x.. y.. k.. space of the input, of the
output and of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.passes.rules.local import with_arg
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Arguments, Call, Pieces, Row, Rule


@dataclass(frozen=True, slots=True)
class _Dims:
    """The specs of the tensors of one convolution, its replicated names and its floating-point operations."""

    input: str
    weight: str
    output: str
    replicated: frozenset[str]
    groups: int
    flops: int


def _dims(call: Call, input_: tuple[int, ...], weight: tuple[int, ...], output: tuple[int, ...], at: int) -> _Dims:
    """`at`: the position of the stride, behind which padding, dilation, transposed ... follow."""
    transposed, groups = call.args[at + 3], call.args[at + 5]
    space = range(len(input_) - 2)
    stride, padding, dilation, more = (every(call.args[at + i], len(space)) for i in (0, 1, 2, 4))
    patches = [
        weight[2 + i] == stride[i] and not padding[i] and dilation[i] == 1 and not more[i]
        and max(input_[2 + i], output[2 + i]) == stride[i] * min(input_[2 + i], output[2 + i])
        for i in space
    ]  # fmt: skip
    few, many = ([f"y{i}" if patch else f"{letter}{i}" for i, patch in enumerate(patches)] for letter in "yx")
    many = [f"({name} k{i})" if patches[i] else name for i, name in enumerate(many)]
    x, y = (few, many) if transposed else (many, few)
    channels = "(g i) o" if transposed else "(g o) i"
    replicated = {f"{letter}{i}" for i in space for letter in ("k" if patches[i] else "xyk")}
    return _Dims(
        f"n (g i) {' '.join(x)}",
        f"{channels} {' '.join(f'k{i}' for i in space)}",
        f"n (g o) {' '.join(y)}",
        frozenset(replicated),
        groups,
        # every element of the weight meets every place: of the output, or of the input if transposed
        2 * math.prod(weight) * output[0] * math.prod((input_ if transposed else output)[2:]),
    )


def every(value: Sequence[int], count: int) -> tuple[int, ...]:
    """A number for each dim of space: aten takes one for all of them, too."""
    found = tuple(value)
    return found * count if len(found) == 1 else found


def _convolution(call: Call) -> Rule:
    """A bias is added by every rank: then i is replicated."""
    dims = _dims(call, call.operands[0].shape, call.operands[1].shape, call.results[0].shape, 3)
    bias = call.args[2] is not None
    operands = f"{dims.input}, {dims.weight}" + (", (g o)" if bias else "")
    return instantiate(
        f"{operands} -> {dims.output}",
        call,
        replicated=dims.replicated | ({"i"} if bias else set()),
        linear=({0, 2}, {1, 2}) if bias else ({0}, {1}),
        sizes={"g": dims.groups},
        flops=dims.flops,
    )


def _convolution_backward(call: Call) -> Rule:
    """The gradient of the bias has no i and is not a sum over it: then i is replicated."""
    grad, input_, weight = (operand.shape for operand in call.operands)
    dims = _dims(call, input_, weight, grad, 4)
    mask = call.args[10]
    results = [spec for spec, wanted in zip((dims.input, dims.weight, "(g o)"), mask, strict=True) if wanted]
    return instantiate(
        f"{dims.output}, {dims.input}, {dims.weight} -> {', '.join(results)}",
        call,
        replicated=dims.replicated | ({"i"} if mask[2] else set()),
        linear=({0},),
        sizes={"g": dims.groups},
        flops=dims.flops * (bool(mask[0]) + bool(mask[1])),
    )


def _convolution_backward_local(pieces: Pieces) -> Arguments:
    args, sizes = pieces.call.args, pieces.sizes
    if args[3] is not None:
        args = with_arg(args, 3, [sizes["g"] * sizes["o"]])
    return with_arg(args, 9, sizes["g"]), dict(pieces.call.kwargs)


ROWS: Mapping[str, Row] = {
    "aten.convolution.default": Row(_convolution, size_arg=(8, "g")),
    "aten.convolution_backward.default": Row(_convolution_backward, local=_convolution_backward_local),
}
