"""The mesh ops of one rank as functional collectives: what a compiler sees of them.

`torch.ops._c10d_functional` is the form that Inductor knows: an op that starts and gives its result at once, and
`wait_tensor`, before which nobody reads it. What stands between the two in a graph overlaps, as on our executor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.ir.mesh import Mesh
from autopar.runtime.distributed import Group
from autopar.runtime.mesh_ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_START,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
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
        self._started: set[int] = set()  # ids of results before their wait, up to which the trace keeps them alive

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
        if target in (ALL_REDUCE, ALL_REDUCE_START):
            (kind,) = rest
            if kind == "logsumexp":
                return _all_reduce_logsumexp(x, group)
            if target == ALL_REDUCE:
                return _all_reduce(x, group, kind)
            started = _start(x, group, kind)
            self._started.add(id(started))
            return started
        if target == ALL_GATHER:
            return join(_gather(x, group), *rest)
        if target == REDUCE_SCATTER:
            dim, outer, kind = rest
            return _reduce_scatter(pieces(x, group.size, dim, outer), group, kind)
        assert target == ALL_TO_ALL, target
        gather, gather_outer, scatter, scatter_outer = rest
        return join(_exchange(pieces(x, group.size, scatter, scatter_outer), group), gather, gather_outer)

    def _wait(self, x: torch.Tensor) -> torch.Tensor:
        if id(x) not in self._started:
            return x
        self._started.remove(id(x))
        done: torch.Tensor = _c10d.wait_tensor(x)
        return done


def _start(x: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    started: torch.Tensor = _c10d.all_reduce(x.contiguous(), kind, _name(group))
    return started


def _all_reduce(x: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    done: torch.Tensor = _c10d.wait_tensor(_start(x, group, kind))
    return done


def _all_reduce_logsumexp(x: torch.Tensor, group: Group) -> torch.Tensor:
    """log(sum over ranks of exp(x)), shifted by the maximum; -inf where all are."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    top = _all_reduce(wide, group, "max")
    top = torch.where(top.abs() == torch.inf, 0, top)
    return (_all_reduce((wide - top).exp(), group, "sum").log() + top).to(x.dtype)


def _gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[...] -> [size, ...] in the order of the axis."""
    started = _c10d.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size, _name(group))
    return _from_stored(_c10d.wait_tensor(started), group)


def _reduce_scatter(parts: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    """[size, ...] -> the reduced [...] of this rank."""
    if kind == "logsumexp":
        place = group.handle.rank()
        return _all_reduce_logsumexp(parts, group)[place if group.order is None else group.order.index(place)]
    started = _c10d.reduce_scatter_tensor(_to_stored(parts, group).contiguous(), kind, group.size, _name(group))
    done: torch.Tensor = _c10d.wait_tensor(started)
    return done.squeeze(0)


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
