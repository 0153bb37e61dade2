"""decompose: a product and the collective beside it in chunks, of which one moves while another is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.mesh import is_in_time
from autopar.ir.ops.measure import local_bytes, local_type
from autopar.ir.ops.ops import mesh_op_name, op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, TensorType, is_gathered_input, operand_nodes, record
from autopar.passes.costs.node_costs import LazyTimes
from autopar.passes.overlap.bucket import sums_of_gradients
from autopar.passes.rules import TABLE, call_of
from autopar.passes.rules.through import through

MADE_BY = "decompose"
CHUNKS = (2, 4, 8)
LEAST = 0.05  # of the time of both: what chunks must save, beside a collective's latency
aten = torch.ops.aten
_EINSUM = op("einsum")
_SUMS = frozenset({op("all_reduce"), op("reduce_scatter")})
_GATHERS = frozenset({op("all_gather")})


def decompose(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. Where nothing else can hide a collective, the product beside it does, chunk by chunk of its rows.

        machine: 1 10 0.5 0.5 0.1
        LOCAL program on tp=2
        %w: f32[2,32] of [2,64] [-,tp] = parameter "w"
        %x: f32[12,32] of [12,64] [-,tp] = batch "0"
        %einsum: f32[12,2] [-,-] partial(tp) = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %all_reduce: f32[12,2] [-,-] = autopar.all_reduce.default(%einsum, "tp", "sum")
        return value "y" = %all_reduce
    becomes
        LOCAL program on tp=2
        %w: f32[2,32] of [2,64] [-,tp] = parameter "w"
        %x: f32[12,32] of [12,64] [-,tp] = batch "0"
        %rows: f32[6,32] of [6,64] [-,tp] = aten.slice.Tensor(%x, 0, 0, 6)
        %einsum: f32[6,2] [-,-] partial(tp) = autopar.einsum.default(%rows, %w, "ca,ba->cb")
        %all_reduce_start: f32[6,2] [-,-] = autopar.all_reduce_start.default(%einsum, "tp", "sum")
        %rows_1: f32[6,32] of [6,64] [-,tp] = aten.slice.Tensor(%x, 0, 6, 12)
        %einsum_chunk: f32[6,2] [-,-] partial(tp) = autopar.einsum.default(%rows_1, %w, "ca,ba->cb")
        %all_reduce_start_1: f32[6,2] [-,-] = autopar.all_reduce_start.default(%einsum_chunk, "tp", "sum")
        %wait: f32[6,2] [-,-] = autopar.wait.default(%all_reduce_start)
        %wait_1: f32[6,2] [-,-] = autopar.wait.default(%all_reduce_start_1)
        %chunks: f32[12,2] [-,-] = aten.cat.default([%wait, %wait_1], 0)
        return value "y" = %chunks

    A product whose sum `overlap` left whole is computed in 2, 4 or 8 chunks of rows, and each sum is started while the
    next chunk is computed; a value that is gathered for products alone comes in chunks, and each is multiplied while
    the next ones move (Wang et al., ASPLOS 2023; "async TP" in torchtitan). Rows are those of a dim that the collective
    does not split and the product does not sum over. It is done where the times of a machine promise a gain: chunks
    read a weight again, each has a collective's latency, and the results are copied into one value. Never on a CPU,
    where Gloo moves data by the cores that compute.
    """
    if plan.fixed.machine.is_host or not any(_moves(node, _SUMS | _GATHERS) for node in program.nodes):
        return program
    return _Decompose(program, plan).run()


def _moves(node: fx.Node, kinds: Collection[object]) -> bool:
    """True for a collective of some kinds that other ranks take part in."""
    return node.target in kinds and not is_in_time(str(node.args[1]))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Into how many chunks, along which dim of a product's result or of a gathered value."""

    dim: int
    count: int


class _Decompose:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.mesh, self.machine = program, program.mesh, plan.fixed.machine
        self.build = Builder(MADE_BY)
        self.position = {node: i for i, node in enumerate(program.nodes)}
        self.times = LazyTimes(program, self.machine)
        sums, casts = sums_of_gradients(program)  # they move in buckets
        self.of_gradients = {*sums, *(cast.all_input_nodes[0] for cast in casts)}
        self.products: dict[fx.Node, _Cut] = {}  # that are summed
        self.gathers: dict[fx.Node, _Cut] = {}
        self.chunked: dict[fx.Node, list[fx.Node]] = {}  # by gather: the products that take its chunks
        self.under_way: dict[fx.Node, list[fx.Node]] = {}  # by collective: the starts of its chunks

    def run(self) -> Program:
        for plan, kinds in ((self._plan_sum, _SUMS), (self._plan_gather, _GATHERS)):
            for node in self.program.calls():
                if _moves(node, kinds) and node not in self.of_gradients:
                    plan(node)
        later = {*self.products, *self.gathers}
        return self.build.rewrite(self.program, self._put, later) if later else self.program

    # -- which ------------------------------------------------------------------------------------------------------

    def _plan_sum(self, node: fx.Node) -> None:
        product: Any = node.args[0]
        if node.args[-1] != "sum" or product.target is not _EINSUM or len(product.users) > 1:
            return
        moved = node.args[2] if node.target is op("reduce_scatter") else None
        cut = self._best(product, moved, lambda cut: self._gain_of_sum(node, product, cut))
        if cut is not None:
            self.products[product] = cut

    def _gain_of_sum(self, node: fx.Node, product: fx.Node, cut: _Cut) -> float:
        """What chunks save, in us: products one behind the other, each but the last under a collective."""
        compute, move = self._chunk_of_product(product, cut.dim, cut), self._chunk_of_move(node, cut)
        chunks = compute + (cut.count - 1) * max(compute, move) + move + self._copy_time(node)
        if self._is_in_pieces(product, cut):
            chunks += sum(map(self._copy_time, operand_nodes(product)))
        return self._gain(self.times[product] + self.times[node], chunks)

    def _plan_gather(self, node: fx.Node) -> None:
        if is_gathered_input(node) or any(user.target is not _EINSUM for user in node.users):
            return
        cut = self._best(node, node.args[2], lambda cut: self._gain_of_gather(node, cut))
        if cut is not None:
            self.gathers[node], self.chunked[node] = cut, self._takers(node, cut.dim)

    def _gain_of_gather(self, node: fx.Node, cut: _Cut) -> float:
        """The gain as of a sum; the first chunk moves under nothing, the last product hides nothing."""
        users = self._takers(node, cut.dim)
        if not users:
            return -math.inf
        compute = sum(self._chunk_of_product(user, _row(user, node, cut.dim) or 0, cut) for user in users)
        chunks = self._chunk_of_move(node, cut)
        chunks += (cut.count - 1) * max(compute, chunks) + compute + sum(map(self._copy_time, users))
        chunks += self._copy_time(node) if len(users) < len(node.users) else 0.0
        if self._is_in_pieces(node, cut):
            chunks += self._copy_time(operand_nodes(node)[0])
        return self._gain(self.times[node] + sum(self.times[user] for user in users), chunks)

    def _takers(self, node: fx.Node, dim: int) -> list[fx.Node]:
        """The users of a gathered value that compute each row of `dim` by itself, and can where the first stands."""
        first = min(self.position[user] for user in node.users)
        waiting = {*self.products, *self.gathers}
        takers = []
        for user in sorted(node.users, key=self.position.__getitem__):
            others = [operand for operand in user.all_input_nodes if operand is not node]
            is_ready = all(self.position[other] < first and other not in waiting for other in others)
            if others and is_ready and user not in waiting and _row(user, node, dim) is not None:
                takers.append(user)
        return takers

    def _best(self, node: fx.Node, moved: Any, gain: Callable[[_Cut], float]) -> _Cut | None:
        """The cut that saves most, along the first dim that has one: not the collective's own."""
        sizes = local_type(node, self.mesh).shape
        for dim, factors in enumerate(record(node).layout.dims):
            if dim == moved or any(isinstance(factor, int) for factor in factors):
                continue
            gains = {cut: gain(cut) for cut in (_Cut(dim, count) for count in CHUNKS if sizes[dim] % count == 0)}
            best = max(gains, key=gains.__getitem__, default=None)
            if best is not None and gains[best] > 0:
                return best
        return None

    # -- what it costs ----------------------------------------------------------------------------------------------

    def _gain(self, before: float, after: float) -> float:
        return before - after - self.machine.latency_us - LEAST * before

    def _chunk_of_product(self, node: fx.Node, row: int, cut: _Cut) -> float:
        """Each chunk reads all of an operand that has no such rows (a weight), and its part of the rest."""
        *letters, result = _letters(node)
        sizes = [local_bytes(value, self.mesh) for value in (*operand_nodes(node), node)]
        again = [size for size, dims in zip(sizes, letters, strict=False) if result[row] not in dims]
        moved = (sum(sizes) - sum(again)) / cut.count + sum(again)
        return max(self.machine.device.least_us, self.times[node] / cut.count, self.machine.memory_us(moved))

    def _chunk_of_move(self, node: fx.Node, cut: _Cut) -> float:
        latency = self.machine.latency_us
        return latency + (self.times[node] - latency) / cut.count

    def _is_in_pieces(self, node: fx.Node, cut: _Cut) -> bool:
        """Whether the rows of a chunk do not lie behind one another."""
        return math.prod(local_type(node, self.mesh).shape[: cut.dim]) > 1

    def _copy_time(self, node: fx.Node) -> float:
        """How long copying chunks into one value takes."""
        return self.machine.call_us(0, "", 2 * local_bytes(node, self.mesh))

    # -- the program ------------------------------------------------------------------------------------------------

    def _put(self, node: fx.Node) -> fx.Node | None:
        for operand in node.all_input_nodes:
            if operand in self.gathers and operand in self.under_way:
                self._use(operand)
        if node in self.products:
            self._sum(node)
        elif node in self.gathers:
            cut = self.gathers[node]
            parts = self._chunks(self.build.value[node.args[0]], cut, node)  # type: ignore[index]
            self.under_way[node] = [self._start(node, part, cut) for part in parts]
        elif node in self.under_way:
            waits = [self._wait(start) for start in self.under_way.pop(node)]
            return self._whole(node, waits, self.products[node.args[0]].dim)  # type: ignore[index]
        return self.build.value.get(node)

    def _sum(self, product: fx.Node) -> None:
        """The chunks of a product, each on its way as soon as it is computed."""
        cut, (collective,) = self.products[product], product.users
        operands = self._operands(product, cut, {})
        parts = (self._product(product, chosen, cut, i) for i, chosen in enumerate(operands))
        self.under_way[collective] = [self._start(collective, part, cut) for part in parts]

    def _use(self, gather: fx.Node) -> None:
        """Wait for the chunks of a gathered value one by one, and compute with each before the next."""
        cut, users = self.gathers[gather], self.chunked[gather]
        waits: list[fx.Node] = []
        nodes: dict[fx.Node, list[fx.Node]] = {user: [] for user in users}
        dims = {user: _row(user, gather, cut.dim) or 0 for user in users}
        others = {user: self._operands(user, _Cut(dims[user], cut.count), {gather: waits}) for user in users}
        for i, start in enumerate(self.under_way.pop(gather)):
            waits.append(self._wait(start))
            for user in users:
                nodes[user].append(self._product(user, next(others[user]), _Cut(dims[user], cut.count), i))
        if len(users) < len(gather.users):
            self.build.value[gather] = self._whole(gather, waits, cut.dim)
        for user in users:
            self.build.value[user] = self._whole(user, nodes[user], dims[user])

    def _operands(
        self, product: fx.Node, cut: _Cut, known: Mapping[fx.Node, Sequence[fx.Node]]
    ) -> Iterator[list[fx.Node]]:
        """The operands of each chunk of a product. known: those that come in chunks already, perhaps not there yet."""
        *letters, result = _letters(product)
        for i in range(cut.count):
            chosen = []
            for operand, dims in zip(product.args[:2], letters, strict=True):
                value = self.build.value.get(operand)  # type: ignore[arg-type]
                if operand in known:
                    value = known[operand][i]  # type: ignore[index]
                elif result[cut.dim] in dims:
                    value = self._chunk(value, _Cut(dims.index(result[cut.dim]), cut.count), i, product)  # type: ignore[arg-type]
                chosen.append(value)
            yield chosen  # type: ignore[misc]

    def _product(self, node: fx.Node, operands: Sequence[fx.Node], cut: _Cut, i: int) -> fx.Node:
        known = record(node)
        like = known.with_(origin="", flops=known.flops // cut.count)
        name = f"{node.name}_chunk" if i else node.name  # products are known by their names
        return self.build.lay(_EINSUM, *operands, node.args[2], like=like, type_=_part(node, cut), name=name)

    def _chunks(self, value: fx.Node, cut: _Cut, user: fx.Node) -> list[fx.Node]:
        return [self._chunk(value, cut, i, user) for i in range(cut.count)]

    def _chunk(self, value: fx.Node, cut: _Cut, i: int, user: fx.Node) -> fx.Node:
        """Rows of a rank's part: of a dim that an axis splits, those of all ranks are no rows of the whole in order."""
        layout, size = record(value).layout, local_type(value, self.mesh).shape[cut.dim] // cut.count
        like, ends = record(user).with_(origin="", reason="", flops=0), (i * size, (i + 1) * size)
        return self.build.lay(
            aten.slice.Tensor, value, cut.dim, *ends, like=like, type_=_part(value, cut), layout=layout, name="rows"
        )

    def _start(self, node: fx.Node, part: fx.Node, cut: _Cut) -> fx.Node:
        name = f"{mesh_op_name(node.target)}_start"
        like = record(node).with_(origin="")
        return self.build.lay(op(name), part, *node.args[1:], like=like, type_=_part(node, cut), name=name)

    def _wait(self, start: fx.Node) -> fx.Node:
        return self.build.lay(op("wait"), start, like=record(start).with_(reason=""), name="wait")

    def _whole(self, node: fx.Node, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        like = record(node).with_(reason="", flops=0)
        return self.build.lay(aten.cat.default, list(parts), dim, like=like, name="chunks")


def _part(node: fx.Node, cut: _Cut) -> TensorType:
    """The type of one chunk of a value."""
    type_ = record(node).type
    shape = (*type_.shape[: cut.dim], type_.shape[cut.dim] // cut.count, *type_.shape[cut.dim + 1 :])
    return TensorType(shape, type_.dtype)


def _letters(product: fx.Node) -> tuple[str, str, str]:
    """The letters of the operands and the result of a product."""
    operands, result = str(product.args[2]).split("->")
    first, second = operands.split(",")
    return first, second, result


def _row(product: fx.Node, operand: fx.Node, dim: int) -> int | None:
    """The dim of a product's result that is a dim of an operand; None if the product sums over that."""
    found = through(call_of(product), {operand_nodes(product).index(operand): (dim, 1)}, TABLE)
    at = None if isinstance(found, str) else found.results[0]
    return None if at is None else at[0]
