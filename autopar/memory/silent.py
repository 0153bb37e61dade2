"""A process group that moves nothing: the driver of a rank can then be run alone, on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from autopar.ir.mesh import Mesh
from autopar.runtime.distributed import Group
from autopar.runtime.mesh_ops import axis_group


class _Done(dist.Work):
    """What is never known to be done before somebody waits, as with Gloo: what a send reads is kept for longest."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return False


class Silence(dist.ProcessGroup):
    """Says yes to everything. Its methods are those that the functions of `torch.distributed` call, in 2.11 to 2.13."""

    def _done(self, *_: Any, **__: Any) -> dist.Work:
        return _Done()

    allreduce = broadcast = allgather = reduce_scatter = alltoall = send = recv = _done
    _allgather_base = _reduce_scatter_base = alltoall_base = _done
    all_gather_single = reduce_scatter_single = all_to_all_single = _done


def silent_groups(mesh: Mesh, rank: int, axes: Iterable[str]) -> dict[str, Group]:
    """The groups of a rank, as `make_groups` makes them where there are processes."""
    found = {}
    for axis in axes:
        members = axis_group(mesh, rank, axis)
        order = tuple(sorted(members).index(member) for member in members)
        handle = Silence(members.index(rank), len(members))
        found[axis] = Group(handle, len(members), None if order == tuple(range(len(members))) else order)
    return found
