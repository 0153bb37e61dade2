"""Runs a LOCAL graph on this process's rank over torch.distributed (Gloo or NCCL).

What a collective is made of stands in `collectives.py`; here are only the calls that move data. What ranks exchange is
proven to match before a run, from the programs: backends do not check it (Gloo returns wrong numbers for a SUM that
meets a MAX).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from autopar.errors import BatchError, RankError, name_ranks
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.ops import COPIES, op, whole_of
from autopar.runtime.collectives.collectives import Member, Move, Step, begin
from autopar.runtime.collectives.mesh_ops import WAIT, axis_coord, axis_group, is_local, local_answer
from autopar.runtime.executor.executor import CPU, Executable, Observe, Outputs, Request, at_call, describe, run
from autopar.runtime.executor.inputs import StepInputs
from autopar.runtime.kernels import host
from autopar.runtime.pipeline.run_pipeline import Await, Copied, Copy, Finals, RankCode, Receive, Send, Watch, steps_of
from autopar.runtime.ranks.lost import OTHERS, is_loss_of_peer, loss_of_peers
from autopar.runtime.ranks.p2p import Peers
from autopar.runtime.ranks.process_groups import Group, has_queues
from autopar.runtime.ranks.recorder import Recorder
from autopar.runtime.ranks.waits import Waits
from autopar.runtime.ranks.wire import on_wire
from autopar.runtime.tiers.host_tier import Copying, HostTier, host_tier
from autopar.torch_compat import coalesced

# torch 2.13 renamed these two and warns of the old names; 2.11 has only the old ones.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_reduced = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ROUTE = op("route")
_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


Routed = tuple[fx.Node, torch.Tensor]  # a route, and how many rows it told this rank to send and to expect


@dataclass(slots=True)
class _Pending:
    """What stands between a collective's start and its `wait`. It owns the memory until the work is done. A start that
    is not launched yet has neither work nor finish."""

    node: fx.Node
    work: Any = None
    finish: Callable[[], torch.Tensor] | None = None

    def wait(self) -> torch.Tensor:
        assert self.finish is not None
        self.work.wait()
        return self.finish()


class DistributedDriver:
    """Drives one rank's graph. `groups` come from `make_groups`. routed: what the routes of the last run told. waits:
    takes the time that the host spends in exchanges. tier: where values wait that are copied out; the memory of a CPU
    if it is not given."""

    def __init__(
        self, mesh: Mesh, groups: Mapping[str, Group], rank: int | None = None, waits: Waits | None = None,
        tier: HostTier | None = None,
    ) -> None:  # fmt: skip
        self.mesh, self.waits = mesh, waits or Waits()
        self.rank = dist.get_rank() if rank is None else rank
        self.coord = mesh.coord(self.rank)
        self._groups = dict(groups)
        self._peers: Peers | None = None
        self._queued: list[tuple[Move, _Pending]] = []  # gathers that are launched with the next one
        self.recorder: Recorder | None = None
        self.tier = host_tier(CPU) if tier is None else tier
        self.routed: list[Routed] = []

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
            self._peers = self._peers or Peers(self._groups[PIPELINE], device)
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
        self.routed = []
        with torch.no_grad():
            answer: list[Any] | None = None
            try:
                while True:
                    request = steps.send(answer)
                    since = self.waits.clock()
                    answer = [self._answer(request, overlap)]
                    self.waits.seconds += self.waits.clock() - since
                    del request  # it holds a tensor that may die in the next step
            except StopIteration as done:
                self.tier.finish()
                return done.value
            except Exception as error:
                self.tier.queues.end()
                if not isinstance(error, RankError):
                    error.add_note(f"on rank {self.rank} at {self._at()}")
                raise
            finally:
                self._queued.clear()
                steps.close()

    def _answer(self, request: Any, overlap: bool) -> Any:
        if isinstance(request, (Send, Receive, Await)):
            return self._message(request)
        if isinstance(request, Copy):
            return self.tier.copy(request.instruction, request.values)
        if isinstance(request, Copied):
            return tuple(copying.wait() for copying in request.posted)
        target, args = request.op, request.args
        if is_local(target):
            return local_answer(self.mesh, self.coord, target, args)
        if target in COPIES:
            return self.tier.start(target, *args)
        if target == WAIT and not isinstance(args[0], _Pending):
            return args[0].wait() if isinstance(args[0], Copying) else args[0]
        try:
            node, result = (
                (args[0].node, args[0].wait()) if target == WAIT else (request.node, self._collective(request, overlap))
            )
            if whole_of(node.target if target == WAIT else target) is _ROUTE and not isinstance(result, _Pending):
                self.routed.append((node, result))
            return result
        except BatchError as error:
            raise at_call(error, args[0].node if target == WAIT else request.node) from None
        except RuntimeError as error:
            node = args[0].node if target == WAIT else request.node
            raise self._lost(describe(node), error, self._others(node)) from error

    def _message(self, request: Send | Receive | Await) -> Any:
        assert self._peers is not None
        try:
            match request:
                case Send():
                    self._peers.send(request)
                case Receive():
                    return self._peers.receive(request.instruction)
                case Await():
                    return self._peers.wait(request)
        except RuntimeError as error:
            line = request.instruction
            peer = axis_group(self.mesh, self.rank, PIPELINE)[line.peer]
            raise self._lost(f"'{line}'", error, name_ranks([peer])) from error

    def _others(self, node: fx.Node) -> str:
        """The ranks that meet in a collective, but for this one."""
        axes = [arg for arg in node.args if isinstance(arg, str) and arg in self._groups]
        members = {rank for axis in axes[:1] for rank in axis_group(self.mesh, self.rank, axis)} - {self.rank}
        return name_ranks(members) if members else OTHERS

    def _lost(self, where: str, error: RuntimeError, awaited: str = OTHERS) -> RankError:
        """What the backend says of a peer that is gone; raises any other error as what it is. awaited: the ranks."""
        if not is_loss_of_peer(error):
            error.add_note(f"in {where}")
            raise error
        return loss_of_peers(f"rank {self.rank} ({self._at()})", f"at {where}", awaited, error)

    def _collective(self, request: Request, overlap: bool) -> Any:
        axis = request.args[1]
        group = self._group(axis, request.node)
        member = Member(group.size, axis_coord(self.mesh, self.coord, axis))
        step = begin(request.op, request.args, member, request.last_use)
        if overlap and isinstance(step, Move) and whole_of(request.op) != request.op:
            return self._started(step, group, request)
        return _finished(step, group)

    def _started(self, move: Move, group: Group, request: Request) -> _Pending:
        """The first move of a collective, under way, or launched with the next one."""
        pending = _Pending(request.node)
        self._queued.append((move, pending))
        if request.joined and launches_together(move.x):
            return pending
        queued, self._queued = self._queued, []
        if len(queued) == 1:
            _start(move, group, pending)
            return pending
        with coalesced(group.handle) as works:
            for each, waiting in queued:
                _start(each, group, waiting)
        for _, waiting in queued:
            waiting.work = works
        return pending

    def _group(self, axis: str, node: fx.Node) -> Group:
        if axis not in self._groups:
            raise RankError(f"no group was made for axis '{axis}', needed by {describe(node)}")
        return self._groups[axis]

    def _at(self) -> str:
        return ",".join(f"{name}={place}" for name, place in self.coord.items())


# Each starts a move, and gives the work with what is received once that is done. later: somebody waits for the work;
# else there is none, and NCCL moves on the stream that computes, without the events between two.
Started = tuple[Any, Callable[[], torch.Tensor]]


def _flat(x: torch.Tensor) -> torch.Tensor:
    return on_wire(x).view(-1)


def _reduce(move: Move, group: Group, later: bool) -> Started:
    """In place only in memory that is the graph's own and dead afterwards; see `Request`."""
    alone = move.owned and move.x.is_contiguous()
    x = move.x if alone else move.x.clone(memory_format=torch.contiguous_format)
    return dist.all_reduce(on_wire(x), op=_REDUCE[move.kind], group=group.handle, async_op=later), lambda: x


def _gather(move: Move, group: Group, later: bool) -> Started:
    x = move.x.contiguous()
    out = x.new_empty((group.size, *x.shape))
    work = all_gather_flat(_flat(out), _flat(x), group=group.handle, async_op=later)  # Gloo wants them flat
    return work, lambda sent=x: group.from_stored(out)  # type: ignore[misc]  # what is sent lives as long


def _reduce_scatter(move: Move, group: Group, later: bool) -> Started:
    parts = group.to_stored(move.x).contiguous()
    out = parts.new_empty(parts.shape[1:])
    work = _scatter_reduced(_flat(out), _flat(parts), op=_REDUCE[move.kind], group=group.of_sums, async_op=later)
    return work, lambda sent=parts: out  # type: ignore[misc]


def _exchange(move: Move, group: Group, later: bool) -> Started:
    parts = group.to_stored(move.x).contiguous()
    out = torch.empty_like(parts)
    work = dist.all_to_all_single(_flat(out), _flat(parts), group=group.handle, async_op=later)
    return work, lambda sent=parts: group.from_stored(out)  # type: ignore[misc]


def _shift(move: Move, group: Group, later: bool) -> Started:
    """Two messages, posted in the same order on every rank. NCCL launches them at once: a send that stood alone before
    its receive would wait for the next rank's, and so around the axis."""
    x = move.x.contiguous()
    out = torch.empty_like(x)
    to, source = group.rank_at(move.to), group.rank_at(move.source)
    moved = ((dist.isend, on_wire(x), to), (dist.irecv, on_wire(out), source))
    if has_queues(x.device):
        ops = [dist.P2POp(post, tensor, group=group.handle, group_peer=peer) for post, tensor, peer in moved]
        work = _Works(dist.batch_isend_irecv(ops))
    else:
        (send, sent, _), (receive, received, _) = moved
        works = send(sent, group=group.handle, group_dst=to), receive(received, group=group.handle, group_src=source)
        work = _Works(works)
    if not later:
        work.wait()
    return work, lambda sent=x: out  # type: ignore[misc]


def _rows(move: Move, group: Group, later: bool) -> Started:
    x = move.x.contiguous()
    out = x.new_empty((sum(move.received), *x.shape[1:]))
    taken, given = list(move.received), list(move.sent)
    work = dist.all_to_all_single(on_wire(out), on_wire(x), taken, given, group=group.handle, async_op=later)
    return work, lambda sent=x: out  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class _Works:
    """Several, as one."""

    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


_PRIMITIVES: Mapping[str, Callable[[Move, Group, bool], Started]] = {
    "reduce": _reduce,
    "gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
    "shift": _shift,
    "rows": _rows,
}


def run_alone(target: Any, args: Sequence[Any], member: Member, group: Group) -> torch.Tensor:
    """The result of one collective, outside of any graph, which may write over its operand. `args` in the order of its
    schema."""
    return _finished(begin(target, args, member, owned=True), group)


def _finished(step: Step, group: Group) -> torch.Tensor:
    """The result of a collective, move after move."""
    while isinstance(step, Move):
        _, receive = _PRIMITIVES[step.primitive](step, group, False)
        then, received = step.then, receive()
        del receive, step  # what was sent may die now
        step = then(received)
    return step


def _start(move: Move, group: Group, pending: _Pending) -> None:
    """Start the first move of a collective."""
    pending.work, receive = _PRIMITIVES[move.primitive](move, group, True)
    then = move.then
    pending.finish = lambda: _finished(then(receive()), group)


def launches_together(x: torch.Tensor) -> bool:
    """Whether the backend of a tensor's device gains by that: Gloo has neither launches nor streams."""
    return not host.on_host(x)
