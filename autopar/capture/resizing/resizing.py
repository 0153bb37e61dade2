"""A capture beside those of other sizes: it ends after the forward pass where they tell the rest."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from autopar.capture.ops import functions
from autopar.capture.python.guards import Guards
from autopar.capture.python.ran import Ran
from autopar.capture.resizing.earlier import Earlier, Foreseen, TracedForward, may_hook
from autopar.capture.resizing.skeleton import Unsupported, of_trace
from autopar.capture.trace.normalise import is_range
from autopar.capture.trace.tracer import PLACE, Tracer
from autopar.ir.program import Program
from autopar.torch_compat import FakeTensor, custom_function, no_function_modes, on_data

# Describe the graph that autograd made of a forward pass: what the backward pass will run.

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


class Resizing:
    """Compares one trace with earlier captures, if there are any. Before `begin` nothing is foreseen."""

    def __init__(self, earlier: Earlier | None) -> None:
        self.earlier = earlier
        self._guards: Guards | None = None  # what the earlier runs read, as it is before this one
        self.foreseen: Foreseen | None = None
        self._forward: TracedForward | None = None
        self._ran: Ran | None = None  # what runs, as long as the program may be foreseen
        self._watching = ExitStack()

    def begin(self, model: nn.Module, loss_fn: Any) -> None:
        """Look at what the model reads in Python, if one run may be all that is made of it."""
        if self.earlier is not None and self.earlier.is_enough:
            if self.earlier.guards is None or not self.earlier.guards.holds():
                self.earlier.guards = Guards(model, loss_fn, self.earlier.ran)
            self._guards = self.earlier.guards

    @contextmanager
    def watching(self, ran: Ran) -> Iterator[None]:
        """Note what runs, if no second run may come."""
        self.foreseen, self._forward, self._ran = None, None, None
        with ExitStack() as self._watching:
            if self._guards is not None:
                self._watching.enter_context(ran.watch())
                self._ran = ran
            yield

    def ends(
        self, tracer: Tracer, batch: Sequence[torch.Tensor], results: Sequence[torch.Tensor],
        loss: torch.Tensor | None, names: Mapping[int, str], known: Hashable,
    ) -> bool:  # fmt: skip
        """True if the program is known at the end of the forward pass. names: of the tensors that are trained, by id.
        known: what else decides the program."""
        self._watching.close()
        if self.earlier is None:
            return False
        try:
            with no_function_modes(), on_data():
                self._forward = _forward(tracer, batch, results, loss, names, known)
        except Unsupported:
            self._forward = None
        if self._forward is not None and self._ran is not None and not may_hook(self._ran.names()):
            self.foreseen = self.earlier.find(self._forward)
        return self.foreseen is not None

    def program(self, told: Sequence[str]) -> tuple[Program, dict[str, torch.Tensor], bool] | None:
        """The program that was foreseen, with its constants, and whether one run is enough; None if this run did what
        the captures did not.

        They ran everything twice, to find clocks and what a run leaves for the next one. Here the same functions must
        have run, and have changed nothing that they read; only numbers that follow no size (`Foreseen.is_smooth`) want
        a second run as well. told: the notes of the forward pass.
        """
        if self.earlier is None or self.foreseen is None or self._ran is None or self._guards is None:
            return None
        is_alike = self.foreseen.sample.told == tuple(told) and self.earlier.ran.covers(self._ran)
        if not is_alike or not self._guards.holds():
            return None
        self.earlier.made += 1
        return *self.foreseen.program(), self.foreseen.is_smooth

    def keep(self, program: Program, constants: Mapping[str, torch.Tensor], told: Sequence[str], ran: Ran) -> None:
        """Remember what was captured in full; see `Earlier.add`."""
        if self.earlier is not None and self._forward is not None and not may_hook(ran.names()):
            self.earlier.add(self._forward, program, constants, told)
            self.earlier.include(ran)


def _forward(
    tracer: Tracer, batch: Sequence[torch.Tensor], results: Sequence[torch.Tensor], loss: torch.Tensor | None,
    names: Mapping[int, str], known: Hashable,
) -> TracedForward:  # fmt: skip
    if tracer.is_packed:
        raise Unsupported("what autograd saves")
    leaving = [tracer.node_of(result) for result in results]
    if None in leaving:
        raise Unsupported("a result of no op")
    constants = tuple(getattr(tracer.root, str(n.target)) for n in tracer.graph.nodes if n.op == "get_attr")
    if any(isinstance(constant, FakeTensor) for constant in constants):
        raise Unsupported("a constant without data")
    graph, kept = (None, []) if loss is None else autograd_graph(loss, names)
    rest = known, graph, tuple(map(is_range, constants))
    sizes = tuple(size for tensor in batch for size in tensor.shape)
    return TracedForward(of_trace(tracer.graph, leaving, PLACE, kept, rest), sizes, constants)
