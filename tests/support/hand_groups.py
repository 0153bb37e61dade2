"""Fused groups made by hand: a function of tensors, traced, with the records of a program of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.layout import replicated
from autopar.ir.mesh import Mesh
from autopar.ir.ops.fused import Fused
from autopar.ir.program import Record, TensorType, set_record

_NUMBER = 2**40  # from here on integers stand for operands


def group(function: Callable[..., Any], operands: Sequence[Any], name: str = "group", kind: str = "rows") -> Fused:
    """What a function does with tensors of these shapes and dtypes, and with integers, as a group."""
    examples = [
        torch.empty_like(o, device="meta") if isinstance(o, torch.Tensor) else _NUMBER + i
        for i, o in enumerate(operands)
    ]

    def flat(*args: Any) -> tuple[torch.Tensor, ...]:
        found = function(*args)
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)

    graph = make_fx(flat, tracing_mode="real")(*examples).graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in graph.nodes:  # a trace takes a number for a constant, and programs name no device
        if node.op == "call_function":
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
            node.args, node.kwargs = fx.node.map_aggregate(
                (node.args, node.kwargs),
                lambda a: inputs[a - _NUMBER] if type(a) is int and a - _NUMBER in range(len(inputs)) else a,
            )
    for node in list(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    numbers = iter(operands)
    for node in graph.nodes:
        if node.op == "output":
            continue
        value = next(numbers) if node.op == "placeholder" else node.meta["val"]
        set_record(node, _record(value))
    return Fused(graph, name, kind, Mesh(()))


def _record(value: Any) -> Record:
    values = value if isinstance(value, (tuple, list)) else [value]
    types = tuple(TensorType(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else None for v in values)
    layouts = tuple(None if t is None else replicated(len(t.shape)) for t in types)
    return Record(types, several=isinstance(value, (tuple, list)), layouts=layouts, source="model.py:1")


def plain(fused: Fused) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The group op by op."""
    module = fx.GraphModule(torch.nn.Module(), fused.graph)

    def run(*operands: Any) -> tuple[torch.Tensor, ...]:
        return tuple(module(*operands))

    return run
