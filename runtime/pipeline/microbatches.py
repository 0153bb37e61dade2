"""Collectives over the axes in time, micro-batches `mb` and slices `sl`: computed locally, since one rank holds all."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from autopar.ir.layout import reduce_two
from autopar.ir.mesh import Mesh, axes_of_group, is_in_time
from autopar.ir.ops.ops import op
from autopar.ir.pipeline import Join, Reduction
from autopar.runtime.collectives.collectives import together
from autopar.runtime.collectives.mesh_ops import COORD, axis_coord, is_local, laid_side_by_side, local_answer
from autopar.runtime.executor.executor import Executable, Request, run
from autopar.runtime.pipeline.slices import Carried

EARLIER, LATER, GATHER = op("earlier"), op("later"), op("all_gather")


@dataclass(slots=True)
class Totals:
    """What the micro-batches add up to. time: the axes by whose coordinates they are numbered.

    parts: by name, what is there so far: a sum of all, or values by the micro-batch that stands for them.
    """

    reductions: Mapping[str, Reduction]
    time: Mesh
    parts: dict[str, Any] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)

    def add(self, name: str, microbatch: int, part: torch.Tensor) -> None:
        how = self.reductions[name]
        if not how.is_sum(self.time):
            self._keep(self.parts.setdefault(name, {}), how, microbatch, part)
        elif name not in self.parts:
            self.parts[name] = part  # may be memory that others look at
        elif name in self.owned:
            self.parts[name].add_(part)
        else:
            self.owned.add(name)
            self.parts[name] = torch.add(self.parts[name], part)

    def _keep(self, parts: dict[int, torch.Tensor], how: Reduction, microbatch: int, part: torch.Tensor) -> None:
        """Join a part along the first axes; along an axis that no join names all parts are the same."""
        named = {axis for one in how.joins for axis in axes_of_group(one.axis)}
        coord = self.time.coord(microbatch)
        if any(place and axis not in named for axis, place in coord.items()):
            return
        first = how.joins[0]
        if first.kind == "gather":
            parts[microbatch] = part
            return
        group = _first_of(self.time, microbatch, first.axis)
        parts[group] = reduce_two(parts[group], part, first.kind) if group in parts else part

    def so_far(self, name: str) -> torch.Tensor | None:
        """What a graph adds to itself, and gives back with `put`."""
        return self.parts.pop(name, None)

    def put(self, name: str, total: torch.Tensor) -> None:
        """Take a total back. Of two graphs side by side that add to the same one, the second had nothing to begin
        with."""
        before = self.parts.get(name)
        self.parts[name] = total if before is None else before + total

    def take(self, name: str) -> torch.Tensor:
        """The whole, which is then no longer here."""
        how, joined = self.reductions[name], self.parts.pop(name)
        if how.is_sum(self.time):
            return joined
        for one in how.joins if how.joins[0].kind == "gather" else how.joins[1:]:
            joined = _joined(joined, one, self.time)
        (whole,) = joined.values()
        return whole


def _first_of(time: Mesh, microbatch: int, axis: str) -> int:
    """The first micro-batch among those that differ from this one on the axis only."""
    return time.rank({**time.coord(microbatch), **dict.fromkeys(axes_of_group(axis), 0)})


def _grouped(time: Mesh, microbatches: Mapping[int, Any], axis: str) -> dict[int, list[Any]]:
    """What micro-batches have, of those that differ on the axis only, in its order."""
    ordered = sorted(microbatches, key=lambda number: axis_coord(time, time.coord(number), axis))
    groups: dict[int, list[Any]] = {}
    for number in ordered:
        groups.setdefault(_first_of(time, number, axis), []).append(microbatches[number])
    return groups


def _joined(parts: Mapping[int, torch.Tensor], how: Join, time: Mesh) -> dict[int, torch.Tensor]:
    groups = _grouped(time, parts, how.axis)
    if how.kind == "gather":
        return {first: laid_side_by_side(joined, how.dim, how.outer) for first, joined in groups.items()}
    joined = {}
    for first, (total, *rest) in groups.items():
        for part in rest:
            total = reduce_two(total, part, how.kind)
        joined[first] = total
    return joined


@dataclass(frozen=True, slots=True)
class GraphTurn:
    """Which micro-batch a graph runs on. time: the axes in time; carried: what slices of its stage keep."""

    microbatch: int
    time: Mesh
    carried: Carried


class StageGraph(Protocol):
    """A graph of a pipeline, ready to run. `source` is the Python that runs. sums: the names of what it adds to by
    itself, given behind its inputs; None where there is nothing yet."""

    @property
    def source(self) -> str: ...

    @property
    def sums(self) -> tuple[str, ...]: ...

    def steps(self, items: list[Any], turn: GraphTurn) -> Generator[Any, Any, tuple[Any, ...]]:
        """Run it on what `items` has, which are dropped after their last use; yields what it needs of other ranks."""
        ...


@dataclass(frozen=True)
class ExecutorGraph:
    """A graph of a pipeline on our executor."""

    executable: Executable
    sums: tuple[str, ...]

    @property
    def source(self) -> str:
        return self.executable.source

    def steps(self, items: list[Any], turn: GraphTurn) -> Generator[Any, Any, tuple[Any, ...]]:
        return of_microbatch(run(self.executable, items), turn.microbatch, turn.time, turn.carried)


def of_microbatch(steps: Any, microbatch: int, time: Mesh, carried: Carried) -> Generator[Any, Any, tuple[Any, ...]]:
    """Run a graph, answering what it asks of its micro-batch; returns its outputs."""
    answer: list[Any] | None = None
    try:
        while True:
            request = steps.send(answer)
            if _is_of_microbatch(request):
                answer = _local(request, microbatch, time, carried)
            else:
                answer = yield request
            del request  # it holds a tensor that may die in the next step
    except StopIteration as done:
        outputs: tuple[Any, ...] = done.value
        return outputs


def side_by_side(runs: list[Any], time: Mesh) -> Generator[Any, Any, tuple[Any, ...]]:
    """Run a graph for all micro-batches, each until it needs the others; returns the outputs of the first: they are
    the same for all."""
    answers: list[list[Any] | None] = [None] * len(runs)
    while True:
        requests: dict[int, Request] = {}
        outputs: list[tuple[Any, ...]] = []
        for microbatch, steps in enumerate(runs):
            found = yield from _until_join(steps, answers[microbatch], microbatch, time)
            if isinstance(found, Request):
                requests[microbatch] = found
            else:
                outputs.append(found)
        if outputs:
            return outputs[0]
        for group in _grouped(time, dict(enumerate(requests)), str(requests[0].args[1])).values():
            results = _met([requests[number] for number in group])
            for number, value in zip(group, results, strict=True):
                answers[number] = [value]


def _met(requests: list[Request]) -> list[torch.Tensor]:
    """What each of some micro-batches gets of a collective among them."""
    parts = [request.args[0] for request in requests]
    if requests[0].op == GATHER and len({part.shape for part in parts}) > 1:  # slices of different length
        _, _, dim, outer = requests[0].args
        return [laid_side_by_side(parts, dim, outer) for _ in parts]
    return together([(request.op, request.args) for request in requests])


def _until_join(steps: Any, answer: list[Any] | None, microbatch: int, time: Mesh) -> Generator[Any, Any, Any]:
    """Go on until the other micro-batches are needed (the request) or the graph ends (its outputs)."""
    try:
        while True:
            request = steps.send(answer)
            if not _is_of_microbatch(request):
                answer = yield request
            elif is_local(request.op):
                answer = _local(request, microbatch, time, None)
            else:
                return request
    except StopIteration as done:
        return done.value


def _is_of_microbatch(request: Any) -> bool:
    """True for what a graph asks of its own micro-batch, or of all."""
    axis = request.args[0 if request.op == COORD else 1 :][:1]
    return bool(axis) and isinstance(axis[0], str) and is_in_time(axis[0])


def _local(request: Request, microbatch: int, time: Mesh, carried: Carried | None) -> list[Any]:
    if carried is not None and request.op == EARLIER:
        x, _, dim, _, key = request.args
        return [carried.earlier(x, dim, key, microbatch)]
    if carried is not None and request.op == LATER:
        x, _, dim, _, key = request.args
        return [carried.later(x, dim, key, microbatch, request.last_use)]
    return [local_answer(time, time.coord(microbatch), request.op, request.args)]
