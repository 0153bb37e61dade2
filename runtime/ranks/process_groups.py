"""The process groups of a rank: one for each axis, a second one where two kinds of traffic must not queue behind each
other, and their connections, made before the first step.

A communicator of NCCL does what it is given in order. So the sums of ZeRO's gradients have one of their own beside that
of the gathers, with a stream of high priority (FSDP2 has two as well), and messages of the backward pass one beside
that of the forward pass: a receive that is posted early would hold back every send to the same rank.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import RankError
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.ring_ops import axes_of
from autopar.ir.pipeline import Pipeline
from autopar.ir.schedule import Action
from autopar.runtime.collectives.mesh_ops import axis_group, axis_groups
from autopar.runtime.kernels import host
from autopar.runtime.ranks.last_words import words_to_leave
from autopar.torch_compat import forget_groups

_LEAVING_S = 1.0  # that a process waits at its exit for a collective which is still under way


Known = Callable[[], dist.ProcessGroup]


def known(handle: dist.ProcessGroup) -> Known:
    """Give a group of torch's without keeping it: what gives it raises RankError after it was destroyed."""
    return partial(_there, weakref.ref(handle))


def _there(group: weakref.ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    handle = group()
    if handle is None:
        raise _gone()
    return handle


def default_group() -> dist.ProcessGroup:
    """torch's default group. Raises RankError where there is none any more."""
    handle = dist.group.WORLD
    if handle is None:
        raise _gone()
    return handle


def _gone() -> RankError:
    return RankError(
        "the process groups of this model are gone: dist.destroy_process_group() ended them. Call it after the last "
        "use of the model."
    )


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one axis that this rank belongs to. torch sorts a group's ranks: `order[i]` is where it keeps
    the rank at place i of the axis, None if at i. first: torch's group, which its registry owns and we do not, or
    `dist.destroy_process_group()` would end no group of a model that is still there; second: of the same ranks; see
    above."""

    first: Known
    size: int
    order: tuple[int, ...] | None
    second: Known | None = None

    @classmethod
    def of(
        cls, handle: dist.ProcessGroup, size: int, order: tuple[int, ...] | None,
        second: dist.ProcessGroup | None = None,
    ) -> Self:  # fmt: skip
        """Know torch's groups without keeping them."""
        return cls(known(handle), size, order, None if second is None else known(second))

    @property
    def handle(self) -> dist.ProcessGroup:
        """torch's group. Raises RankError after it was destroyed."""
        return self.first()

    @property
    def handles(self) -> tuple[dist.ProcessGroup, ...]:
        """torch's group, and the second one where there is one."""
        return (self.handle,) if self.second is None else (self.handle, self.second())

    @property
    def known(self) -> tuple[Known, ...]:
        """What gives these groups."""
        return (self.first,) if self.second is None else (self.first, self.second)

    @property
    def of_sums(self) -> dist.ProcessGroup:
        """What scatters sums."""
        return self.handles[-1]

    def of_messages(self, action: Action) -> dist.ProcessGroup:
        """What carries what an action made to another stage."""
        return self.handles[-1] if action.kind in "BIW" else self.handle

    def rank_at(self, place: int) -> int:
        """Where torch keeps the rank at a place."""
        return place if self.order is None else self.order[place]

    def to_stored(self, parts: torch.Tensor) -> torch.Tensor:
        """[size, ...] from the order of the axis to the order in which torch keeps the ranks."""
        if self.order is None:
            return parts
        return torch.stack([parts[self.order.index(i)] for i in range(self.size)])

    def from_stored(self, parts: torch.Tensor) -> torch.Tensor:
        """[size, ...] from the order in which torch keeps the ranks to the order of the axis."""
        return parts if self.order is None else torch.stack([parts[i] for i in self.order])


def has_queues(device: torch.device) -> bool:
    """True where each group is a queue of its own on the device: NCCL's, which Gloo and the meta device have not."""
    return device.type != "meta" and not host.on_host(device)


def mesh_over(mesh: Mesh, device_type: str, timeout: timedelta | None) -> DeviceMesh:
    """A DeviceMesh with a group for each axis, in which no rank waits longer than that for another one; None for as
    long as the backend does. All ranks must call this."""
    if timeout is None or mesh.size == 1:
        return init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names)
    rank = dist.get_rank()  # init_device_mesh takes no timeout
    groups = [_new_group(mesh, axis, axis_group(mesh, rank, axis), timeout) for axis in mesh.names]
    ranks = torch.arange(mesh.size, device="cpu").view(mesh.shape)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=mesh.names)


def leave_at_exit(host: Callable[[], Iterable[Known]], done: Callable[[], str]) -> None:
    """End Gloo's threads before Python ends. One of them may still hold the tensor of the last collective, and needs
    Python to free it: once Python is being taken apart, that aborts the process ("terminate called without an active
    exception"). A group's threads end once nobody holds it; see `forget_at_exit`.

    Groups that nobody destroyed are destroyed; of NCCL's none that has peers, for which it would wait and which may
    hang. The ranks that go on can read that this one has left. host: gives the groups of Gloo's beside those of NCCL.
    done: how far this rank came, as of `words_to_leave`.
    """
    atexit.register(_leave, host, words_to_leave(default_group(), done))


def forget_at_exit(device_mesh: DeviceMesh) -> None:
    """Let a mesh go of its groups before Python ends. What is asked for last is done first: behind `leave_at_exit`."""
    atexit.register(_forget, weakref.ref(device_mesh))


def _forget(device_mesh: weakref.ref[DeviceMesh]) -> None:
    forget_groups(device_mesh())


def _leave(host: Callable[[], Iterable[Known]], say: Callable[[], object]) -> None:
    if dist.is_initialized():
        has_peers = "nccl" in dist.get_backend_config() and dist.get_world_size() > 1
        ended = tuple(host()) if has_peers else (default_group,)
        leaving = threading.Thread(target=_end, args=(ended, say), name="autopar-leave", daemon=True)
        leaving.start()
        leaving.join(_LEAVING_S)


def _end(groups: Iterable[Known], say: Callable[[], object]) -> None:
    say()  # first: a peer asks as soon as its connection is closed
    for group in groups:
        with suppress(RankError):  # that it is gone already
            dist.destroy_process_group(group())


def make_groups(
    mesh: Mesh, axes: Iterable[str], device_mesh: DeviceMesh | None = None, timeout: timedelta | None = None,
    twice: Collection[str] = (),
) -> dict[str, Group]:  # fmt: skip
    """This rank's group of every axis, or of several joined ones ("dp:cp"). All ranks must call this with the same axes
    in the same order.

    Groups of single axes are taken from `device_mesh`, if given; the others are made. `timeout` bounds how long a
    rank waits for one that is alive but does not come; one that died is noticed at once (Gloo). twice: the axes that
    get a second group.
    """
    rank = dist.get_rank()
    if dist.get_world_size() != mesh.size:
        raise RankError(f"mesh '{mesh}' has {mesh.size} ranks, but {dist.get_world_size()} processes are running.")
    groups: dict[str, Group] = {}
    for axis in axes:
        members = axis_group(mesh, rank, axis)
        if device_mesh is not None and axis in (device_mesh.mesh_dim_names or ()):
            handle = device_mesh.get_group(axis)
        else:
            handle = _new_group(mesh, axis, members, timeout)
        stored = dist.get_process_group_ranks(handle)
        if sorted(stored) != sorted(members):
            raise RankError(f"axis '{axis}': the group of rank {rank} is {stored}, but mesh '{mesh}' says {members}.")
        order = tuple(stored.index(member) for member in members)
        second = _new_group(mesh, axis, members, timeout, is_urgent=True) if axis in twice else None
        assert second is None or dist.get_process_group_ranks(second) == stored
        groups[axis] = Group.of(handle, len(members), None if order == tuple(range(len(members))) else order, second)
    return groups


def _new_group(
    mesh: Mesh, axis: str, members: tuple[int, ...], timeout: timedelta | None, is_urgent: bool = False
) -> dist.ProcessGroup:
    """Every rank takes part in the making of every group, in the same order."""
    mine: dist.ProcessGroup | None = None
    for ranks in axis_groups(mesh, axis):
        made = dist.new_group(list(ranks), timeout=timeout, pg_options=_urgent() if is_urgent else None)
        if ranks == members:
            mine = made
    assert mine is not None
    return mine


def _urgent() -> object | None:
    """Options of NCCL for a stream that goes before what computes; no other backend has streams."""
    if "nccl" not in dist.get_backend_config():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def connect(groups: Mapping[str, Group], pipeline: Pipeline | None, place: int, device: torch.device) -> None:
    """Let every group connect its ranks, which NCCL does at the first use: in the middle of the first step otherwise,
    with memory that no estimate has. place: on the axis of the pipeline. All ranks must call this with the same axes in
    the same order.
    """
    moving = () if pipeline is None else {axis for graph in pipeline.graphs.values() for axis in axes_of(graph.graph)}
    for axis, group in groups.items():
        if axis != PIPELINE or axis in moving:
            for handle in group.handles if axis != PIPELINE else (group.handle,):
                dist.all_reduce(torch.zeros(1, device=device), group=handle)
    if pipeline is not None and PIPELINE in groups:
        _connect_stages(groups[PIPELINE], pipeline, place, device)


def _connect_stages(group: Group, pipeline: Pipeline, place: int, device: torch.device) -> None:
    """One element between each two stages that send each other something, pair after pair in the same order on all."""
    messages = [(rank, line) for rank, lines in enumerate(pipeline.lists) for line in lines if line.op == "SEND"]
    kinds = {(min(rank, line.peer), max(rank, line.peer), line.action.kind in "BIW") for rank, line in messages}
    element = torch.zeros(1, device=device)
    for first, last, backward in sorted(kinds):
        handle = group.of_messages(Action(0, "B" if backward else "F"))
        if place == first:
            dist.send(element, group=handle, group_dst=group.rank_at(last))
        elif place == last:
            dist.recv(element, group=handle, group_src=group.rank_at(first))
