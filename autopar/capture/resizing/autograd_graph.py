"""Describe the graph that autograd made of a forward pass: what the backward pass will run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from autopar.capture.ops import functions
from autopar.capture.resizing.skeleton import Unsupported
from autopar.torch_compat import custom_function

_WRITTEN = "torch::autograd::CopySlices"  # a view was written into


def autograd_graph(loss: torch.Tensor, names: Mapping[int, str]) -> tuple[Hashable, list[Any]]:
    """The nodes behind a loss in a fixed order, each with its kind, the nodes that it leads to, and its place in the
    order in which they were made; and what functions of ours keep beside tensors. names: of the leaves that are
    trained, by id.

    The same ops can have another one: of a tensor that was detached, or where no gradients were wanted. Raises
    Unsupported where the backward pass runs a function of the user's, whose Python may do anything.
    """
    found: dict[Any, int] = {}
    rows: list[Any] = []
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in found:
            continue
        found[node] = len(rows)
        rows.append((_kind(node, names), node))
        pending += [parent for parent, _ in node.next_functions]
    made = {node: at for at, (_, node) in enumerate(sorted(rows, key=lambda row: _number(row[1])))}
    graph = tuple(
        (kind, made[node], tuple([(found.get(parent), slot) for parent, slot in node.next_functions]))
        for kind, node in rows
    )
    return graph, [vars(node) for _, node in rows if custom_function(node) is not None]


def _number(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


def _kind(node: Any, names: Mapping[int, str]) -> str:
    custom = custom_function(node)
    if custom is not None and custom.__module__ != functions.__name__:
        raise Unsupported(custom.__qualname__)
    name: str = node.name()
    if hasattr(node, "variable"):
        if id(node.variable) not in names:
            raise Unsupported(name)
        return f"{name} {names[id(node.variable)]}"
    if custom is None and not name.isidentifier() and name != _WRITTEN:  # of a library's C++
        raise Unsupported(name)
    return name
