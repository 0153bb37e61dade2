"""windows: convolutions along a sequence say how many rows lie before and after their input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, TensorType, erase_unused, is_getitem, operand_nodes, record
from autopar.passes.lengths.sliced_rows import Window, pad_of, window_of
from autopar.passes.rules import table_of
from autopar.passes.rules.convolution import every
from autopar.passes.rules.rule import Table
from autopar.passes.search.intents import context_axes

aten = torch.ops.aten
Ints = tuple[int, ...]


def windows(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Where cp splits a dim, the convolutions along it take in the pads and slices beside them.

        mesh: cp=2
        CAPTURED program
        %x: f32[2,6,8] = batch "0"
        %w: f32[6,1,4] = parameter "w"
        %b: f32[6,1] = parameter "b"
        %convolution: f32[2,6,11] = aten.convolution.default(%x, %w, None, [1], [3], [1], False, [0], 6)
        %add: f32[2,6,11] = aten.add.Tensor(%convolution, %b)
        %slice_1: f32[2,6,8] = aten.slice.Tensor(%add, 2, 0, 8)
        return value "y" = %slice_1
    becomes
        CAPTURED program
        %x: f32[2,6,8] = batch "0"
        %w: f32[6,1,4] = parameter "w"
        %b: f32[6,1] = parameter "b"
        %convolution: f32[2,6,8] = autopar.convolution.default(%x, %w, [1], [3], [0], [1], 6)
        %add: f32[2,6,8] = aten.add.Tensor(%convolution, %b)
        return value "y" = %add

    11 places and 8 rows share no split; 8 and 8 do. A convolution is taken if it has a dim of space of which the output
    has a place for every `stride` rows, and the axis divides the places. Its gradient becomes that of its input and
    that of its weight, which lose the same pads.
    """
    size = math.prod(size for _, size in context_axes(plan.mesh))
    if size == 1:
        return program
    windows = _Windows(program, table_of(plan), size)
    return windows.run(program) if windows.places else program


@dataclass(frozen=True, slots=True)
class _Place:
    """A convolution without what stands beside it: its operand `x`, and of each dim of space its sizes on the way in
    and out, and the zeros before it."""

    x: fx.Node
    rows: Ints
    places: Ints
    kernel: Ints
    stride: Ints
    before: Ints
    dilation: Ints
    groups: int

    def wide(self, i: int) -> int:
        """The rows that one place reads of."""
        return self.dilation[i] * (self.kernel[i] - 1) + 1

    @property
    def after(self) -> Ints:
        """The rows behind the input that the last place reads."""
        return tuple(
            (places - 1) * self.stride[i] + self.wide(i) - self.rows[i] - self.before[i]
            for i, places in enumerate(self.places)
        )

    def may_be_split(self, size: int) -> bool:
        """True if some dim may be split, of which aten's op reads not each row once."""
        return any(
            rows == places * stride and places % size == 0 and (before, self.wide(i)) != (0, stride)
            for i, (rows, places, stride, before) in enumerate(
                zip(self.rows, self.places, self.stride, self.before, strict=True)
            )
        )

    def cut(self, dim: int, window: Window) -> _Place:
        """The convolution of which the output has the rows of a slice alone."""
        before, places = list(self.before), list(self.places)
        before[dim - 2] -= window.start * self.stride[dim - 2]
        places[dim - 2] = window.short
        return replace(self, before=tuple(before), places=tuple(places))

    @property
    def args(self) -> tuple[Any, ...]:
        """The last arguments of the op, and of its gradients."""
        return list(self.stride), list(self.before), list(self.after), list(self.dilation), self.groups


class _Windows:
    """Writes a program with other convolutions."""

    def __init__(self, program: Program, table: Table, size: int) -> None:
        self.table, self.size = table, size
        self.build = Builder("windows")
        self.places: dict[fx.Node, _Place] = {}  # of the calls of aten that become others
        self.short: dict[fx.Node, Window] = {}  # what stands between a convolution and the slice of its output
        self.dims: dict[fx.Node, int] = {}  # and the dim of that slice
        self.same: dict[fx.Node, fx.Node] = {}  # what another value now stands for: slices, and pads of gradients
        for node in program.calls():
            if node.target is aten.convolution.default:
                self._find(node)
            elif node.target is aten.convolution_backward.default:
                self._find_backward(node)

    def run(self, program: Program) -> Program:
        gone = {node for node in self.places if node.target is aten.convolution_backward.default}
        made = self.build.rewrite(program, self._put, later=gone)
        erase_unused(made.graph)
        return made

    # --- what there is

    def _find(self, node: fx.Node) -> None:
        place = _place(node, 3, record(node).type.shape)
        if place is None:
            return
        chain, end = self._chain(node)
        if end is not None:
            dim, window = window_of(end)  # type: ignore[misc]
            place = place.cut(dim, window)
        if not place.may_be_split(self.size):
            return
        self.places[node] = place
        if end is not None:
            self.same[end] = chain[-1]
            self.short |= dict.fromkeys(chain, window)
            self.dims |= dict.fromkeys(chain, dim)

    def _chain(self, node: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
        """What is computed of a convolution alone, place by place, up to a slice of one of its dims of space."""
        chain = [node]
        while len(chain[-1].users) == 1:
            (user,) = chain[-1].users
            window = window_of(user)
            if window is not None:
                return chain, user if window[0] >= 2 and window[1].short < window[1].long else None
            if not self._is_added(user, chain[-1]):
                break
            chain.append(user)
        return chain, None

    def _is_added(self, user: fx.Node, value: fx.Node) -> bool:
        """True for an op place by place whose other operands have no dims of space."""
        row = self.table.get(str(user.target))
        is_plain = row is not None and facts_of(user.target).pointwise and row.shape_arg is None and row.local is None
        shapes = [record(operand).type.shape[-len(record(value).type.shape) + 2 :] for operand in operand_nodes(user)
                  if operand is not value]  # fmt: skip
        alike = record(user).is_tensor and record(user).type.shape == record(value).type.shape
        return is_plain and alike and all(set(shape) <= {1} for shape in shapes)

    def _find_backward(self, node: fx.Node) -> None:
        grad, x, wanted = node.args[0], node.args[1], node.args[10]
        assert isinstance(grad, fx.Node) and isinstance(x, fx.Node)
        place = None if wanted[2] else _place(node, 4, record(grad).type.shape)  # type: ignore[index]
        if place is None:
            return
        pad = _zeros_around(grad)
        if pad is not None:
            place = place.cut(*pad)
        crops = [user for item in node.users if item.args[1] == 0 for user in item.users] if place.x is not x else []
        if not place.may_be_split(self.size) or not all(_crops(user, x, place.x) for user in crops):
            return
        self.places[node] = place
        self.same |= {user: user.args[0] for user in crops}  # type: ignore[misc]
        for user in grad.users if pad is not None else ():
            if pad and user.target is aten.sum.dim_IntList and pad[0] in _dims(user, len(record(grad).type.shape)):
                self.same[user] = user

    # --- what becomes of it

    def _put(self, node: fx.Node) -> fx.Node | None:
        if is_getitem(node) and node.args[0] in self.places:
            return self._gradient(node, node.args[0], int(node.args[1]))  # type: ignore[arg-type, index]
        if node in self.same and self.same[node] is node:
            return self._sum(node)
        if node in self.same:
            return self.build.value[self.same[node]]
        if node in self.places and node.target is aten.convolution.default:
            place, w = self.places[node], node.args[1]
            like = self._shorter(node)
            args = self.build.new((place.x, w))
            return self.build.call(op("convolution"), *args, *place.args, like=like, name=node.name)
        if node in self.short:
            args, kwargs = self.build.new((node.args, dict(node.kwargs)))
            return self.build.call(node.target, *args, like=self._shorter(node), name=node.name, **kwargs)  # type: ignore[arg-type]
        return None

    def _shorter(self, node: fx.Node) -> Any:
        """The record of a value of which only the rows of a slice are left."""
        known = record(node)
        if node not in self.short:
            return known
        shape = list(known.type.shape)
        shape[self.dims[node]] = self.short[node].short
        return known.with_(types=(TensorType(tuple(shape), known.type.dtype),), origin="")

    def _gradient(self, node: fx.Node, call: fx.Node, index: int) -> fx.Node:
        """One result of a convolution's gradient: that of its input or that of its weight."""
        place, like = self.places[call], record(node)
        grad, w = self._inside(call.args[0]), call.args[2]
        name = "convolution_weight_backward" if index else "convolution_input_backward"
        operand, sizes = (place.x, place.kernel) if index else (w, place.rows)
        if not index and place.x is not call.args[1]:
            like = like.with_(types=(record(place.x).type,), origin="")
        args = self.build.new((grad, operand))
        return self.build.call(op(name), *args, list(sizes), *place.args, like=like, name=name)

    def _inside(self, grad: Any) -> fx.Node:
        """A gradient without the zeros around it."""
        inside = grad if _zeros_around(grad) is None else grad.args[0]
        assert isinstance(inside, fx.Node)
        return inside

    def _sum(self, node: fx.Node) -> fx.Node:
        """A sum over zeros, too, is one over the rest."""
        (padded, *args), kwargs = node.args, dict(node.kwargs)
        inside = self.build.value[self._inside(padded)]
        return self.build.call(node.target, inside, *args, like=record(node), name=node.name, **kwargs)  # type: ignore[arg-type]


def _place(node: fx.Node, at: int, output: Ints) -> _Place | None:
    """A convolution, or its gradient, whose stride is argument `at`. None for a transposed one."""
    args: tuple[Any, ...] = node.args[at : at + 6]
    stride, padding, dilation, transposed, _, groups = args
    x, w = (node.args[0], node.args[1]) if at == 3 else (node.args[1], node.args[2])
    assert isinstance(x, fx.Node) and isinstance(w, fx.Node)
    if transposed or (at == 3 and node.args[2] is not None):
        return None
    count = len(output) - 2
    inside, pads = _unpadded(x, count)
    stride, padding, dilation = (every(value, count) for value in (stride, padding, dilation))
    before = tuple(p + b for p, b in zip(padding, pads, strict=True))
    rows, kernel = record(inside).type.shape[2:], record(w).type.shape[2:]
    return _Place(inside, rows, output[2:], kernel, stride, before, dilation, groups)  # type: ignore[arg-type]


def _unpadded(x: fx.Node, count: int) -> tuple[fx.Node, Sequence[int]]:
    """What a value is without zeros around its dims of space, and how many lie before each."""
    if x.target is aten.constant_pad_nd.default and not any(x.args[2:]):
        pads: Any = x.args[1]
        if len(pads) <= 2 * count or not any(pads[2 * count :]):
            before = [pads[2 * i] if 2 * i < len(pads) else 0 for i in reversed(range(count))]
            inside = x.args[0]
            assert isinstance(inside, fx.Node)
            return inside, before
    return x, [0] * count


def _zeros_around(grad: Any) -> tuple[int, Window] | None:
    """The dim of space along which a gradient has zeros around it, and which rows are none."""
    if grad.target is aten.constant_pad_nd.default and any(grad.args[2:]):
        return None
    pad = pad_of(grad)
    return pad if pad is not None and pad[0] >= 2 and pad[1].short < pad[1].long else None


def _crops(user: fx.Node, padded: fx.Node, inside: fx.Node) -> bool:
    """True if a node takes from the gradient of a padded value what is that of the value inside."""
    if user.target is not aten.constant_pad_nd.default:
        return False
    pads, crop = list(padded.args[1]), list(user.args[1])  # type: ignore[arg-type]
    return [-size for size in pads] == crop and record(user).type.shape == record(inside).type.shape


def _dims(node: fx.Node, count: int) -> set[int]:
    """The dims that a sum is over."""
    dims: Any = node.args[1]
    return {dim % count for dim in dims} if dims else set(range(count))
