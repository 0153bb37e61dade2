"""Take graphs apart: into what is the same at every size of a batch, and the numbers that may change with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from autopar.ir.program import Program, Record, TensorType, record, set_record
from autopar.torch_compat import FakeTensor

aten = torch.ops.aten
Number = int | str  # a float as its `hex()`: the very one, with the sign of a zero, and nan is nan
_INT, _FLOAT, _NODE, _LIST, _SLICE, _TENSOR, _NONE = "int", "float", "node", "list", "slice", "tensor", "none"
_PLAIN = (bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unsupported(Exception):
    """Something is in a graph of which nobody knows whether it changes with the sizes."""


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A graph without its numbers, which stand beside it in the order of the graph."""

    structure: Hashable
    numbers: tuple[Number, ...]


class _Taker:
    """Takes values apart, and keeps the numbers."""

    def __init__(self) -> None:
        self.numbers: list[Number] = []
        self.places: dict[fx.Node, int] = {}

    def take(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is int:
            self.numbers.append(value)
            return _INT
        if kind is float:
            self.numbers.append(value.hex())
            return _FLOAT
        if value is None:
            return _NONE
        if isinstance(value, fx.Node):
            return _NODE, self.places[value]
        if isinstance(value, (tuple, list)):
            return _LIST, isinstance(value, list), tuple([self.take(item) for item in value])
        if isinstance(value, Mapping):
            return tuple(value), tuple([self.take(item) for item in value.values()])
        if kind is slice:
            return _SLICE, self.take((value.start, value.stop, value.step))
        if kind in _PLAIN:
            return kind, value
        raise Unsupported(kind.__qualname__)

    def tensor(self, value: Any) -> Hashable:
        """A traced value: also its strides, which decide how torch computes, and how many elements it has."""
        if isinstance(value, (tuple, list)):
            return _LIST, tuple([self.tensor(item) for item in value])
        if not isinstance(value, torch.Tensor):
            return self.take(value)
        if value.layout is not torch.strided:
            raise Unsupported(value.layout)
        self.numbers += map(int, (*value.shape, *value.stride(), value.storage_offset(), value.numel()))
        return _TENSOR, value.ndim, value.dtype, value.device, isinstance(value, FakeTensor)

    def node(self, node: fx.Node) -> Hashable:
        self.places[node] = len(self.places)
        target = node.target if node.op == "call_function" else ""
        return node.op, target, self.take(node.args), self.take(node.kwargs)


def _ends(node: fx.Node) -> list[int]:
    """Where each part of a `cat` ends: the backward pass takes them out again."""
    parts: Any = node.args[0]
    dim: Any = node.args[1] if len(node.args) > 1 else 0
    return list(accumulate(int(part.meta["val"].shape[dim]) for part in parts if part.meta["val"].ndim > 1))


def of_trace(graph: fx.Graph, results: Sequence[Any], place: str, kept: Any, known: Hashable) -> Skeleton:
    """What was traced so far, in the traced order, with the nodes of what leaves. place: the key of a node's place.
    kept: values that go with it. known: what else decides it."""
    taker, nodes = _Taker(), list[Hashable]()
    for node in graph.nodes:
        nodes.append((taker.node(node), taker.tensor(node.meta["val"]), node.meta.get(place)))
        if node.target is aten.cat.default:
            taker.numbers += _ends(node)
    return Skeleton((tuple(nodes), taker.take((tuple(results), kept)), known), tuple(taker.numbers))


def of_program(program: Program) -> Skeleton:
    """A captured program."""
    taker = _Taker()
    nodes = [(node.name, taker.node(node), _taken(record(node), taker)) for node in program.graph.nodes]
    whole = tuple(nodes), program.inputs, program.outputs, program.level, program.notes
    return Skeleton(whole, tuple(taker.numbers))


def _taken(known: Record, taker: _Taker) -> Hashable:
    types = tuple([type_ and (type_.dtype, taker.take(type_.shape)) for type_ in known.types])
    taker.numbers.append(known.flops)
    return types, known.exact, known.with_(types=(), flops=0)


def with_numbers(program: Program, numbers: Sequence[Number]) -> Program:
    """The program of the same skeleton with these numbers."""
    graph, value, left = fx.Graph(), dict[fx.Node, fx.Node](), iter(numbers)
    for node in program.graph.nodes:
        args, kwargs = _put(node.args, left, value.__getitem__), _put(node.kwargs, left, value.__getitem__)
        made = value[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        set_record(made, _with_numbers(record(node), left))
    assert next(left, None) is None
    return program.with_(graph=graph)


def _with_numbers(known: Record, left: Iterator[Number]) -> Record:
    types = tuple([type_ and TensorType(_put(type_.shape, left, _no_node), type_.dtype) for type_ in known.types])
    flops: Any = next(left)
    return known if types == known.types and flops == known.flops else known.with_(types=types, flops=flops)


def _put(value: Any, left: Iterator[Number], node_of: Callable[[fx.Node], fx.Node]) -> Any:
    """A value with the next numbers, in the order in which they were taken."""

    def put(leaf: Any) -> Any:
        kind = type(leaf)
        if kind is int:
            return next(left)
        if kind is float:
            return float.fromhex(str(next(left)))
        return node_of(leaf) if isinstance(leaf, fx.Node) else leaf

    return fx.node.map_aggregate(value, put)


def _no_node(_: fx.Node) -> fx.Node:
    raise AssertionError
