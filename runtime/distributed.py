"""Runs a LOCAL graph on this process's rank over torch.distributed (Gloo or NCCL).

What a collective is made of stands in `collectives.py`; here are only the calls that move data. What ranks exchange is
proven to match before a run, from the programs: backends do not check it (Gloo returns wrong numbers for a SUM that
meets a MAX).
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
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops import whole_of
from autopar.runtime.collectives import Member, Move, Step, begin
from autopar.runtime.executor import Executable, Observe, Outputs, Request, describe, run
from autopar.runtime.inputs import StepInputs
from autopar.runtime.lost import is_loss_of_peer
from autopar.runtime.mesh_ops import WAIT, axis_coord, axis_group, is_local, local_answer
from autopar.runtime.p2p import Peers
from autopar.runtime.pipeline import Await, Finals, RankCode, Receive, Send, Watch, steps_of
from autopar.runtime.recorder import Recorder
from autopar.runtime.wire import on_wire

# torch 2.13 renamed these two and warns of the old names; 2.11 has only the old ones.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
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

    def to_stored(self, parts: torch.Tensor) -> torch.Tensor:
        """[size, ...] from the order of the axis to the order in which torch keeps the ranks."""
        if self.order is None:
            return parts
        return torch.stack([parts[self.order.index(i)] for i in range(self.size)])

    def from_stored(self, parts: torch.Tensor) -> torch.Tensor:
        """[size, ...] from the order in which torch keeps the ranks to the order of the axis."""
        return parts if self.order is None else torch.stack([parts[i] for i in self.order])


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

    def run_pipeline(
        self, code: RankCode, inputs: StepInputs, device: torch.device, watch: Watch | None = None
    ) -> Finals:
        """What a step gives on this rank of a pipeline; as `run`. `watch` is told of each instruction at its end."""
        if PIPELINE in self._groups:
            group = self._groups[PIPELINE]
            self._peers = Peers(group.handle, group.rank_at, device)
        if self.recorder is not None:
            watch = self.recorder.watch
        finals: Finals = self._drive(steps_of(code, inputs, watch), overlap=True)
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
        axis = request.args[1]
        group = self._group(axis, request.node)
        member = Member(group.size, axis_coord(self.mesh, self.coord, axis))
        step = begin(request.op, request.args, member, request.last_use)
        if overlap and isinstance(step, Move) and whole_of(request.op) != request.op:
            return _pending(step, group, request.node)
        return _finished(step, group)

    def _group(self, axis: str, node: fx.Node) -> Group:
        if axis not in self._groups:
            raise RankError(f"no group was made for axis '{axis}', needed by {describe(node)}")
        return self._groups[axis]

    def _at(self) -> str:
        return ",".join(f"{name}={place}" for name, place in self.coord.items())


# Each starts a move, and gives the work with what is received once that is done.
Started = tuple[Any, Callable[[], torch.Tensor]]


def _flat(x: torch.Tensor) -> torch.Tensor:
    return on_wire(x).view(-1)


def _reduce(move: Move, group: Group) -> Started:
    """In place only in memory that is the graph's own and dead afterwards; see `Request`."""
    alone = move.owned and move.x.is_contiguous()
    x = move.x if alone else move.x.clone(memory_format=torch.contiguous_format)
    return dist.all_reduce(on_wire(x), op=_REDUCE[move.kind], group=group.handle, async_op=True), lambda: x


def _gather(move: Move, group: Group) -> Started:
    x = move.x.contiguous()
    out = x.new_empty((group.size, *x.shape))
    work = all_gather_flat(_flat(out), _flat(x), group=group.handle, async_op=True)  # Gloo wants them flat
    return work, lambda sent=x: group.from_stored(out)  # type: ignore[misc]  # what is sent lives as long


def _reduce_scatter(move: Move, group: Group) -> Started:
    parts = group.to_stored(move.x).contiguous()
    out = parts.new_empty(parts.shape[1:])
    work = _scatter_reduced(_flat(out), _flat(parts), op=_REDUCE[move.kind], group=group.handle, async_op=True)
    return work, lambda sent=parts: out  # type: ignore[misc]


def _exchange(move: Move, group: Group) -> Started:
    parts = group.to_stored(move.x).contiguous()
    out = torch.empty_like(parts)
    work = dist.all_to_all_single(_flat(out), _flat(parts), group=group.handle, async_op=True)
    return work, lambda sent=parts: group.from_stored(out)  # type: ignore[misc]


_PRIMITIVES: Mapping[str, Callable[[Move, Group], Started]] = {
    "reduce": _reduce,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
}


def _finished(step: Step, group: Group) -> torch.Tensor:
    """The result of a collective, move after move."""
    while isinstance(step, Move):
        work, receive = _PRIMITIVES[step.primitive](step, group)
        work.wait()
        then, received = step.then, receive()
        del work, receive, step  # what was sent may die now
        step = then(received)
    return step


def _pending(move: Move, group: Group, node: fx.Node) -> _Pending:
    """The first move of a collective, under way."""
    work, receive = _PRIMITIVES[move.primitive](move, group)
    then = move.then
    return _Pending(work, lambda: _finished(then(receive()), group), node)
