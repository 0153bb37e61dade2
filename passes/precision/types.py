"""The types of a call's results for operands of other dtypes than it was traced with: asked of the op itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.ir.program import TensorType, Types, is_getitem, record


class ResultTypes:
    """Runs ops on tensors without data; a call like an earlier one is not run again."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[torch.dtype | None, ...]] = {}

    def of(self, node: fx.Node) -> Types:
        """The types of a node's results. The shapes are those that its record has."""
        found = record(node)
        if is_getitem(node):
            producer, index = node.args
            assert isinstance(producer, fx.Node) and isinstance(index, int)
            return (record(producer).types[index],)
        return tuple(
            TensorType(type_.shape, dtype) if type_ is not None and dtype is not None else type_
            for type_, dtype in zip(found.types, self._dtypes(node), strict=True)
        )

    def _dtypes(self, node: fx.Node) -> tuple[torch.dtype | None, ...]:
        key = str(node.target), repr(fx.node.map_arg((node.args, dict(node.kwargs)), _types_of))
        if key not in self._known:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), _empty)
            target: Any = node.target
            results = target(*args, **kwargs)
            results = results if isinstance(results, (tuple, list)) else (results,)
            self._known[key] = tuple(r.dtype if isinstance(r, torch.Tensor) else None for r in results)
        return self._known[key]


def _types_of(node: fx.Node) -> Any:
    return record(node).types


def _empty(node: fx.Node) -> Any:
    """A tensor without data, or a tuple of them."""
    found = record(node)
    made = [None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in found.types]
    return tuple(made) if found.several else made[0]
