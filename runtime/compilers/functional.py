"""The mesh ops of one rank as functional collectives: what a compiler sees of them.

`torch.ops._c10d_functional` is the form that Inductor knows: an op that starts and gives its result at once, and
`wait_tensor`, before which nobody reads it. What stands between the two in a graph overlaps, as on our executor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.mesh import Mesh
from autopar.ir.ops.ops import whole_of
from autopar.runtime.attention.ring_kernels import RINGS
from autopar.runtime.collectives.collectives import Member, Move, Step, begin
from autopar.runtime.collectives.mesh_ops import WAIT, axis_coord, is_local, local_answer
from autopar.runtime.ranks.process_groups import Group

_c10d = torch.ops._c10d_functional


class FunctionalCollectives:
    """Traces the mesh ops of the rank at `coord`. `groups` come from `make_groups`."""

    def __init__(self, mesh: Mesh, coord: Mapping[str, int], groups: Mapping[str, Group]) -> None:
        self.mesh, self.coord, self._groups = mesh, coord, groups
        # by ids of results before their wait, up to which the trace keeps them alive: what they then are
        self._started: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    def trace(self, target: Any, args: tuple[Any, ...]) -> Any:
        """The result of a mesh op. `args` in the order of its schema."""
        if is_local(target):
            return local_answer(self.mesh, self.coord, target, args)
        if target == WAIT:
            return self._wait(args[0])
        axis = args[1]
        group = self._groups[axis]
        step = begin(target, args, Member(group.size, axis_coord(self.mesh, self.coord, axis)))
        if not isinstance(step, Move) or whole_of(target) == target:
            return _finished(step, group)
        start, received = _PRIMITIVES[step.primitive]
        started, then = start(step, group), step.then
        self._started[id(started)] = lambda done: _finished(then(received(done, group)), group)
        return started

    def trace_ring(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The results of a ring, whose steps this rank's place decides: its transfers stand between its products."""
        make, answer = RINGS[target].traced, None
        assert make is not None
        steps = make(lambda op, *given: (op, given), *args, **kwargs)
        try:
            while True:
                answer = [self.trace(*steps.send(answer))]
        except StopIteration as done:
            return done.value

    def _wait(self, x: torch.Tensor) -> torch.Tensor:
        finish = self._started.pop(id(x), None)
        return x if finish is None else finish(_c10d.wait_tensor(x))


def _finished(step: Step, group: Group) -> torch.Tensor:
    """The result of a collective, move after move."""
    while isinstance(step, Move):
        start, received = _PRIMITIVES[step.primitive]
        step = step.then(received(_c10d.wait_tensor(start(step, group)), group))
    return step


def _reduce(move: Move, group: Group) -> Any:
    return _c10d.all_reduce(move.x.contiguous(), move.kind, _name(group.handle))


def _gather(move: Move, group: Group) -> Any:
    return _c10d.all_gather_into_tensor(move.x.contiguous().unsqueeze(0), group.size, _name(group.handle))


def _reduce_scatter(move: Move, group: Group) -> Any:
    parts = group.to_stored(move.x).contiguous()
    return _c10d.reduce_scatter_tensor(parts, move.kind, group.size, _name(group.of_sums))


def _exchange(move: Move, group: Group) -> Any:
    one_each = [1] * group.size
    return _c10d.all_to_all_single(group.to_stored(move.x).contiguous(), one_each, one_each, _name(group.handle))


def _shift(move: Move, group: Group) -> Any:
    """An exchange in which all of x goes to one rank: Inductor knows no messages."""
    peers = group.rank_at(move.to), group.rank_at(move.source)
    sent, received = ([int(rank == peer) for rank in range(group.size)] for peer in peers)
    return _c10d.all_to_all_single(move.x.contiguous().unsqueeze(0), received, sent, _name(group.handle))


# How a move starts, and what is received once it is done.
_PRIMITIVES: Mapping[str, tuple[Callable[[Move, Group], Any], Callable[[torch.Tensor, Group], torch.Tensor]]] = {
    "reduce": (_reduce, lambda done, group: done),
    "gather": (_gather, lambda done, group: group.from_stored(done)),
    "reduce_scatter": (_reduce_scatter, lambda done, group: done.squeeze(0)),
    "exchange": (_exchange, lambda done, group: group.from_stored(done)),
    "shift": (_shift, lambda done, group: done.squeeze(0)),
}


def _name(handle: dist.ProcessGroup) -> str:
    return str(handle.group_name)
