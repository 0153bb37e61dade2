"""Convolutions and shifts, which look at neighbours: space may be split, where pieces of input and output fit together.

Names as in convolution.py. A dim of space of which the output has a place for every `stride` rows of the input is
`(y s)` there: a piece of y is the same piece of the input, with rows of its neighbours (`Halo`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.passes.rules.build import FIRST, build, named, replace_dim
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Arguments, Call, Halo, Pieces, Row, Rule, starts_of


@dataclass(frozen=True, slots=True)
class _Window:
    """One dim of space: a place of the output reads `wide` rows from `stride` times its number, less `before`."""

    rows: int
    places: int
    stride: int
    before: int
    wide: int

    @property
    def fits(self) -> bool:
        """True if pieces of the output are pieces of the input."""
        return self.rows == self.places * self.stride

    @property
    def halo(self) -> tuple[int, int]:
        """The rows that a piece reads before and after its own."""
        return max(0, self.before), max(0, self.wide - self.stride - self.before)

    @property
    def padding(self) -> tuple[int, int]:
        """The rows before and after a piece and its halo: of those that the piece does not read, less than none."""
        return min(0, self.before), min(0, self.wide - self.stride - self.before)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution, forwards or backwards. at: the position of the stride among the arguments."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    args: tuple[Any, ...]
    at: int

    @property
    def windows(self) -> list[_Window]:
        stride, before, _, dilation, _ = self.args[self.at : self.at + 5]
        return [
            _Window(self.x[2 + i], self.y[2 + i], stride[i], before[i], dilation[i] * (self.w[2 + i] - 1) + 1)
            for i in range(len(stride))
        ]

    def rule(self, call: Call, spec: str, has: tuple[int, ...], gives: tuple[int, ...]) -> Rule:
        """`spec` in which X, W and Y stand for the dims of input, weight and output. has, gives: the operands and
        results that are the input."""
        windows = list(enumerate(self.windows))
        x = " ".join(f"(y{i} s{i})" if one.fits else f"x{i}" for i, one in windows)
        spaces = {"X": f"n (g i) {x}", "W": "(g o) i", "Y": "n (g o)"}
        spaces["W"] += "".join(f" k{i}" for i, _ in windows)
        spaces["Y"] += "".join(f" y{i}" for i, _ in windows)
        fixed = {f"{letter}{i}" for i, one in windows for letter in ("ks" if one.fits else "kxy")}
        groups = self.args[self.at + 4]
        return instantiate(
            "".join(spaces.get(letter, letter) for letter in spec),
            call,
            replicated=fixed,
            linear=({0}, {1}),
            sizes={"g": groups, **{f"s{i}": one.stride for i, one in windows if one.fits}},
            flops=2 * math.prod(self.w) * self.y[0] * math.prod(self.y[2:]),
            halos=[
                Halo(f"y{i}", *one.halo, has, gives) for i, one in windows if one.fits and any(one.halo)
            ],
        )  # fmt: skip

    def local(self, pieces: Pieces, sizes: list[int] | None = None) -> Arguments:
        """The arguments of a piece, whose halos are rows of its operands. sizes: an argument of sizes of space."""
        windows, split = self.windows, [pieces.readings.get(f"y{i}") for i in range(len(self.windows))]
        stride, before, after, dilation, _ = self.args[self.at : self.at + 5]
        ends = [
            (before[i], after[i]) if reading is None else one.padding
            for i, (one, reading) in enumerate(zip(windows, split, strict=True))
        ]
        shape = [stride, [b for b, _ in ends], [a for _, a in ends], dilation, pieces.sizes["g"]]
        counts = [1 if reading is None else len(starts_of(reading)) for reading in split]
        kwargs = dict(pieces.call.kwargs) | ({"runs": counts} if max(counts) > 1 else {})
        front = self.args[: self.at] if sizes is None else (*self.args[: self.at - 1], sizes)
        return (*front, *shape), kwargs

    def space(self, pieces: Pieces) -> list[int]:
        """The local sizes of the input's dims of space, with their halos."""
        space = []
        for i, one in enumerate(self.windows):
            reading = pieces.readings.get(f"y{i}")
            runs = 0 if reading is None else len(starts_of(reading))
            rows = one.rows if reading is None else pieces.sizes[f"y{i}"] * one.stride
            space.append(rows + runs * sum(one.halo))
        return space


def _forward(call: Call) -> _Convolution:
    return _Convolution(call.operands[0].shape, call.operands[1].shape, call.results[0].shape, call.args, 2)


def _input(call: Call) -> _Convolution:
    return _Convolution(call.results[0].shape, call.operands[1].shape, call.operands[0].shape, call.args, 3)


def _weight(call: Call) -> _Convolution:
    return _Convolution(call.operands[1].shape, call.results[0].shape, call.operands[0].shape, call.args, 3)


def _input_local(pieces: Pieces) -> Arguments:
    found = _input(pieces.call)
    return found.local(pieces, found.space(pieces))


def _pad_rows(call: Call) -> Rule:
    """A dim that keeps its length is moved, and may be split. What wraps around comes from the other end."""
    _, at, before, after = call.args
    dims, result = named(call.operands[0].shape), named(call.results[0].shape)
    if before != -after:
        result = replace_dim(dims, at, () if call.results[0].shape[at] == 1 else ("p",))
        return build(call, [dims], [result], replicated={*dims[at], *result[at]}, linear=FIRST)
    wrap = bool(call.kwargs.get("wrap"))
    halos = [Halo(name, max(0, before), max(0, after), (0,), wrap=wrap) for name in dims[at]]
    return replace(build(call, [dims], [dims], linear=FIRST), halos=tuple(halos))


def _with_runs(pieces: Pieces, at: int, args: tuple[Any, ...]) -> Arguments:
    """The arguments for a piece whose dim `at` lies in so many runs."""
    runs = len(starts_of(pieces.reading(f"d{at}"))) if f"d{at}" in pieces.readings else 1
    return args, dict(pieces.call.kwargs) | ({"runs": runs} if runs > 1 else {})


def _pad_rows_local(pieces: Pieces) -> Arguments:
    x, at, before, after = pieces.call.args
    if f"d{at}" not in pieces.readings:
        return pieces.call.args, dict(pieces.call.kwargs)
    args, kwargs = _with_runs(pieces, at, (x, at, min(0, before), min(0, after)))
    return args, {name: value for name, value in kwargs.items() if name != "wrap"}  # its halo has the rows


def _running_sum(call: Call) -> Rule:
    dims = named(call.operands[0].shape)
    rule = build(call, [dims], [dims], linear=FIRST)
    return replace(rule, scan=(*dims[call.args[1]], call.args[2])) if dims[call.args[1]] else rule


def _linear_scan(call: Call) -> Rule:
    """States pass from piece to piece; one that is given stands before the first piece alone."""
    dim, reverse = call.args[3:5]
    dims = named(call.operands[0].shape)
    start = [replace_dim(dims, dim, ())] * (len(call.operands) - 2)
    rule = build(call, [dims, dims, *start], [dims], replicated=dims[dim] if start else ())
    return rule if start or not dims[dim] else replace(rule, scan=(*dims[dim], reverse), factor=0)


ROWS: Mapping[str, Row] = {
    "autopar.linear_scan.default": Row(
        _linear_scan, local=lambda pieces: _with_runs(pieces, pieces.call.args[3], pieces.call.args)
    ),
    "autopar.running_sum.default": Row(
        _running_sum, local=lambda pieces: _with_runs(pieces, pieces.call.args[1], pieces.call.args)
    ),
    "autopar.pad_rows.default": Row(_pad_rows, local=_pad_rows_local),
    "autopar.convolution.default": Row(
        lambda call: _forward(call).rule(call, "X, W -> Y", (0,), ()),
        local=lambda pieces: _forward(pieces.call).local(pieces),
    ),
    "autopar.convolution_input_backward.default": Row(
        lambda call: _input(call).rule(call, "Y, W -> X", (), (0,)), local=_input_local
    ),
    "autopar.convolution_weight_backward.default": Row(
        lambda call: _weight(call).rule(call, "Y, X -> W", (1,), ()),
        local=lambda pieces: _weight(pieces.call).local(pieces),
    ),
}
