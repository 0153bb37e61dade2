"""bucket: sums of gradients move in buckets, each started as soon as it is full, under the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.measure import group_of, local_bytes
from autopar.ir.ops import collective_of, op
from autopar.ir.plan import BUCKET_BYTES, Plan
from autopar.ir.program import CAST, Builder, Program, operand_nodes, record
from autopar.machines import Machine
from autopar.machines.model import Group
from autopar.passes.coalesce import Coalesced

MADE_BY = "bucket"
# A small model too has gradients on their way while it computes others: so many buckets, if that makes none tiny.
FEWEST, LEAST_BYTES = 4, 2**20
SUMS = (op("all_reduce"), op("reduce_scatter"))


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
    their way at once, and more only while all are no larger than two of the largest: the oldest are awaited before one
    starts. PyTorch Distributed, arXiv 2006.15704, section 3.2.
    """
    found = _Bucket(program, plan)
    return found.run() if found.sums else program


def bucket_limit(total: float, machine: Machine, kind: str, group: Group, asked: int | None) -> float:
    """The bytes from which on a bucket is full: the start of its collective, which takes the longer the more nodes it
    goes through, is then at most half of its time. total: of all sums of a graph. kind: "all_reduce" or
    "reduce_scatter". asked: `StepOptions.bucket_bytes`."""
    return asked or min(max(BUCKET_BYTES, machine.half_bytes(kind, group)), max(total // FEWEST, LEAST_BYTES))


@dataclass(slots=True)
class _Open:
    """A bucket that is being filled, with the old nodes."""

    nodes: list[fx.Node] = field(default_factory=list)
    bytes_: int = 0


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
        self.open: dict[tuple[object, str, torch.dtype], _Open] = {}
        self.started: list[tuple[list[fx.Node], fx.Node]] = []
        self.limits: dict[tuple[str, str], float] = {}  # by kind and axis
        self.sums, self.casts = sums_of_gradients(program)
        self.names = _names_of_sums(program)

    def run(self) -> Program:
        self.total = sum(map(self._bytes, self.sums))
        self.most = max(*map(self._limit, self.sums), *map(self._bytes, self.sums))
        return self.build.rewrite(self.program, self._put, later={*self.sums, *self.casts})

    def _put(self, node: fx.Node) -> None:
        if node in self.sums and node.args[0] not in self.sums:  # else it is added when that one has arrived
            self._add(node)
        if node.op == "output":
            self._flush()
            for cast in self.casts:
                self.build.copy(cast)

    def _add(self, node: fx.Node) -> None:
        bytes_ = self._bytes(node)
        limit = self._limit(node)
        if bytes_ >= limit:  # alone it needs no copy
            self._start(_Open([node]))
            return
        key = (node.target, str(node.args[1]), record(node).type.dtype)
        found = self.open.setdefault(key, _Open())
        found.nodes.append(node)
        found.bytes_ += bytes_
        if found.bytes_ >= limit:
            del self.open[key]
            self._start(found)

    def _start(self, found: _Open) -> None:
        first = found.nodes[0]
        names = self._names(found.nodes)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        reason = f"gradients of {', '.join(names[:3])}{more} are partial over '{first.args[1]}'"
        if first.target is op("reduce_scatter"):
            self._make_room(found)
        self.started.append((found.nodes, self.flat.start(found.nodes, reason)))

    def _make_room(self, coming: _Open) -> None:
        """Wait for the oldest sums that are scattered, until those that are left and those that come are few bytes."""
        before = [entry for entry in self.started if entry[0][0].target is op("reduce_scatter")]
        sizes = [sum(map(self._bytes, nodes)) for nodes, _ in (*before, (coming.nodes, None))]
        for i, entry in enumerate(before[:-1]):
            if entry in self.started and sum(sizes[i:]) > 2 * self.most:
                self._finish(entry)

    def _limit(self, node: fx.Node) -> float:
        key = kind, axis = collective_of(node.target).name, str(node.args[1])
        if key not in self.limits:
            machine, asked = self.plan.fixed.machine, self.plan.options.bucket_bytes
            group = group_of(self.plan.mesh, axis, machine.ranks)
            self.limits[key] = bucket_limit(self.total, machine, kind, group, asked)
        return self.limits[key]

    def _bytes(self, node: fx.Node) -> int:
        return local_bytes(operand_nodes(node)[0], self.mesh)

    def _finish(self, entry: tuple[list[fx.Node], fx.Node]) -> None:
        nodes, start = entry
        self.started.remove(entry)
        self.flat.finish(nodes, start)
        for node in nodes:
            for user in node.users:
                if user in self.sums:
                    self._add(user)

    def _flush(self) -> None:
        """Start what is left, and wait for all, until nothing is on its way."""
        while self.open or self.started:
            opened, self.open = list(self.open.values()), {}
            for found in opened:
                self._start(found)
            for entry in list(self.started):
                self._finish(entry)

    def _names(self, nodes: list[fx.Node]) -> list[str]:
        return [f"'{self.names[node]}'" for node in nodes]


def _names_of_sums(program: Program) -> dict[fx.Node, str]:
    """The parameter whose gradient each sum belongs to."""
    found: dict[fx.Node, str] = {}
    for result, out in program.leaving:
        while result is not None and result not in found:
            found[result] = out.name
            result = result.args[0] if result.target in (*SUMS, CAST) else None  # type: ignore[assignment]
    return found


def _is_lone_sum(node: fx.Node) -> bool:
    return node.target in SUMS and node.args[-1] == "sum" and len(node.users) == 1
