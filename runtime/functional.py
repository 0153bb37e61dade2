"""The mesh ops of one rank as functional collectives: what a compiler sees of them.

`torch.ops._c10d_functional` is the form that Inductor knows: an op that starts and gives its result at once, and
`wait_tensor`, before which nobody reads it. What stands between the two in a graph overlaps, as on our executor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.ir.mesh import Mesh
from autopar.runtime.distributed import Group
from autopar.runtime.mesh_ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    WHOLE_OF,
    is_local,
    join,
    local_answer,
    pieces,
)

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
        x, axis, *rest = args
        group = self._groups[axis]
        if group.size == 1:
            return x.clone()
        if target == ALL_TO_ALL:
            gather, gather_outer, scatter, scatter_outer = rest
            return join(_exchange(pieces(x, group.size, scatter, scatter_outer), group), gather, gather_outer)
        whole = WHOLE_OF.get(target, target)
        if rest[-1] == "logsumexp":
            return _logsumexp(x, group, whole, rest)
        start, finish = _COLLECTIVES[whole]
        started = start(x, group, *rest)
        if whole == target:
            return finish(_c10d.wait_tensor(started), group, *rest)
        self._started[id(started)] = lambda done: finish(done, group, *rest)
        return started

    def _wait(self, x: torch.Tensor) -> torch.Tensor:
        finish = self._started.pop(id(x), None)
        return x if finish is None else finish(_c10d.wait_tensor(x))


# How a collective starts, and what its result is once it is done.
def _reduce(x: torch.Tensor, group: Group, kind: str) -> Any:
    return _c10d.all_reduce(x.contiguous(), kind, _name(group))


def _reduced(done: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    return done


def _gather(x: torch.Tensor, group: Group, dim: int, outer: int) -> Any:
    return _c10d.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size, _name(group))


def _gathered(done: torch.Tensor, group: Group, dim: int, outer: int) -> torch.Tensor:
    return join(_from_stored(done, group), dim, outer)


def _scatter(x: torch.Tensor, group: Group, dim: int, outer: int, kind: str) -> Any:
    parts = _to_stored(pieces(x, group.size, dim, outer), group).contiguous()
    return _c10d.reduce_scatter_tensor(parts, kind, group.size, _name(group))


def _scattered(done: torch.Tensor, group: Group, dim: int, outer: int, kind: str) -> torch.Tensor:
    return done.squeeze(0)


_COLLECTIVES: Mapping[Any, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {
    ALL_REDUCE: (_reduce, _reduced),
    ALL_GATHER: (_gather, _gathered),
    REDUCE_SCATTER: (_scatter, _scattered),
}


def _logsumexp(x: torch.Tensor, group: Group, target: Any, rest: list[Any]) -> torch.Tensor:
    """log(sum over ranks of exp(x)) of all of x or of this rank's piece, shifted by the maximum; -inf where all are."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    top = _c10d.wait_tensor(_reduce(wide, group, "max"))
    top = torch.where(top.abs() == torch.inf, 0, top)
    total = _c10d.wait_tensor(_reduce((wide - top).exp(), group, "sum"))
    whole: torch.Tensor = (total.log() + top).to(x.dtype)
    if target == ALL_REDUCE:
        return whole
    place = group.handle.rank()
    return pieces(whole, group.size, *rest[:2])[place if group.order is None else group.order.index(place)]


def _exchange(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """[size, ...] -> [size, ...]: part i goes to the rank at place i."""
    one_each = [1] * group.size
    started = _c10d.all_to_all_single(_to_stored(parts, group).contiguous(), one_each, one_each, _name(group))
    return _from_stored(_c10d.wait_tensor(started), group)


def _from_stored(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """From the order in which torch keeps the ranks to the order of the axis."""
    return parts if group.order is None else torch.stack([parts[i] for i in group.order])


def _to_stored(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """From the order of the axis to the order in which torch keeps the ranks."""
    if group.order is None:
        return parts
    return torch.stack([parts[group.order.index(i)] for i in range(group.size)])


def _name(group: Group) -> str:
    return str(group.handle.group_name)
