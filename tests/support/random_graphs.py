"""Random LOCAL programs of calls that groups may hold, with products, sums over ranks and phases between them.

They are drawn from a seed. Types are those that the ops themselves give on meta tensors, so that every program is well
formed; it says forward for its first part and backward for the rest, and every value may be read anywhere behind it.
"""

from __future__ import annotations

import operator
import random
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import replicated
from autopar.ir.mesh import Mesh
from autopar.ir.ops.ops import op
from autopar.ir.ops.storage import root_of
from autopar.ir.program import Input, Level, Output, Program, Record, TensorType, record, set_record

aten = torch.ops.aten
SHAPE = (2, 3, 8)
F32, BF16 = torch.float32, torch.bfloat16
_ONE = (
    aten.exp.default, aten.sigmoid.default, aten.tanh.default, aten.neg.default, aten.relu.default, aten.abs.default,
    aten.gelu.default, aten.silu.default, aten.cos.default, aten.clone.default,
)  # fmt: skip
_TWO = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default)


class _Drawn:
    """A program so far. values: what there is to read."""

    def __init__(self, seed: int) -> None:
        self.draw, self.graph, self.mesh = random.Random(seed), fx.Graph(), Mesh(())
        self.inputs: list[Input] = []
        self.values: list[fx.Node] = []
        self.phase = "forward"
        self.weights = [self.given((SHAPE[-1],), F32, "parameter") for _ in range(2)]
        self.square = self.given((SHAPE[-1], SHAPE[-1]), F32, "parameter")
        self.seed = self.given((2,), torch.int64, "seed")
        self.values += [self.given(SHAPE, dtype) for dtype in (F32, F32, BF16)]

    def f32(self) -> fx.Node:
        x = self.any(full=True)
        return x if record(x).type.dtype == F32 else self.call(aten._to_copy.default, x, dtype=F32)

    def given(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str = "batch") -> fx.Node:
        name = f"x{len(self.inputs)}"
        node = self.graph.create_node("placeholder", name, name=name)
        set_record(node, Record((TensorType(shape, dtype),), layouts=(replicated(len(shape)),), origin=name))
        self.inputs.append(Input(kind, (name,)))
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a call; its parts if it has several results, itself else."""
        node = self.graph.create_node("call_function", target, args, kwargs)
        meta = fx.node.map_arg((args, kwargs), _meta)
        given = target(*meta[0], **meta[1])
        several = isinstance(given, (tuple, list))
        types = tuple(TensorType(tuple(one.shape), one.dtype) for one in (given if several else (given,)))
        known = Record(
            types, several, tuple(replicated(len(one.shape)) for one in types),
            tuple(replicated(len(record(arg).type.shape)) for arg in _in_order(args, kwargs)),
            source=f"model.py:{len(self.graph.nodes)}", phase=self.phase, origin=node.name,
        )  # fmt: skip
        set_record(node, known)
        if not several:
            return node
        return tuple(self.part(node, place, type_) for place, type_ in enumerate(types))

    def part(self, node: fx.Node, place: int, type_: TensorType) -> fx.Node:
        made = self.graph.create_node("call_function", operator.getitem, (node, place), {})
        layout = replicated(len(type_.shape))
        set_record(made, Record((type_,), layouts=(layout,), phase=self.phase, origin=made.name))
        return made

    def any(self, *, full: bool = False) -> fx.Node:
        """A value of floats; full: with all elements of a row, and all rows."""
        found = [node for node in self.values if not full or record(node).type.shape == SHAPE]
        return self.draw.choice(found[-12:] if self.draw.random() < 0.7 else found)

    def step(self) -> None:
        made = self.draw.choice(STEPS)(self)
        self.values += made if isinstance(made, tuple) else (made,)


def _in_order(*args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []

    def keep(arg: fx.Node) -> fx.Node:
        if record(arg).is_tensor:
            found.append(arg)
        return arg

    fx.node.map_arg(args, keep)
    return found


def _meta(node: fx.Node) -> Any:
    return torch.empty(record(node).type.shape, dtype=record(node).type.dtype, device="meta")


def one(made: _Drawn) -> Any:
    return made.call(made.draw.choice(_ONE), made.any())


def two(made: _Drawn) -> Any:
    a = made.any(full=True)
    other = made.draw.choice(("full", "row", "vector", "number"))
    if other == "number":
        return made.call(made.draw.choice(_TWO[:3]), a, made.draw.choice((2, 0.5, 1, 1.0)))
    b = {"full": lambda: made.any(full=True), "row": lambda: row(made), "vector": lambda: vector(made)}[other]()
    a, b = (a, b) if made.draw.random() < 0.7 else (b, a)
    return made.call(made.draw.choice(_TWO), a, b)


def row(made: _Drawn) -> Any:
    """A value for each row."""
    x, how = made.any(full=True), made.draw.choice(("sum", "mean", "amax"))
    if how == "sum":
        return made.call(aten.sum.dim_IntList, x, [-1], True)
    return made.call(aten.mean.dim if how == "mean" else aten.amax.default, x, [-1], True)


def vector(made: _Drawn) -> Any:
    """A value for each column: a weight, cast now and then, or a sum over all rows, which ends its group."""
    if made.draw.random() < 0.5:
        return made.draw.choice(made.weights)
    return made.call(aten.sum.dim_IntList, made.any(full=True), [0, 1], True)


def norm(made: _Drawn) -> Any:
    x, (w, b) = made.any(full=True), made.weights[:2]
    if record(x).type.dtype != F32:
        x = made.call(aten._to_copy.default, x, dtype=F32)
    kind = made.draw.choice(("layer", "rms", "layer_backward", "rms_backward"))
    if kind == "layer":
        return made.call(aten.native_layer_norm.default, x, [SHAPE[-1]], w, b, 1e-5)[0]
    if kind == "rms":
        return made.call(op("rms_norm"), x, w, 1e-5)[0]
    if kind == "rms_backward":
        factor = made.call(op("rms_norm"), x, w, 1e-5)[1]
        return made.call(op("rms_norm_backward"), made.f32(), x, w, factor)[0]
    _, mean, rstd = made.call(aten.native_layer_norm.default, x, [SHAPE[-1]], w, b, 1e-5)
    grad = made.f32()
    return made.call(
        aten.native_layer_norm_backward.default, grad, x, [SHAPE[-1]], mean, rstd, w, b, [True, True, True]
    )[0]


def softmax(made: _Drawn) -> Any:
    x = made.any(full=True)
    y = made.call(aten._softmax.default, x, -1, False)
    if made.draw.random() < 0.5:
        return y
    return made.call(aten._softmax_backward_data.default, y, y, -1, record(y).type.dtype)


def turn(made: _Drawn) -> Any:
    """Rows in another order, and back: a permutation between element-wise calls."""
    x = made.call(aten.transpose.int, made.any(full=True), 0, 1)
    y = made.call(made.draw.choice(_ONE), x)
    return made.call(aten.transpose.int, y, 0, 1)


def rotate(made: _Drawn) -> Any:
    x = made.any(full=True)
    left, right = made.call(aten.split.Tensor, x, SHAPE[-1] // 2, -1)
    return made.call(aten.cat.default, [made.call(aten.neg.default, right), left], -1)


def fold(made: _Drawn) -> Any:
    """The last dim in two, and back."""
    x = made.call(aten.reshape.default, made.any(full=True), [2, 3, 2, 4])
    y = made.call(made.draw.choice(_ONE), x)
    if made.draw.random() < 0.5:
        y = made.call(aten.transpose.int, made.call(aten.transpose.int, y, 1, 2), 1, 2)
    return made.call(aten.reshape.default, y, list(SHAPE))


def cut(made: _Drawn) -> Any:
    x = made.call(aten.slice.Tensor, made.any(full=True), 2, 1, SHAPE[-1])
    y = made.call(made.draw.choice(_ONE), x)
    return made.call(aten.constant_pad_nd.default, y, [1, 0], 0.0)


def cast(made: _Drawn) -> Any:
    x = made.any()
    return made.call(aten._to_copy.default, x, dtype=BF16 if record(x).type.dtype == F32 else F32)


def masked(made: _Drawn) -> Any:
    x = made.any(full=True)
    return made.call(aten.where.self, made.call(aten.gt.Scalar, x, 0.1), x, made.any(full=True))


def dropout(made: _Drawn) -> Any:
    x, key = made.any(full=True), made.draw.randint(1, 3)
    return made.call(op("dropout"), x, made.seed, key, 0.3, list(SHAPE), list(SHAPE), [0, 0, 0])


def product(made: _Drawn) -> Any:
    x = made.f32()
    return made.call(op("einsum"), x, made.square, "abc,dc->abd")


def scan(made: _Drawn) -> Any:
    """What no kernel computes."""
    return made.call(aten.cumsum.default, made.any(full=True), made.draw.choice((1, 2)))


STEPS = (
    one, one, one, two, two, two, two, row, norm, softmax, turn, rotate, fold, cut, cast, cast, masked, dropout,
    product, product, scan,
)  # fmt: skip


def program(seed: int) -> Program:
    """A program of 5 to 60 calls, about."""
    made = _Drawn(seed)
    count = made.draw.randint(4, 40)
    for step in range(count):
        made.phase = "forward" if step < count // 2 else "backward"
        made.step()
    loose = [node for node in made.values if not node.users and node.op == "call_function"]
    others = [node for node in made.values if node.users and node.op == "call_function"]
    results = loose + made.draw.sample(others, min(len(others), 2))
    ends = [made.call(aten.clone.default, node) if _is_view(node) else node for node in dict.fromkeys(results)]
    layouts = tuple(replicated(len(record(node).type.shape)) for node in ends)
    set_record(made.graph.output(tuple(ends)), Record((None,), operands=layouts))
    outputs = tuple(Output("value", f"y{i}") for i in range(len(ends)))
    return Program(made.graph, tuple(made.inputs), outputs, Level.LOCAL, made.mesh)


def _is_view(node: fx.Node) -> bool:
    return root_of(node) is not node


def inputs(program_: Program, seed: int = 0) -> list[torch.Tensor]:
    """Numbers for the placeholders."""
    generator = torch.Generator().manual_seed(seed)
    types = [record(node).type for node in program_.placeholders]
    return [
        torch.randn(type_.shape, generator=generator).to(type_.dtype)
        if type_.dtype.is_floating_point
        else torch.tensor([seed, 7])
        for type_ in types
    ]
