"""Layers of an LSTM that torch has as one op on a CPU (`nn.LSTM` in float32), as chains.

The op has no rule, and keeps what its gradient reads only where autograd is on; a rank's step runs without. So this is
done on every mesh.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import contraction_flops, op
from autopar.ir.program import Builder, Program, Record, TensorType, erase_unused, is_getitem, record, set_record
from autopar.passes.reroll.calls import CallAdder

aten = torch.ops.aten
FORWARD, BACKWARD = aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default
LSTM = 2  # of the op's modes
# It gives h, c, the gates i, f, g and o, and tanh(c). Backwards x0 is the gradient of h, and x1 the c before.
STEP = (
    'v0 = autopar.einsum.default(h0, w0, "bh,gh->bg"); v1 = aten.add.Tensor(v0, x0); '
    "v2 = aten.split.Tensor(v1, {width}, 1); v3 = operator.getitem(v2, 0); v4 = operator.getitem(v2, 1); "
    "v5 = operator.getitem(v2, 2); v6 = operator.getitem(v2, 3); v7 = aten.sigmoid.default(v3); "
    "v8 = aten.sigmoid.default(v4); v9 = aten.tanh.default(v5); v10 = aten.sigmoid.default(v6); "
    "v11 = aten.mul.Tensor(v8, h1); v12 = aten.mul.Tensor(v7, v9); v13 = aten.add.Tensor(v11, v12); "
    "v14 = aten.tanh.default(v13); v15 = aten.mul.Tensor(v10, v14); rows = [v15, v13, v7, v8, v9, v10, v14]; "
    "states = [v15, v13]"
)
STEP_BACKWARD = (
    "v0 = aten.add.Tensor(x0, h0); v1 = aten.mul.Tensor(v0, x6); v2 = aten.mul.Tensor(v0, x5); "
    "v3 = aten.tanh_backward.default(v2, x6); v4 = aten.add.Tensor(h1, v3); v5 = aten.mul.Tensor(v4, x4); "
    "v6 = aten.mul.Tensor(v4, x1); v7 = aten.mul.Tensor(v4, x2); v8 = aten.mul.Tensor(v4, x3); "
    "v9 = aten.sigmoid_backward.default(v5, x2); v10 = aten.sigmoid_backward.default(v6, x3); "
    "v11 = aten.tanh_backward.default(v7, x4); v12 = aten.sigmoid_backward.default(v1, x5); "
    'v13 = aten.cat.default([v9, v10, v11, v12], 1); v14 = autopar.einsum.default(v13, w0, "bg,gh->bh"); '
    "rows = [v13, v14, v8]; states = [v14, v8]"
)


def with_chains(program: Program) -> Program:
    """The program with chains in place of such layers."""
    if not any(node.target is FORWARD and _is_plain(node) for node in program.calls()):
        return program
    found = _Layers(program).run()
    erase_unused(found.graph)
    return found


def _is_plain(node: fx.Node) -> bool:
    """True for a layer of a padded batch."""
    _, _, _, _, _, _, _, _, sizes, mode, *_ = node.args
    return not sizes and bool(mode == LSTM)


class _Layers:
    """Rewrites layers. forwards: of each what its chain gives; results: of an op each of its results."""

    def __init__(self, program: Program) -> None:
        self.program, self.build = program, Builder("reroll")
        self.calls = CallAdder(self.build)
        self.forwards: dict[fx.Node, list[fx.Node]] = {}
        self.results: dict[fx.Node, list[fx.Node | None]] = {}

    def run(self) -> Program:
        return self.build.rewrite(self.program, self._put)

    def _put(self, node: fx.Node) -> fx.Node | None:
        args: Any = node.args
        if node.target is FORWARD and _is_plain(node):
            self.results[node] = self._forward(node)
            return self.build.value[args[0]]  # its results are read one by one
        if node.target is BACKWARD and args[7].args[0] in self.forwards:
            self.results[node] = self._backward(node)
            return self.build.value[args[0]]
        if is_getitem(node) and args[0] in self.results:
            return (
                self.results[args[0]][args[1]] or self.build.value[args[0].args[0]]
            )  # of its workspace, which is none
        return None

    def _forward(self, node: fx.Node) -> list[fx.Node | None]:
        new: Any = self.build.new(node.args)
        dtype, like = _dtype(record(node)), _computed(record(node))
        x, w, u, b, c, h0, c0, reverse, _, _, width, _, has_biases, *_ = [self._as_computed(one, like) for one in new]
        length = _shape(x)[0]
        gates = self._einsum(x, w, "tbi,gi->tbg", like)
        for bias in (b, c) if has_biases else ():
            gates = self.build.infer(aten.add.Tensor, gates, bias, like=like, name="add")
        types = [TensorType((length, *_shape(h0)), record(h0).type.dtype)] * 7
        chain = self._chain([h0, c0], [gates], u, STEP.format(width=width), reverse, types, like)
        self.forwards[node] = chain
        last = 0 if reverse else length - 1
        results = [chain[0], self._row(chain[0], last, like), self._row(chain[1], last, like)]
        return [*(self._cast(one, dtype, like) for one in results), None]

    def _backward(self, node: fx.Node) -> list[fx.Node | None]:
        old: Any = node.args
        new: Any = self.build.new(old)
        like, wanted = _computed(record(node)), record(node).types
        given = [self._as_computed(one, like) for one in new]
        x, w, u, _, _, h0, c0, _, _, _, grad, grad_h, grad_c, reverse, *_ = given
        shape, length = (_shape(x)[0], *_shape(h0)), _shape(x)[0]
        h, c, *gates = self.forwards[old[7].args[0]]
        before = [self._before(*pair, reverse, like) for pair in ((h, h0), (c, c0))]
        zero = self.calls.number(0, like)
        grad = self.calls.expanded(zero, shape, like) if grad is None else grad
        start = [self.calls.expanded(zero, shape[1:], like) if one is None else one for one in (grad_h, grad_c)]
        type_ = record(h0).type
        types = [TensorType((*shape[:2], width), type_.dtype) for width in (4 * shape[2], shape[2], shape[2])]
        of_gates, of_h, of_c = self._chain(start, [grad, before[1], *gates], u, STEP_BACKWARD, not reverse, types, like)
        first = length - 1 if reverse else 0
        bias = self.build.infer(aten.sum.dim_IntList, of_gates, [0, 1], like=like, name="sum")
        results = [
            self._einsum(of_gates, w, "tbg,gi->tbi", like), self._einsum(of_gates, x, "tbg,tbi->gi", like),
            self._einsum(of_gates, before[0], "tbg,tbh->gh", like), bias, bias,
            self._row(of_h, first, like), self._row(of_c, first, like),
        ]  # fmt: skip
        return [self._cast(one, type_.dtype, like) for one, type_ in zip(results, wanted, strict=True) if type_]

    def _as_computed(self, value: Any, like: Record) -> Any:
        """An operand in the dtype of a record; what is no float stays."""
        is_float = isinstance(value, fx.Node) and record(value).is_tensor and record(value).type.dtype.is_floating_point
        return self._cast(value, _dtype(like), like) if is_float else value

    def _cast(self, value: fx.Node, dtype: torch.dtype, like: Record) -> fx.Node:
        if record(value).type.dtype == dtype:
            return value
        return self.build.infer(aten._to_copy.default, value, dtype=dtype, like=like, name="cast")

    def _chain(
        self, start: Any, rows: Any, weight: fx.Node, step: str, reverse: bool, types: list[TensorType], like: Record
    ) -> list[fx.Node]:
        length, products = _shape(rows[0])[0], contraction_flops("bh,gh->bg", _shape(start[0]), _shape(weight))
        known = like.with_(types=tuple(types), several=True, origin="", flops=length * products)
        made = self.build.call(op("chain"), start, rows, [weight], step, reverse, like=known, name="chain")
        return [self.build.infer(operator.getitem, made, i, like=like, name="state") for i in range(len(types))]

    def _einsum(self, a: fx.Node, b: fx.Node, equation: str, like: Record) -> fx.Node:
        made = self.build.infer(op("einsum"), a, b, equation, like=like, name="einsum")
        set_record(made, record(made).with_(flops=contraction_flops(equation, _shape(a), _shape(b))))
        return made

    def _before(self, x: fx.Node, start: fx.Node, reverse: bool, like: Record) -> fx.Node:
        """What each step reads of the one before it."""
        moved = self.calls.moved(x, 1 if reverse else -1, like)
        return self.calls.chosen(_shape(x)[0], _shape(x)[0] - 1 if reverse else 0, start, moved, like)

    def _row(self, x: fx.Node, t: int, like: Record) -> fx.Node:
        """One step's, summed out of zeros: no rank has to have the others."""
        alone = self.calls.chosen(_shape(x)[0], t, x, self.calls.number(0, like), like)
        return self.build.infer(aten.sum.dim_IntList, alone, [0], like=like, name="row")


def _dtype(like: Record) -> torch.dtype:
    return next(type_.dtype for type_ in like.types if type_ is not None)


def _computed(like: Record) -> Record:
    """A record of a layer in the dtype in which its steps are computed: of short floats torch's op, whose gradients are
    in float32, computes in that too."""
    if _dtype(like).itemsize >= 4:
        return like
    first = like.types[0]
    assert first is not None
    return like.with_(types=(TensorType(first.shape, torch.float32), *like.types[1:]))


def _shape(node: fx.Node) -> tuple[int, ...]:
    return record(node).type.shape
