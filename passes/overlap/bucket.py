"""bucket: sums of gradients move in buckets, each started as soon as it is full, under the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import fx

from autopar.ir.ops.measure import group_of, local_bytes
from autopar.ir.ops.ops import collective_of, op
from autopar.ir.plan import BUCKET_BYTES, Plan
from autopar.ir.program import CAST, Builder, Program, operand_nodes, record
from autopar.machines import Machine
from autopar.machines.model import RankGroup
from autopar.passes.overlap.coalesce import Coalesced, MovesNow, Together

T = TypeVar("T")
MADE_BY = "bucket"
# A small model too has gradients on their way while it computes others: so many buckets, if that makes none tiny.
FEWEST, LEAST_BYTES = 4, 2**20
SCATTER = "reduce_scatter"
SUMS = (op("all_reduce"), op(SCATTER))


def bucket(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. Sums of gradients over one axis are merged and overlapped with the backward pass.

        LOCAL program on dp=2
        %w: f32[8,4] [-,-] = parameter "w"
        %b: f32[8] [-] = parameter "b"
        %x: f32[3,4] of [6,4] [dp,-] = batch "0"
        %y: f32[3,8] of [6,8] [dp,-] = batch "1"
        %einsum: f32[8,4] [-,-] partial(dp) = autopar.einsum.default(%y, %x, "cb,ca->ba")   # backward
        %all_reduce: f32[8,4] [-,-] = autopar.all_reduce.default(%einsum, "dp", "sum")   # backward
        %sum_1: f32[8] [-] partial(dp) = aten.sum.dim_IntList(%y, [0])   # backward
        %all_reduce_1: f32[8] [-] = autopar.all_reduce.default(%sum_1, "dp", "sum")   # backward
        return gradient "w" = %all_reduce
        return gradient "b" = %all_reduce_1
    becomes
        LOCAL program on dp=2
        %w: f32[8,4] [-,-] = parameter "w"
        %b: f32[8] [-] = parameter "b"
        %x: f32[3,4] of [6,4] [dp,-] = batch "0"
        %y: f32[3,8] of [6,8] [dp,-] = batch "1"
        %einsum: f32[8,4] [-,-] partial(dp) = autopar.einsum.default(%y, %x, "cb,ca->ba")
        %sum_1: f32[8] [-] partial(dp) = aten.sum.dim_IntList(%y, [0])
        %flat_part: f32[32] [-] partial(dp) = aten.reshape.default(%einsum, [-1])
        %flat_part_1: f32[8] [-] partial(dp) = aten.reshape.default(%sum_1, [-1])
        %flat: f32[40] [-] partial(dp) = aten.cat.default([%flat_part, %flat_part_1])
        %all_reduce_start: f32[40] [-] = autopar.all_reduce_start.default(%flat, "dp", "sum")
        %wait: f32[40] [-] = autopar.wait.default(%all_reduce_start)
        %pieces: (f32[32] [-], f32[8] [-]) = aten.split_with_sizes.default(%wait, [32, 8])
        %getitem: f32[32] [-] = operator.getitem(%pieces, 0)
        %gradient: f32[8,4] [-,-] = aten.reshape.default(%getitem, [8, 4])
        %getitem_1: f32[8] [-] = operator.getitem(%pieces, 1)
        %gradient_1: f32[8] [-] = aten.reshape.default(%getitem_1, [8])
        return gradient "w" = %gradient
        return gradient "b" = %gradient_1

    A bucket is started as soon as it is full, so that the rest of the backward pass is computed before the wait.
    Sums that are scattered (ZeRO) likewise; each holds whole gradients until it has moved, so that of those two are on
    their way at once, and more only while all are no larger than two of the largest and stay on the device: the oldest
    are awaited before one starts. PyTorch Distributed, arXiv 2006.15704, section 3.2.
    """
    made = _Bucket(program, plan)
    return made.run() if made.sums else program


def bucket_limit(total: float, machine: Machine, kind: str, group: RankGroup, asked: int | None) -> float:
    """The bytes from which on a bucket is full: the start of its collective, which takes the longer the more nodes it
    goes through, is then at most half of its time. total: of all sums of a graph. kind: "all_reduce" or
    "reduce_scatter". asked: `StepOptions.bucket_bytes`."""
    return asked or min(max(BUCKET_BYTES, machine.half_bytes(kind, group)), max(total // FEWEST, LEAST_BYTES))


@dataclass(slots=True, eq=False)  # as of `Gather`
class Sum(Generic[T]):
    """A sum of gradients as a bucket takes it. of: whose. over: of which ranks. alike: what those that move together
    have in common beside kind and ranks. bytes_: of its operand. then: sums of its result over other ranks."""

    of: T
    kind: str
    over: Hashable
    alike: Hashable
    bytes_: float
    then: tuple[Sum[T], ...] = ()

    def chain(self) -> Iterator[Sum[T]]:
        """It, and those that follow."""
        yield self
        for each in self.then:
            yield from each.chain()


class Buckets(Generic[T]):
    """Decide when sums of gradients start and end, and which of them move as one. The pass writes nodes by these
    decisions, the planner counts their time and bytes."""

    def __init__(
        self, sums: Iterable[Sum[T]], limit: Callable[[float, str, Any], float], leaves: bool = False
    ) -> None:  # fmt: skip
        """sums: all that will be added. limit: bytes from which on a bucket is full, of (the bytes of all sums, kind,
        ranks). leaves: True if their results go to the host's memory: then no more than two are on their way."""
        all_ = [each for first in sums for each in first.chain()]
        total = sum(each.bytes_ for each in all_)
        self.limits = {key: limit(total, *key) for key in {(each.kind, each.over): None for each in all_}}
        self.most = max((*self.limits.values(), *(each.bytes_ for each in all_)), default=0.0)
        self.room = 0.0 if leaves else 2 * self.most
        self.open: dict[Hashable, Together[Sum[T]]] = {}
        self.started: list[Together[Sum[T]]] = []
        self.scattered: list[Together[Sum[T]]] = []  # of these, few of many

    def add(self, coming: Sum[T]) -> Iterable[MovesNow[Sum[T]]]:
        """What to do when the operand of a sum is there."""
        limit = self.limits[coming.kind, coming.over]
        if coming.bytes_ >= limit:  # alone it needs no copy
            return self._start(Together([coming], coming.bytes_))
        key = coming.kind, coming.over, coming.alike
        bucket = self.open.get(key)
        if bucket is None:
            bucket = self.open[key] = Together()
        bucket.add(coming, coming.bytes_)
        if bucket.bytes_ < limit:
            return ()
        del self.open[key]
        return self._start(bucket)

    def flush(self) -> Iterator[MovesNow[Sum[T]]]:
        """Start what is left, and wait for all, until nothing is on its way."""
        while self.open or self.started:
            opened, self.open = list(self.open.values()), {}
            for bucket in opened:
                yield from self._start(bucket)
            for bucket in list(self.started):
                yield from self._finish(bucket)

    def _start(self, bucket: Together[Sum[T]]) -> Iterator[MovesNow[Sum[T]]]:
        if bucket.members[0].kind == SCATTER:
            if len(self.scattered) > 1:
                yield from self._make_room(bucket)
            self.scattered.append(bucket)
        self.started.append(bucket)
        yield MovesNow(True, bucket)

    def _make_room(self, coming: Together[Sum[T]]) -> Iterator[MovesNow[Sum[T]]]:
        """Wait for the oldest sums that are scattered, until those that are left and those that come are few bytes."""
        before = list(self.scattered)
        left = coming.bytes_ + sum(bucket.bytes_ for bucket in before)
        for bucket in before[:-1]:
            if bucket in self.scattered and left > self.room:
                yield from self._finish(bucket)
            left -= bucket.bytes_

    def _finish(self, bucket: Together[Sum[T]]) -> Iterator[MovesNow[Sum[T]]]:
        self.started.remove(bucket)
        if bucket.members[0].kind == SCATTER:
            self.scattered.remove(bucket)
        yield MovesNow(False, bucket)
        for member in bucket.members:
            for follower in member.then:
                yield from self.add(follower)


def sums_of_gradients(program: Program) -> tuple[dict[fx.Node, None], list[fx.Node]]:
    """(The sums by which gradients leave, read by nothing else, with two data axes one after the other; the casts by
    which what was summed in a short float leaves)."""
    output = program.graph.output_node()
    leaving = {node for node, out in program.leaving if node is not None and out.kind in ("gradient", "part")}
    sums: dict[fx.Node, None] = {}
    casts: list[fx.Node] = []
    for node in reversed(program.nodes):
        users = list(node.users)
        leaves = node in leaving and users == [output]
        follows = len(users) == 1 and (users[0] in sums or users[0] in casts)
        if node.target in SUMS and node.args[-1] == "sum" and (leaves or follows):
            sums[node] = None
        elif node.target is CAST and leaves and _is_lone_sum(node.all_input_nodes[0]):
            casts.append(node)
    return sums, casts


class _Bucket:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan, self.mesh = program, plan, program.mesh
        self.build = Builder(MADE_BY)
        self.flat = Coalesced(self.build, self.mesh)
        self.starts: dict[Together[Sum[fx.Node]], fx.Node] = {}
        self.sums, self.casts = sums_of_gradients(program)
        self.first = {node: self._sum(node) for node in self.sums if node.args[0] not in self.sums}
        self.buckets = Buckets(self.first.values(), self._limit, leaves=plan.offloads("parameters"))
        self.names = _names_of_sums(program)

    def run(self) -> Program:
        return self.build.rewrite(self.program, self._put, later={*self.sums, *self.casts})

    def _put(self, node: fx.Node) -> None:
        if node in self.first:  # the others are added when what they sum has arrived
            self._do(self.buckets.add(self.first[node]))
        if node.op == "output":
            self._do(self.buckets.flush())
            for cast in self.casts:
                self.build.copy(cast)

    def _do(self, moves: Iterable[MovesNow[Sum[fx.Node]]]) -> None:
        for starts, bucket in moves:
            nodes = [each.of for each in bucket.members]
            if starts:
                self.starts[bucket] = self.flat.start(nodes, self._reason(nodes))
            else:
                self.flat.finish(nodes, self.starts.pop(bucket))

    def _reason(self, nodes: list[fx.Node]) -> str:
        names = [f"'{self.names[node]}'" for node in nodes]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"gradients of {', '.join(names[:3])}{more} are partial over '{nodes[0].args[1]}'"

    def _sum(self, node: fx.Node) -> Sum[fx.Node]:
        """A sum, with those that follow it."""
        then = tuple(self._sum(user) for user in node.users if user in self.sums)
        kind, axis, bytes_ = collective_of(node.target).name, str(node.args[1]), local_bytes(_operand(node), self.mesh)
        return Sum(node, kind, axis, record(node).type.dtype, bytes_, then)

    def _limit(self, total: float, kind: str, axis: str) -> float:
        machine = self.plan.fixed.machine
        group = group_of(self.plan.mesh, axis, machine.ranks)
        return bucket_limit(total, machine, kind, group, self.plan.options.bucket_bytes)


def _operand(node: fx.Node) -> fx.Node:
    return operand_nodes(node)[0]


def _names_of_sums(program: Program) -> dict[fx.Node, str]:
    """The parameter whose gradient each sum belongs to."""
    names: dict[fx.Node, str] = {}
    for result, out in program.leaving:
        while result is not None and result not in names:
            names[result] = out.name
            result = result.args[0] if result.target in (*SUMS, CAST) else None  # type: ignore[assignment]
    return names


def _is_lone_sum(node: fx.Node) -> bool:
    return node.target in SUMS and node.args[-1] == "sum" and len(node.users) == 1
