"""rowwise: what each row looks up in itself lies beside it, and is split with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, erase_unused, operand_nodes, record

aten = torch.ops.aten
MADE_BY = "rowwise"
LARGEST = 1 << 22  # elements of a value that is computed here
_LOOKUPS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_PUTS = (aten.index_put.default, aten._unsafe_index_put.default)

Make = Callable[[Builder], fx.Node]


def rowwise(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. An index that is the row's own number is left out, so that the rows can be split.

        CAPTURED program
        %x: f32[6,4,8] = batch "0"
        %best: i64[6] = batch "1"
        %arange: i64[6] = aten.arange.default(6)
        %index: f32[6,8] = aten.index.Tensor(%x, [%arange, %best])
        return value "y" = %index
    becomes
        CAPTURED program
        %x: f32[6,4,8] = batch "0"
        %best: i64[6] = batch "1"
        %index_of_rows: f32[6,8] = autopar.index_of_rows.default(%x, [None, %best], [-1, 0])
        return value "y" = %index_of_rows

    The number of a row on a rank is another one than in the whole, so that by the numbers all rows would be gathered.
    That an index counts 0, 1, ... is not guessed from how it is made: what hangs on no input is computed and looked at.
    """
    known = Known()
    instead: dict[fx.Node, Make] = {}
    for node in program.calls():
        make = _lookup(node, known) or _row_itself(node, known)
        if make is not None:
            instead[node] = make
    if not instead:
        return program
    build = Builder(MADE_BY)
    made = build.rewrite(program, lambda node: instead[node](build) if node in instead else None)
    erase_unused(made.graph)
    return made


class Known:
    """The values that hang on no input, computed where they are asked for."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, torch.Tensor | None] = {}

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """The value of an integer tensor; None if it hangs on an input, or is not made of aten's ops alone."""
        if node not in self.values:
            self.values[node] = self._computed(node)
        return self.values[node]

    def _computed(self, node: fx.Node) -> torch.Tensor | None:
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "aten" or not record(node).is_tensor:
            return None
        if record(node).type.numel > LARGEST or "empty" in str(node.target):
            return None
        given = {operand: self.value(operand) for operand in operand_nodes(node)}
        if len(given) < len(node.all_input_nodes) or any(value is None for value in given.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), given.__getitem__)
        with torch.device("cpu"):
            made: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return made

    def counts(self, node: fx.Node, size: int) -> int:
        """-k if the values of an index are 0 .. size-1 along its k-th last dim, and the same along the others; else 0.
        The number of a sole row tells nothing of dims."""
        type_ = record(node).type
        if size < 2 or type_.dtype not in (torch.int32, torch.int64) or size not in type_.shape:
            return 0
        value = self.value(node)
        for back in range(1, len(type_.shape) + 1) if value is not None else ():
            if type_.shape[-back] == size:
                row = torch.arange(size, device="cpu").reshape(-1, *[1] * (back - 1))
                if torch.equal(value, row.expand(type_.shape)):  # type: ignore[arg-type]
                    return -back
        return 0


def _lookup(node: fx.Node, known: Known) -> Make | None:
    """x[rows, index] or x.index_put([rows, index], values) without the rows."""
    if node.target not in (*_LOOKUPS, *_PUTS):
        return None
    x, indices, *rest = _args(node)
    shape, rows = record(x).type.shape, [0] * len(indices)
    if any(record(index).type.dtype in (torch.bool, torch.uint8) for index in indices if index is not None):
        return None
    for dim, index in enumerate(indices):
        row = 0 if index is None else known.counts(index, shape[dim])
        rows[dim] = 0 if row in rows else row
    if not any(rows):
        return None
    if node.target in _LOOKUPS and all(rows) and rows == sorted(rows):
        return lambda build: _shown(build, node, rows)
    others = [None if row else index for index, row in zip(indices, rows, strict=True)]
    index = _Index.of(indices, others, [(shape[dim], *[1] * (-row - 1)) for dim, row in enumerate(rows) if row])
    if node.target in _LOOKUPS:
        return lambda build: _look_up(build, node, others, rows, index)
    if index.repeated and not (rest[1:] and rest[1]):  # which of several values stays is not said
        return None
    return lambda build: _put(build, node, others, rows, index)


@dataclass(frozen=True, slots=True)
class _Index:
    """The dims of the indices of a lookup. wants: of all of them together; has: where the numbers of rows are left out:
    along other dims all indices are the same. at: where the dims stand in what is looked up."""

    wants: tuple[int, ...]
    has: tuple[int, ...]
    at: int

    @classmethod
    def of(
        cls, indices: Sequence[fx.Node | None], others: Sequence[fx.Node | None], rows: Sequence[Sequence[int]]
    ) -> _Index:  # fmt: skip
        """rows: the shapes of their numbers."""
        wants, has = (
            torch.broadcast_shapes(*(record(each).type.shape for each in some if each is not None), *more)
            for some, more in ((indices, ()), (others, rows))
        )
        places = [dim for dim, index in enumerate(indices) if index is not None]
        return cls((*wants,), (*has,), places[0] if places[-1] - places[0] + 1 == len(places) else 0)

    @property
    def padded(self) -> tuple[int, ...]:
        """`has`, with 1 for each dim that it lacks."""
        return (*[1] * (len(self.wants) - len(self.has)), *self.has)

    @property
    def repeated(self) -> list[int]:
        """The dims of what is looked up along which it repeats."""
        return [self.at + i for i, pair in enumerate(zip(self.wants, self.padded, strict=True)) if pair[0] != pair[1]]


def _look_up(build: Builder, node: fx.Node, others: list[fx.Node | None], rows: list[int], index: _Index) -> fx.Node:
    """Look up without the numbers of rows; as often as they ask for it."""
    name, args = "index_of_rows", build.new((_args(node)[0], others, rows))
    if index.has == index.wants:
        return build.call(op(name), *args, like=record(node), name=name)
    found = build.infer(op(name), *args, like=record(node), name=name)
    own = record(found).type.shape
    shape = [*own[: index.at], *index.padded, *own[index.at + len(index.has) :]]
    made = build.infer(aten.reshape.default, found, shape, like=record(node), name="rows")
    return build.infer(aten.expand.default, made, [*record(node).type.shape], like=record(node))


def _put(build: Builder, node: fx.Node, others: list[fx.Node | None], rows: list[int], index: _Index) -> fx.Node:
    """Write without the numbers of rows; what comes to one place several times, as its sum."""
    x, indices, values, *adds = _args(node)
    name, value = "index_put_of_rows", build.value[values]
    if index.has != index.wants:
        kept = [size for size, one in zip_longest(record(x).type.shape, indices) if one is None]
        before, behind = kept[: index.at], kept[index.at :]
        value = build.infer(aten.expand.default, value, [*before, *index.wants, *behind], like=record(node))
        if index.repeated:
            value = build.infer(aten.sum.dim_IntList, value, index.repeated, True, like=record(node))
        value = build.infer(aten.reshape.default, value, [*before, *index.has, *behind], like=record(node))
    args = *build.new((x, others, rows)), value, bool(adds and adds[0])
    return build.call(op(name), *args, like=record(node), name=name)


def _shown(build: Builder, node: fx.Node, rows: list[int]) -> fx.Node:
    """What is looked up by its own numbers alone, as a view: x[arange(b)[:, None, None], arange(t)]."""
    x, wanted, own = build.value[_args(node)[0]], record(node).type.shape, record(_args(node)[0]).type.shape
    behind = own[len(rows) :]
    index = wanted[: len(wanted) - len(behind)]
    shape = [*(size if i - len(index) in rows else 1 for i, size in enumerate(index)), *behind]
    made = x if shape == [*own] else build.infer(aten.reshape.default, x, shape, like=record(node), name="rows")
    return made if shape == [*wanted] else build.infer(aten.expand.default, made, [*wanted], like=record(node))


def _row_itself(node: fx.Node, known: Known) -> Make | None:
    """The sum of rows by their own numbers, which is each row, or what asked for it several times: the gradient of
    x[arange(n)]."""
    if node.target is not op("embedding_backward"):
        return None
    values, index, rows, padding = _args(node)
    row = known.counts(index, rows) if padding < 0 else 0
    if not row:
        return None
    dims = len(record(index).type.shape)
    others = [dim for dim in range(dims) if dim != dims + row]
    if not others:
        return lambda build: build.value[values]
    return lambda build: build.infer(aten.sum.dim_IntList, build.value[values], others, like=record(node), name="rows")


def _args(node: fx.Node) -> Any:
    return node.args
