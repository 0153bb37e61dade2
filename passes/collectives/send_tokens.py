"""send_tokens: a token goes once to a rank that has several of its experts, and their results are added up there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.ops.collective_ops import ALL_TO_ALL
from autopar.ir.ops.measure import group_of, local_bytes, share_of_tokens
from autopar.ir.ops.op_facts import argument_of, facts_of, is_zeros
from autopar.ir.ops.ops import is_mesh_op, op
from autopar.ir.plan import Plan
from autopar.ir.program import CAST, Builder, Program, Record, TensorType, operand_nodes, record
from autopar.machines import Machine
from autopar.passes.collectives.followed_dims import Dims, followed, moves_only, parts_of
from autopar.passes.rules import call_of, table_of
from autopar.passes.rules.rule import Table
from autopar.passes.rules.through import Through, through

MADE_BY = "send_tokens"
ROUTE, DISPATCH, COMBINE = op("route"), op("dispatch"), op("combine")
REASON = "a token goes once to a rank that has several of its experts, and their results are added up there"
PLACE_BYTES = 4  # of the place of a row's token
CALLS = 40  # of torch, small ones, that find which tokens go and which of them rows are of (rows_to_owners.py)


def send_tokens(program: Program, plan: Plan) -> Program:
    """EXPLICIT -> EXPLICIT. Where rows that go to their experts are k copies of each token, the token goes once to each
    rank; where the results of k rows are added up, a rank adds up those of its experts first.

        machine: 1e6 1e6 1e3 0 0
        EXPLICIT program on ep=2
        %w: f32[4,16,16] [ep,-,-] = parameter "w"
        %x: f32[12,16] [ep,-] = batch "0"
        %index: i64[36] [ep] = batch "1"
        %order: i64[36] [ep] = autopar.order_by_owner.default(%index, "ep")
        %route: i64[8,2] [ep,-] = autopar.route.default(%index, "ep", 4)
        %here: i64[36] [@ep] = autopar.owned_index.default(%index, "ep", %route)
        %unsqueeze: f32[12,1,16] [ep,-,-] = aten.unsqueeze.default(%x, 1)
        %expand: f32[12,3,16] [ep,-,-] = aten.expand.default(%unsqueeze, [12, 3, 16])
        %rows: f32[36,16] [ep,-] = aten.reshape.default(%expand, [36, 16])
        %dispatch: f32[36,16] [@ep,-] = autopar.dispatch.default(%rows, "ep", %order, %route)
        %expert_mm: f32[36,16] [@ep,-] = autopar.expert_mm.default(%dispatch, %w, %here)
        %combine: f32[36,16] [ep,-] = autopar.combine.default(%expert_mm, "ep", %order, %route)
        %apart: f32[12,3,16] [ep,-,-] = aten.reshape.default(%combine, [12, 3, 16])
        %sum_1: f32[12,16] [ep,-] = aten.sum.dim_IntList(%apart, [1])
        %all_gather: f32[12,16] [-,-] = autopar.all_gather.default(%sum_1, "ep", 0, 1)
        return value "y" = %all_gather
    becomes
        EXPLICIT program on ep=2
        %w: f32[4,16,16] [ep,-,-] = parameter "w"
        %x: f32[12,16] [ep,-] = batch "0"
        %index: i64[36] [ep] = batch "1"
        %order: i64[36] [ep] = autopar.order_by_owner.default(%index, "ep")
        %route: i64[16,2] [ep,-] = autopar.route.default(%index, "ep", 4, 0, 3)
        %here: i64[36] [@ep] = autopar.owned_index.default(%index, "ep", %route)
        %tokens: i64[12,3] [ep,-] = autopar.tokens_by_owner.default(%index, "ep", 4, 3)
        %places: i64[36] [@ep] = autopar.token_places.default(%index, "ep", %order, %route, 4, 3)
        %dispatch: f32[36,16] [@ep,-] = autopar.dispatch.default(%x, "ep", %tokens, %route, 0, %places)
        %expert_mm: f32[36,16] [@ep,-] = autopar.expert_mm.default(%dispatch, %w, %here)
        %combine: f32[12,16] [ep,-] = autopar.combine.default(%expert_mm, "ep", %tokens, %route, 0, %places)
        %all_gather: f32[12,16] [-,-] = autopar.all_gather.default(%combine, "ep", 0, 1)
        return value "y" = %all_gather

    What stands between the rows and their sum and takes rows one by one, the product with their weights and its
    gradients, is computed where the rows are: the weights go there, a number a row, and their gradients come back. All
    is done where it takes less time on the plan's machine, of experts that are chosen alike: of n ranks a token goes to
    `share_of_tokens` each, but there are more messages, and calls that find the tokens. Padded messages (`expert_rows`)
    stay as they are: their bound is one of rows.
    """
    routes = [node for node in program.calls() if node.target is ROUTE]
    places = {node: place for place, node in enumerate(program.nodes)} if routes else {}
    taken = set[fx.Node]()  # by one of them
    table, machine = table_of(plan), plan.fixed.machine
    ways = [_Way(route, program.mesh, machine, table, places, taken) for route in routes]
    chosen = {way.route: way for way in ways if way.choose()}
    return _Rewrite(program, chosen).run() if chosen else program


@dataclass(frozen=True, slots=True)
class _Copies:
    """Rows that are `chosen` copies of each token. source: the tokens, in a shape that `flat` gives them if it is not
    theirs. casts: what is done to them all."""

    source: fx.Node
    casts: tuple[fx.Node, ...]
    chosen: int


@dataclass(slots=True)
class _Trips:
    """What goes to the owners (`sent`), and comes back as rows (`back`) or sums (`sums`, by the call that adds up)."""

    sent: dict[fx.Node, None] = field(default_factory=dict)
    back: dict[fx.Node, None] = field(default_factory=dict)
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _Way:
    """One route: what goes by it, and which calls may be computed at the owners. places: of all nodes. taken: what
    other routes have written anew."""

    def __init__(
        self, route: fx.Node, mesh: Mesh, machine: Machine, table: Table, places: Mapping[fx.Node, int],
        taken: set[fx.Node],
    ) -> None:  # fmt: skip
        self.route, self.mesh, self.table, self.places, self.taken = route, mesh, table, places, taken
        self.machine = machine
        index = route.args[0]
        assert isinstance(index, fx.Node)
        self.index, self.axis, self.groups = index, str(route.args[1]), int(route.args[2])  # type: ignore[arg-type]
        self.rows, self.home = record(index).type.shape[0], record(index).layout.dims[0]
        self.trips = [user for user in route.users if user.target in (DISPATCH, COMBINE)]
        self.chosen = 1  # rows of a token
        self.chosen = next((one.chosen for trip in self._of(DISPATCH) if (one := self.copies(_x(trip)))), 1)
        self.there: dict[fx.Node, None] = {}
        self.moved = _Trips()

    @property
    def ranks(self) -> int:
        return self.mesh[self.axis]

    @property
    def order(self) -> fx.Node:
        """The order in which rows leave."""
        order = self.trips[0].args[2]
        assert isinstance(order, fx.Node)
        return order

    @property
    def owned_dim(self) -> tuple[Any, ...]:
        """How the dim of rows lies at their owners."""
        trip = self.trips[0]
        return record(trip if trip.target is DISPATCH else _x(trip)).layout.dims[0]

    def flat(self, layout: Layout, value: fx.Node) -> Layout:
        """The layout of a value with its rows, or tokens, in dim 0 alone. layout: as it lies."""
        is_flat = record(value).type.shape[0] == self.rows
        return layout if is_flat else Layout((layout.dims[0], *layout.dims[2:]), layout.partial)

    def _of(self, target: Any) -> Iterator[fx.Node]:
        return (trip for trip in self.trips if trip.target is target)

    def choose(self) -> bool:
        """Decide what is computed at the owners; False if rows should go as they do."""
        if self.chosen == 1 or len(self.route.args) > 3:
            return False
        least = self._us(self._row_bytes(trip if trip.target is COMBINE else _x(trip)) for trip in self.trips)
        found = False
        for there in ({}, self._may_be_there()):
            moved = self._moved(there)
            us = self._us(self._messages(moved)) + CALLS * max(self.machine.device.least_us, self.machine.launch_us)
            if us < least:
                self.there, self.moved, least, found = there, moved, us, True
        self.taken |= self.there.keys() | self.moved.sums.keys()
        return found

    # -- messages -----------------------------------------------------------------------------------------------------

    def _us(self, messages: Iterable[float]) -> float:
        """The time of messages of which so many bytes leave a rank."""
        group, whole = group_of(self.mesh, self.axis, self.machine.ranks), self.ranks**2 / (self.ranks - 1)
        return sum(self.machine.collective_us(ALL_TO_ALL, left * whole, group) for left in messages)

    def _row_bytes(self, value: fx.Node) -> float:
        """What leaves a rank if each row goes."""
        return local_bytes(value, self.mesh) * (1 - 1 / self.ranks)

    def _token_bytes(self, value: fx.Node, dtype: torch.dtype) -> float:
        """What leaves a rank if each token goes once to a rank. value: with the rows. dtype: of what goes."""
        each = (self.ranks - 1) * share_of_tokens(self.groups, self.ranks, self.chosen)
        each /= 1 if self.is_spread(value) else self.chosen
        return local_bytes(value, self.mesh) / record(value).type.dtype.itemsize * dtype.itemsize * each

    def _messages(self, moved: _Trips) -> Iterator[float]:
        """The bytes that leave a rank in each message."""
        for value in moved.sent:
            is_token = self.copies(value) is not None
            yield self._token_bytes(value, record(value).type.dtype) if is_token else self._row_bytes(value)
        for adds, value in moved.sums.items():
            yield self._token_bytes(value, record(adds).type.dtype)
        yield from map(self._row_bytes, moved.back)
        yield self._row_bytes(self.index) / record(self.index).type.dtype.itemsize * PLACE_BYTES

    # -- what may be computed where ---------------------------------------------------------------------------------

    def _may_be_there(self) -> dict[fx.Node, None]:
        """The calls that the owners of rows could compute: what is linear in rows that come back, so that a row without
        an expert stays zero; then what only goes there."""
        there, zero = dict[fx.Node, None](), set(self._of(COMBINE))  # rows without an expert are zero in these
        for node, follow in self._in_order([user for trip in zero for user in trip.users]):
            operands = operand_nodes(node)
            at = next((i for i, one in enumerate(operands) if one in zero and self._is_wide(one)), None)
            found = None if at is None else self._taken(node, at)
            if found and any(all(_is_zero(operands[i], zero) for i in group) for group in found.linear):
                there[node] = None
                zero.add(node)
                follow(node.users)
        goes = set(self._of(DISPATCH))
        needed = [_x(trip) for trip in goes] + [one for node in there for one in node.all_input_nodes]
        for node, follow in self._in_order(needed, -1):
            is_read_there = all(user in goes or user in there for user in node.users)
            may = is_read_there and node not in there and self._is_wide(node) and not self.copies(node)
            if may and self._taken(node, len(operand_nodes(node))):
                there[node] = None
                follow(node.all_input_nodes)
        return there

    def _in_order(
        self, nodes: Iterable[fx.Node], step: int = 1
    ) -> Iterator[tuple[fx.Node, Callable[[Iterable[fx.Node]], None]]]:
        """Calls in the order of the program, or with step -1 in reverse, and those that are told to follow."""
        waiting, seen = list[tuple[int, fx.Node]](), set[fx.Node]()

        def follow(more: Iterable[fx.Node]) -> None:
            for node in more:
                if node not in seen and node.op == "call_function":
                    seen.add(node)
                    heappush(waiting, (step * self.places[node], node))

        follow(nodes)
        while waiting:
            yield heappop(waiting)[1], follow

    def _taken(self, node: fx.Node, at: int) -> Through | None:
        """How a call takes rows one by one, where its operand, or behind these its result, has them in dim 0."""
        known = record(node)
        if is_mesh_op(node.target) or not known.is_tensor or node in self.taken or not self.has_rows(node):
            return None
        found = through(call_of(node), {at: (0, 1)}, self.table, adds=False)
        if isinstance(found, str) or {*found.operands, *found.results} - {(0, 1), None} or found.adds_up:
            return None
        pairs = list(zip(operand_nodes(node), found.operands, strict=True))
        with_rows = [one for one, split in pairs if split is not None]
        if not with_rows:  # made of numbers, as many as there are rows at home
            return None
        if self.is_same_rows(node) or not any(map(self.is_apart, (node, *with_rows))):
            return found if all(map(self.has_rows, with_rows)) else None
        alike = all(self.has_rows(one) or self.is_spread(one) for one in with_rows)
        beside = max((len(record(one).type.shape) for one, split in pairs if split is None), default=0)
        return found if alike and beside < len(record(node).type.shape) - 1 and self._is_written_flat(node) else None

    def _is_written_flat(self, node: fx.Node) -> bool:
        """Whether a call of rows that lie apart is one of rows in dim 0 as well: element by element, or a sum in each
        row."""
        if facts_of(node.target).precision == "sum":
            dims, count = argument_of(node, "dim"), len(record(_x(node)).type.shape)
            return isinstance(dims, (list, tuple)) and all(dim % count > 1 for dim in dims)
        return facts_of(node.target).pointwise

    def rest(self, value: fx.Node) -> tuple[int, ...] | None:
        """The shape of a row of a value that has them as they lie at home: in dim 0, or those of each token in dim 1.
        None for any other value."""
        known = record(value)
        if not known.is_tensor or known.layout.dims[:1] != (self.home,):
            return None
        if known.type.shape[0] == self.rows:
            return known.type.shape[1:]
        is_apart = known.type.shape[:2] == (self.rows // self.chosen, self.chosen) and not known.layout.dims[1]
        return known.type.shape[2:] if is_apart else None

    def has_rows(self, value: fx.Node) -> bool:
        return self.rest(value) is not None

    def is_apart(self, value: fx.Node) -> bool:
        """Whether the rows of each token lie in dim 1."""
        return self.has_rows(value) and record(value).type.shape[0] != self.rows

    def is_spread(self, value: fx.Node) -> bool:
        """Whether a value is read, with rows apart, as one row of each token."""
        known = record(value)
        is_one = known.is_tensor and known.type.shape[:2] == (self.rows // self.chosen, 1)
        return is_one and len(known.type.shape) > 2 and self._lies_at_home(value)

    def is_same_rows(self, node: fx.Node) -> bool:
        """Whether a call gives the rows of its operand, each as it is."""
        return facts_of(node.target).moves == "flat" and self.has_rows(node) and self.rest(node) == self.rest(_x(node))

    def _is_wide(self, value: fx.Node) -> bool:
        """Whether a row has more than a number."""
        return math.prod(self.rest(value) or ()) > 1

    def copies(self, value: fx.Node) -> _Copies | None:
        """The tokens of which rows are copies, each of its own so many in a row."""
        if self.is_spread(value):
            return _Copies(value, (), self.chosen)
        rest, node, path = self.rest(value), value, list[fx.Node]()
        if rest is None:
            return None
        while facts_of(node.target).moves == "same" or (node.op == "call_function" and moves_only(node)):
            path.append(node)
            node = _x(node)
        if facts_of(node.target).moves != "repeated":
            return None
        after = record(node).type.shape
        before = (1,) * (len(after) - len(record(_x(node)).type.shape)) + record(_x(node)).type.shape
        grown = [dim for dim, size in enumerate(after) if size != before[dim]]
        chosen = after[grown[0]] if len(grown) == 1 else 0
        if not chosen or self.chosen not in (1, chosen):
            return None
        dims: Dims | None = parts_of([[(str(dim), size)] for dim, size in enumerate(after)])
        casts = [step for step in reversed(path) if facts_of(step.target).moves == "same"]
        for step in reversed(path):
            dims = dims if dims is None or step in casts else followed(dims, step)
        parts = [part for dim in dims or () for part in dim]
        at, others = str(grown[0]), [name for name, _ in parts if name != str(grown[0])]
        tokens = math.prod(size for _, size in takewhile(lambda part: part[0] != at, parts))
        if dims is None or tokens * chosen != self.rows or others != sorted(others, key=int):
            return None
        source, shape = _x(node), (tokens, *rest)
        while record(source).type.shape != shape and facts_of(source.target).moves == "flat":
            source = _x(source)
        source = source if record(source).type.shape == shape else _x(node)
        return _Copies(source, tuple(casts), chosen) if self._lies_at_home(source) else None

    def _lies_at_home(self, tokens: fx.Node) -> bool:
        return record(tokens).layout.dims[:1] == (self.home,)

    def _moved(self, there: dict[fx.Node, None]) -> _Trips:
        """What moves if some calls are computed at the owners."""
        moved, owned = _Trips(), dict.fromkeys((*self._of(COMBINE), *there))
        operands = [one for node in there for one in operand_nodes(node)] + [_x(trip) for trip in self._of(DISPATCH)]
        for value in operands:
            if value not in owned and (self.has_rows(value) or self.is_spread(value)):
                moved.sent.setdefault(value)
        goes = there.keys() | set(self._of(DISPATCH))
        for value in owned:
            for user in value.users:
                adds = None if user in goes else self._adds_up(value, user)
                if adds is not None and self._token_bytes(value, record(adds).type.dtype) < self._row_bytes(value):
                    moved.sums[adds] = value
                elif user not in goes:
                    moved.back.setdefault(value)
        moved.sums = {adds: value for adds, value in moved.sums.items() if value not in moved.back}
        return moved

    def _adds_up(self, value: fx.Node, user: fx.Node) -> fx.Node | None:
        """The call that adds up the rows of each token, by way of one of the users of their value."""
        tokens, chosen = ("tokens", self.rows // self.chosen), ("chosen", self.chosen)
        rest = [(str(dim), size) for dim, size in enumerate(self.rest(value) or ())]
        leading = [[tokens], [chosen]] if self.is_apart(value) else [[tokens, chosen]]
        dims: Dims | None = parts_of([*leading, *([part] for part in rest)])
        while dims is not None and moves_only(user) and len(user.users) == 1:
            dims, user = followed(dims, user), next(iter(user.users))
        if dims is None or facts_of(user.target).precision != "sum" or user in self.taken:
            return None
        added, count = argument_of(user, "dim"), len(dims)
        if not isinstance(added, (list, tuple)) or len(added) != 1 or dims[added[0] % count] != [chosen]:
            return None
        left = [part for dim in dims for part in dim if part != chosen]
        lies = [*record(user).layout.dims]
        if argument_of(user, "keepdim"):
            del lies[added[0] % count]
        in_order = left == [part for dim in parts_of([[tokens], rest]) for part in dim]
        return user if in_order and lies[:1] == [self.home] else None


class _Rewrite:
    """Writes the trips that were chosen in place of those of rows."""

    def __init__(self, program: Program, ways: dict[fx.Node, _Way]) -> None:
        self.program, self.ways = program, ways
        self.build = Builder(MADE_BY)
        self.owned: dict[tuple[fx.Node, fx.Node], fx.Node] = {}  # by route: a value where the owners of its rows are
        self.of_tokens: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # of each route the tokens and the places
        self.way_of: dict[fx.Node, _Way] = {}  # of each node that is written in another way
        for way in ways.values():
            self.way_of |= dict.fromkeys((way.route, *way.trips, *way.there, *way.moved.sums), way)

    def run(self) -> Program:
        return self.build.rewrite(self.program, self._put, later=self._unread())

    def _unread(self) -> set[fx.Node]:
        """The nodes that nothing reads at home."""
        unread, read = set[fx.Node](), set[fx.Node]()
        for node in reversed(self.program.nodes):
            if node.op == "call_function" and node not in read and node.users:
                unread.add(node)
                if not self._is_written(node):
                    continue
            read.update(self._reads(node))
        return unread

    def _is_written(self, node: fx.Node) -> bool:
        """Whether a node that nothing reads at home is computed at the owners."""
        return node in self.way_of and node in self.way_of[node].there

    def _reads(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values at home are read to write a node."""
        way = self.way_of.get(node)
        if way is None or node is way.route:
            return node.all_input_nodes
        if node in way.moved.sums:
            return self._way_back(way, way.moved.sums[node])
        if node in way.there:
            return [one for operand in operand_nodes(node) for one in self._way_there(way, operand)]
        if node.target is DISPATCH:
            return [*node.all_input_nodes[1:], *self._way_there(way, _x(node))]
        return node.all_input_nodes

    def _way_there(self, way: _Way, value: fx.Node) -> list[fx.Node]:
        """What is read at home to have an operand at the owners."""
        if value in way.there or (value.target is COMBINE and value in way.trips):
            return self._way_back(way, value)
        copies = way.copies(value)
        return [copies.source] if copies else [value]

    def _way_back(self, way: _Way, value: fx.Node) -> list[fx.Node]:
        return [] if value in way.there else [_x(value)]

    def _put(self, node: fx.Node) -> fx.Node | None:
        way = self.way_of.get(node)
        if way is None:
            return None
        if node is way.route:
            return self._route(way)
        if node in way.moved.sums:
            return self._sum(way, node, way.moved.sums[node])
        if node.target is DISPATCH:
            return self._there(way, _x(node), node)
        if node in way.there and node in way.moved.back:
            known, x = record(node), self._there(way, node, node)
            type_ = TensorType(record(x).type.shape, known.type.dtype)
            made = self._trip(way, COMBINE, x, node, type_, way.flat(known.layout, node))
            return made if type_ == known.type else self._reshaped(made, known.type.shape, known, known.layout)
        return None

    def _route(self, way: _Way) -> fx.Node:
        known, index = record(way.route), self.build.value[way.index]
        type_ = TensorType((2 * known.type.shape[0], known.type.shape[1]), known.type.dtype)
        return self.build.lay(
            ROUTE, index, way.axis, way.groups, 0, way.chosen, like=known, type_=type_, name=way.route.name
        )

    def _tokens(self, way: _Way) -> tuple[fx.Node, fx.Node]:
        """What tells which tokens go, and whose the rows are."""
        if way.route not in self.of_tokens:
            index, route = self.build.value[way.index], self.build.value[way.route]
            order = self.build.value[way.order]
            like, chosen = record(way.route).with_(origin="", reason=REASON), (way.groups, way.chosen)
            home, owned = record(way.index).layout, Layout((way.owned_dim,))
            listed = TensorType((way.rows // way.chosen, way.chosen), torch.int64)
            numbers = TensorType((way.rows,), torch.int64)
            self.of_tokens[way.route] = (
                self.build.lay(
                    op("tokens_by_owner"), index, way.axis, *chosen, like=like, type_=listed,
                    layout=Layout((*home.dims, ())), name="tokens",
                ),
                self.build.lay(
                    op("token_places"), index, way.axis, order, route, *chosen, like=like, type_=numbers, layout=owned,
                    name="places",
                ),
            )  # fmt: skip
        return self.of_tokens[way.route]

    def _trip(
        self, way: _Way, target: Any, x: fx.Node, like: fx.Node, type_: TensorType, layout: Layout, tokens: bool = False
    ) -> fx.Node:
        """A trip of rows, or of tokens."""
        route = self.build.value[way.route]
        order = self.build.value[way.order]
        known, rest = record(like).with_(flops=0, reason=REASON), ()
        if target is DISPATCH:
            known = known.with_(origin="")
        if tokens:
            order, places = self._tokens(way)
            rest = 0, places  # type: ignore[assignment]
        return self.build.lay(
            target, x, way.axis, order, route, *rest, like=known, type_=type_, layout=layout, name=target._opname
        )

    def _there(self, way: _Way, value: fx.Node, like: fx.Node) -> fx.Node:
        """A value where the owners of its rows are; what has no rows is read as it is. like: for whom."""
        if value.target is COMBINE and value in way.trips:
            return self.build.value[_x(value)]
        if value in way.there and way.is_same_rows(value):
            return self._there(way, _x(value), like)
        if value not in way.there and value not in way.moved.sent:
            return self.build.value[value]
        key = way.route, value
        if key not in self.owned:
            self.owned[key] = self._computed(way, value) if value in way.there else self._sent(way, value, like)
        return self.owned[key]

    def _computed(self, way: _Way, value: fx.Node) -> fx.Node:
        """A call on the rows of a rank's experts."""
        known, rest, args = record(value), way.rest(value), value.args
        assert rest is not None
        if way.is_apart(_x(value)) and facts_of(value.target).precision == "sum":
            count, dims = len(record(_x(value)).type.shape), argument_of(value, "dim")
            args = (args[0], [dim % count - 1 for dim in dims], *args[2:])
        args, kwargs = fx.node.map_arg((args, value.kwargs), lambda one: self._there(way, one, value))
        like, type_ = (
            known.with_(origin="", reason=known.reason or REASON),
            TensorType((way.rows, *rest), known.type.dtype),
        )
        layout = Layout((way.owned_dim, *way.flat(known.layout, value).dims[1:]), known.layout.partial)
        return self.build.lay(value.target, *args, like=like, type_=type_, layout=layout, name=value.name, **kwargs)  # type: ignore[arg-type]

    def _sent(self, way: _Way, value: fx.Node, like: fx.Node) -> fx.Node:
        """Rows, or the tokens of which they are copies, on their way to the owners."""
        known, copies = record(value), way.copies(value)
        shape = (way.rows, *(way.rest(value) if way.has_rows(value) else known.type.shape[2:]))  # type: ignore[misc]
        home = way.flat(known.layout, value)
        if copies is not None:
            x = self._token_values(way, value, copies)
        else:
            x = self._reshaped(self.build.value[value], shape, known, home)
        layout = Layout((way.owned_dim, *home.dims[1:]), known.layout.partial)
        type_ = TensorType(shape, known.type.dtype)
        return self._trip(way, DISPATCH, x, like, type_, layout, tokens=copies is not None)

    def _reshaped(self, x: fx.Node, shape: tuple[int, ...], like: Record, layout: Layout) -> fx.Node:
        """A value in another shape, if that is another one."""
        if record(x).type.shape == shape:
            return x
        type_, like = TensorType(shape, record(x).type.dtype), like.with_(origin="", flops=0)
        reshape = torch.ops.aten.reshape.default
        return self.build.lay(reshape, x, list(shape), like=like, type_=type_, layout=layout, name="rows")

    def _token_values(self, way: _Way, value: fx.Node, copies: _Copies) -> fx.Node:
        """The tokens of which rows are copies, in the shape and the dtype of these."""
        home, rest = way.flat(record(value).layout, value), way.rest(value)
        shape = (way.rows // way.chosen, *(record(value).type.shape[2:] if rest is None else rest))
        x = self._reshaped(self.build.value[copies.source], shape, record(value), home)
        for cast in copies.casts:
            type_ = TensorType(shape, record(cast).type.dtype)
            like = record(cast).with_(origin="")
            args, layout = (x, *cast.args[1:]), record(x).layout
            x = self.build.lay(cast.target, *args, like=like, type_=type_, layout=layout, name=cast.name, **cast.kwargs)  # type: ignore[arg-type]
        return x

    def _sum(self, way: _Way, adds: fx.Node, value: fx.Node) -> fx.Node:
        """The sum of each token's rows, each rank's added up before they come back."""
        known, x = record(adds), self._there(way, value, adds)
        if record(x).type.dtype != known.type.dtype:  # a sum that is wider than its terms
            type_, like = TensorType(record(x).type.shape, known.type.dtype), known.with_(origin="", flops=0)
            x = self.build.lay(CAST, x, dtype=known.type.dtype, like=like, type_=type_, layout=record(x).layout)
        type_ = TensorType((way.rows // way.chosen, *record(x).type.shape[1:]), known.type.dtype)
        layout = Layout(way.flat(record(value).layout, value).dims, known.layout.partial)
        made = self._trip(way, COMBINE, x, adds, type_, layout, tokens=True)
        return self._reshaped(made, known.type.shape, known, known.layout)


def _x(node: fx.Node) -> fx.Node:
    """The first operand."""
    x = node.args[0]
    assert isinstance(x, fx.Node)
    return x


def _is_zero(value: fx.Node, zero: set[fx.Node]) -> bool:
    return value in zero or (value.op == "call_function" and is_zeros(value))
