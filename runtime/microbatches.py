"""Collectives over the micro-batch axis `mb`: computed locally, since one rank holds all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.mesh import MICROBATCH, Mesh
from autopar.ir.pipeline import Reduction
from autopar.runtime.collectives import together
from autopar.runtime.executor import Request
from autopar.runtime.mesh_ops import COORD, is_local, join, local_answer

_COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "logsumexp": torch.logaddexp,
}


@dataclass(slots=True)
class Totals:
    """What the micro-batches add up to."""

    reductions: Mapping[str, Reduction]
    parts: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)

    def add(self, name: str, microbatch: int, part: torch.Tensor) -> None:
        kind = self.reductions[name].kind
        if kind == "gather":
            self.parts.setdefault(name, {})[microbatch] = part
        elif name not in self.parts:
            self.parts[name] = part  # may be memory that others look at
        elif kind == "sum" and name in self.owned:
            self.parts[name].add_(part)
        else:
            self.owned.add(name)
            self.parts[name] = _COMBINE[kind](self.parts[name], part)

    def so_far(self, name: str) -> torch.Tensor | None:
        """What a graph adds to itself, and gives back with `put`."""
        return self.parts.pop(name, None)

    def put(self, name: str, total: torch.Tensor) -> None:
        self.parts[name] = total

    def take(self, name: str) -> torch.Tensor:
        """The whole, which is then no longer here."""
        how, found = self.reductions[name], self.parts.pop(name)
        if how.kind != "gather":
            return found
        return join(torch.stack([found[i] for i in sorted(found)]), how.dim, how.outer)


def of_microbatch(steps: Any, microbatch: int, count: int) -> Generator[Any, Any, tuple[Any, ...]]:
    """Run a graph, answering what it asks of its micro-batch; returns its outputs."""
    answer: list[Any] | None = None
    try:
        while True:
            request = steps.send(answer)
            answer = _local(request, microbatch, count) if _is_of_microbatch(request) else (yield request)
            del request  # it holds a tensor that may die in the next step
    except StopIteration as done:
        outputs: tuple[Any, ...] = done.value
        return outputs


def side_by_side(runs: list[Any], count: int) -> Generator[Any, Any, tuple[Any, ...]]:
    """Run a graph for all micro-batches, each until it needs the others; returns the outputs of the first: they are
    the same for all."""
    answers: list[list[Any] | None] = [None] * count
    while True:
        requests: list[Request] = []
        outputs: list[tuple[Any, ...]] = []
        for microbatch, steps in enumerate(runs):
            found = yield from _until_join(steps, answers[microbatch], microbatch, count)
            if isinstance(found, Request):
                requests.append(found)
            else:
                outputs.append(found)
        if outputs:
            return outputs[0]
        answers = [[value] for value in together([(request.op, request.args) for request in requests])]


def _until_join(steps: Any, answer: list[Any] | None, microbatch: int, count: int) -> Generator[Any, Any, Any]:
    """Go on until the other micro-batches are needed (the request) or the graph ends (its outputs)."""
    try:
        while True:
            request = steps.send(answer)
            if not _is_of_microbatch(request):
                answer = yield request
            elif is_local(request.op):
                answer = _local(request, microbatch, count)
            else:
                return request
    except StopIteration as done:
        return done.value


def _is_of_microbatch(request: Any) -> bool:
    """True for what a graph asks of its own micro-batch, or of all."""
    return request.args[0 if request.op == COORD else 1 :][:1] == (MICROBATCH,)


def _local(request: Request, microbatch: int, count: int) -> list[Any]:
    return [local_answer(Mesh(((MICROBATCH, count),)), {MICROBATCH: microbatch}, request.op, request.args)]
