"""Compute what a model reads while its trace goes on: a model with hundreds of reads is traced once, not once for each.

What stands behind a read is a part of the graph so far. It runs on data, each call once. Where this part is written
into in place, or needs what has no data, the trace ends at the read as ever (see `reads.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.data.known_values import leaves
from autopar.capture.ops.canonical import filled
from autopar.capture.trace.normalise import is_mutable
from autopar.capture.trace.tracer import Tracer
from autopar.ir.program import Input
from autopar.torch_compat import FakeTensor, no_function_modes, on_data, storage_of

Tensor = torch.Tensor
STEADY = ("batch", "constant", "buffer")


class _Unfit(Exception):
    """The trace has to end: the values cannot be computed on the way."""


@dataclass(slots=True)
class SoFar:
    """The graph of a trace that goes on. inputs: the data of those that a value may depend on, by position."""

    tracer: Tracer
    inputs: Sequence[Tensor | None]
    _values: dict[fx.Node, Any] = field(default_factory=dict)
    _memories: set[int | None] = field(default_factory=set)  # of what has a value
    _written: set[int | None] = field(default_factory=set)
    _last: fx.Node | None = None  # of those that were looked through

    @staticmethod
    def of(tracer: Tracer, given: Iterable[tuple[Input, Tensor | None]]) -> tuple[SoFar, SoFar]:
        """A trace that begins: with all that a value may depend on, and with the state of the model alone. given: the
        inputs, each with what it stands for."""
        known = [(entry.kind, tensor if is_steady(entry, tensor) else None) for entry, tensor in given]
        state = [None if kind == "batch" else tensor for kind, tensor in known]
        return SoFar(tracer, [tensor for _, tensor in known]), SoFar(tracer, state)

    def read(self, reader: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        """What a function takes out of a tensor of the trace; None if that is not known yet."""
        node = self.tracer.node_of(tensor)
        if node is None:
            return None
        try:
            with no_function_modes(), on_data():
                self._look()
                self._compute(node)
                return reader(self._values[node])
        except Exception:  # what fails on data is told where the trace ends
            return None

    def _compute(self, wanted: fx.Node) -> None:
        pending = [wanted]
        while pending:
            node = pending[-1]
            before = [each for each in _needed(node) if each not in self._values]
            if before:
                pending += before
                continue
            pending.pop()
            if node not in self._values:
                self._memories |= {storage_of(each) for each in _tensors(node.meta.get("val"))}
                self._values[node] = self._run(node)
        if not self._memories.isdisjoint(self._written):
            raise _Unfit

    def _look(self) -> None:
        """Note what the calls since the last read write into."""
        graph = self.tracer.graph
        node = next(iter(graph.nodes)) if self._last is None else self._last.next
        while node.op != "root":
            if node.op == "call_function" and is_mutable(node):
                for each in node.all_input_nodes:
                    self._written |= {storage_of(value) for value in _tensors(each.meta.get("val"))}
            self._last, node = node, node.next

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            value = self.inputs[int(str(node.target).rpartition("_")[2])]
            if value is None:
                raise _Unfit
            return value.to(node.meta["val"].device)
        if node.op == "get_attr":
            value = getattr(self.tracer.root, str(node.target))
            if type(value) is not Tensor or value.device.type == "meta":
                raise _Unfit
            return value
        if is_mutable(node) or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise _Unfit  # it would write into the user's own, or draw
        call = filled(node)
        if call is not None:
            return call[0](*call[1], **{**call[2], "device": node.meta["val"].device})
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]


def is_steady(entry: Input, tensor: Tensor | None) -> bool:
    """True for an input with data that a step leaves as it is: what a value may depend on."""
    return entry.kind in STEADY and tensor is not None and not fake_like(tensor)


def fake_like(value: Any) -> bool:
    """True for a tensor that has no data."""
    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.device.type == "meta")


def _needed(node: fx.Node) -> list[fx.Node]:
    return [] if node.op == "call_function" and filled(node) is not None else node.all_input_nodes


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
