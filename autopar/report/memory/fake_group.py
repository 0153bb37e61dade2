"""A process group that moves nothing: the driver of a rank can then be run alone, on tensors without data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from autopar.ir.mesh import Mesh
from autopar.runtime.collectives.mesh_ops import axis_group
from autopar.runtime.ranks.process_groups import Group


class _Done(dist.Work):
    """scratch: what the backend holds for as long as this lives. is_known: whether it says that it is done before
    somebody waits. Gloo does not, and so what a send reads is kept for longest."""

    def __init__(self, scratch: torch.Tensor | None = None, is_known: bool = False) -> None:
        super().__init__()
        self.scratch, self.is_known = scratch, is_known

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.is_known


class FakeGroup(dist.ProcessGroup):
    """Says yes to everything. Its methods are those that the functions of `torch.distributed` call, in 2.11 to 2.13.

    copies: whether it is as Gloo, which reduces in a copy before it scatters (of its collectives, that one alone).
    """

    def __init__(self, rank: int, size: int, copies: bool) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.copies = copies

    def _scatter(self, _: Any, x: torch.Tensor, *__: Any, **___: Any) -> dist.Work:
        return _Done(x.clone() if self.copies else None, not self.copies)

    def _done(self, *_: Any, **__: Any) -> dist.Work:
        return _Done(is_known=not self.copies)

    allreduce = broadcast = allgather = reduce_scatter = alltoall = send = recv = _done
    _allgather_base = alltoall_base = all_gather_single = all_to_all_single = _done
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _done
    _reduce_scatter_base = reduce_scatter_single = _scatter  # type: ignore[assignment]


def fake_groups(mesh: Mesh, rank: int, axes: Iterable[str], copies: bool) -> dict[str, Group]:
    """The groups of a rank, as `make_groups` makes them where there are processes."""
    found = {}
    for axis in axes:
        members = axis_group(mesh, rank, axis)
        order = tuple(sorted(members).index(member) for member in members)
        handle = FakeGroup(members.index(rank), len(members), copies)
        found[axis] = Group(handle, len(members), None if order == tuple(range(len(members))) else order)
    return found
