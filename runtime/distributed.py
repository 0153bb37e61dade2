"""Runs a LOCAL graph on this process's rank over torch.distributed (Gloo or NCCL).

The tensor maths is `mesh_ops`, shared with the virtual mesh; here are only the calls that move data. What ranks
exchange is proven to match before a run, from the programs: backends do not check it (Gloo returns wrong numbers
for a SUM that meets a MAX).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import RankError
from autopar.ir.mesh import Mesh
from autopar.ir.plan import PIPELINE
from autopar.runtime.executor import Executable, Observe, Outputs, Request, describe, run
from autopar.runtime.lost import is_loss_of_peer
from autopar.runtime.mesh_ops import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    WAIT,
    WHOLE_OF,
    axis_group,
    is_local,
    join,
    local_answer,
    pieces,
)
from autopar.runtime.peers import Peers
from autopar.runtime.pipeline import Await, Finals, Given, RankCode, Receive, Send, Watch, steps_of
from autopar.runtime.recorder import Recorder

# torch 2.13 renamed these two and warns of the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_reduced = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one axis that this rank belongs to. torch sorts a group's ranks: `order[i]` is where it keeps
    the rank at place i of the axis, None if at i."""

    handle: dist.ProcessGroup
    size: int
    order: tuple[int, ...] | None

    def rank_at(self, place: int) -> int:
        """Where torch keeps the rank at a place."""
        return place if self.order is None else self.order[place]


@dataclass(frozen=True, slots=True)
class _Pending:
    """What stands between a collective's start and its `wait`. It owns the memory until the work is done."""

    work: Any
    finish: Callable[[], torch.Tensor]
    node: fx.Node

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.finish()


def make_groups(
    mesh: Mesh, axes: Iterable[str], device_mesh: DeviceMesh | None = None, timeout: timedelta | None = None
) -> dict[str, Group]:
    """This rank's group of every axis. All ranks must call this with the same axes in the same order.

    Groups of single axes are taken from `device_mesh`, if given; the others are made. `timeout` bounds how long a
    rank waits for one that is alive but does not come; one that died is noticed at once (Gloo).
    """
    rank = dist.get_rank()
    if dist.get_world_size() != mesh.size:
        raise RankError(f"mesh '{mesh}' has {mesh.size} ranks, but {dist.get_world_size()} processes are running.")
    found: dict[str, Group] = {}
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
        found[axis] = Group(handle, len(members), None if order == tuple(range(len(members))) else order)
    return found


def _new_group(mesh: Mesh, axis: str, members: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup:
    """Every rank takes part in the making of every group, in the same order."""
    mine: dist.ProcessGroup | None = None
    for ranks in sorted({axis_group(mesh, r, axis) for r in range(mesh.size)}):
        made = dist.new_group(list(ranks), timeout=timeout)
        if ranks == members:
            mine = made
    assert mine is not None
    return mine


class DistributedDriver:
    """Drives one rank's graph. `groups` come from `make_groups`."""

    def __init__(self, mesh: Mesh, groups: Mapping[str, Group], rank: int | None = None) -> None:
        self.mesh = mesh
        self.rank = dist.get_rank() if rank is None else rank
        self.coord = mesh.coord(self.rank)
        self._groups = dict(groups)
        self._peers: Peers | None = None
        self.recorder: Recorder | None = None

    def run(self, executable: Executable, inputs: Iterable[Any], observe: Observe | None = None) -> Outputs:
        """The outputs of this rank. `inputs` are the placeholders' values; an iterator lets them be freed early.

        Raises RankError if the other ranks are lost. Under `observe` nothing overlaps.
        """
        outputs: Outputs = self._drive(run(executable, inputs, observe), overlap=observe is None)
        return outputs

    def run_pipeline(self, code: RankCode, given: Given, device: torch.device, watch: Watch | None = None) -> Finals:
        """What a step gives on this rank of a pipeline; as `run`. `watch` is told of each instruction at its end."""
        if PIPELINE in self._groups:
            group = self._groups[PIPELINE]
            self._peers = Peers(group.handle, group.rank_at, device)
        if self.recorder is not None:
            watch = self.recorder.watch
        finals: Finals = self._drive(steps_of(code, given, watch), overlap=True)
        if self._peers is not None:
            try:
                self._peers.finish()
            except RuntimeError as error:
                raise self._lost("the end of the step", error) from error
        return finals

    def _drive(self, steps: Any, overlap: bool) -> Any:
        steps = steps if self.recorder is None else self.recorder.observe(steps)
        with torch.no_grad():
            answer: list[Any] | None = None
            try:
                while True:
                    request = steps.send(answer)
                    answer = [self._answer(request, overlap)]
                    del request  # it holds a tensor that may die in the next step
            except StopIteration as done:
                return done.value
            except Exception as error:
                if not isinstance(error, RankError):
                    error.add_note(f"on rank {self.rank} at {self._at()}")
                raise
            finally:
                steps.close()

    def _answer(self, request: Any, overlap: bool) -> Any:
        if isinstance(request, (Send, Receive, Await)):
            return self._message(request)
        target, args = request.op, request.args
        if is_local(target):
            return local_answer(self.mesh, self.coord, target, args)
        if target == WAIT and not isinstance(args[0], _Pending):
            return args[0]
        try:
            if target == WAIT:
                return args[0].wait()
            return self._collective(request, overlap)
        except RuntimeError as error:
            raise self._lost(describe(args[0].node if target == WAIT else request.node), error) from error

    def _message(self, request: Send | Receive | Await) -> Any:
        assert self._peers is not None
        try:
            match request:
                case Send():
                    self._peers.send(request)
                case Receive():
                    return self._peers.receive(request.instruction)
                case Await():
                    return request.posted.wait()
        except RuntimeError as error:
            raise self._lost(f"'{request.instruction}'", error) from error

    def _lost(self, where: str, error: RuntimeError) -> RankError:
        """What the backend says of a peer that is gone; raises any other error as what it is."""
        if not is_loss_of_peer(error):
            error.add_note(f"in {where}")
            raise error
        return RankError(
            f"rank {self.rank} ({self._at()}) lost its peers at {where}\n"
            f"  Look for the first error of another rank. The backend says: {str(error).strip()}"
        )

    def _collective(self, request: Request, overlap: bool) -> Any:
        x, axis, *rest = request.args
        group = self._group(axis, request.node)
        if group.size == 1:
            return x if request.last_use else x.clone()
        target = WHOLE_OF.get(request.op, request.op)
        if target == ALL_TO_ALL:
            gather, gather_outer, scatter, scatter_outer = rest
            return join(_exchange(pieces(x, group.size, scatter, scatter_outer), group), gather, gather_outer)
        if rest[-1] == "logsumexp":
            return _logsumexp(x, group, target, rest)
        if target == ALL_REDUCE:
            # In place only in memory that is the graph's own and dead after this op; see `Request`.
            buffer = x if request.last_use and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
            started = _reduce(buffer, group, *rest)
        elif target == ALL_GATHER:
            started = _gather(x, group, *rest)
        else:
            assert target == REDUCE_SCATTER, target
            started = _reduce_scatter(x, group, *rest)
        pending = _Pending(*started, request.node)
        return pending if overlap and target != request.op else pending.wait()

    def _group(self, axis: str, node: fx.Node) -> Group:
        if axis not in self._groups:
            raise RankError(f"no group was made for axis '{axis}', needed by {describe(node)}")
        return self._groups[axis]

    def _at(self) -> str:
        return ",".join(f"{name}={place}" for name, place in self.coord.items())


# Each starts, and gives the work with what its result is once that is done.
Started = tuple[Any, Callable[[], torch.Tensor]]


def _reduce(x: torch.Tensor, group: Group, kind: str) -> Started:
    return dist.all_reduce(x, op=_REDUCE[kind], group=group.handle, async_op=True), lambda: x


def _gather(x: torch.Tensor, group: Group, dim: int, outer: int) -> Started:
    """Makes [size, ...] in the order in which torch keeps the ranks."""
    x = x.contiguous()
    out = x.new_empty((group.size, *x.shape))
    work = _all_gather(out.view(-1), x.view(-1), group=group.handle, async_op=True)  # Gloo wants them flat

    def finish(sent: torch.Tensor = x) -> torch.Tensor:  # what is sent lives as long
        return join(out if group.order is None else out[list(group.order)], dim, outer)

    return work, finish


def _reduce_scatter(x: torch.Tensor, group: Group, dim: int, outer: int, kind: str) -> Started:
    """[size, ...] -> the reduced [...] of this rank."""
    parts = _stored(pieces(x, group.size, dim, outer), group).contiguous()
    out = parts.new_empty(parts.shape[1:])
    work = _scatter_reduced(out.view(-1), parts.view(-1), op=_REDUCE[kind], group=group.handle, async_op=True)

    def finish(sent: torch.Tensor = parts) -> torch.Tensor:
        return out

    return work, finish


def _logsumexp(x: torch.Tensor, group: Group, target: Any, rest: list[Any]) -> torch.Tensor:
    """log(sum over ranks of exp(x)) of all of x or of this rank's piece, shifted by the maximum; -inf where all are."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    top = wide.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group.handle)
    top.masked_fill_(top.abs() == torch.inf, 0)
    total = (wide - top).exp_().contiguous()
    dist.all_reduce(total, group=group.handle)
    whole = total.log_().add_(top).to(x.dtype)
    return whole if target == ALL_REDUCE else pieces(whole, group.size, *rest[:2])[_place(group)]


def _exchange(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """[size, ...] -> [size, ...]: part i goes to the rank at place i."""
    parts = _stored(parts, group).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out.view(-1), parts.view(-1), group=group.handle)
    return out if group.order is None else out[list(group.order)]


def _stored(parts: torch.Tensor, group: Group) -> torch.Tensor:
    """From the order of the axis to the order in which torch keeps the ranks."""
    if group.order is None:
        return parts
    return parts[[group.order.index(i) for i in range(group.size)]]


def _place(group: Group) -> int:
    """This rank's place on the axis."""
    stored = group.handle.rank()
    return stored if group.order is None else group.order.index(stored)
