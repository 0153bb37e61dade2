"""reshard: the difference between the layout a value has and the one its user wants becomes collectives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import fx

from autopar.ir.layout import OWNED, Factor, Layout, is_mirrored, outer_of
from autopar.ir.mesh import CONTEXT_AXES, DATA_AXES, GRADIENT_AXES, MICROBATCH, SLICE, TIME_AXES, Mesh, group_name
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.plan import Plan
from autopar.ir.program import BESIDE, CAST, Builder, Level, Output, Program, Record, is_given, operand_nodes, record
from autopar.passes.collectives.carried import carried, carried_back
from autopar.passes.collectives.gather_notes import with_gather_notes
from autopar.passes.collectives.routing import Routing
from autopar.passes.precision.gradient_terms import is_short
from autopar.passes.rules import table_of

MADE_BY = "reshard"


def reshard(program: Program, plan: Plan) -> Program:
    """SHARDED -> EXPLICIT. The one place where collectives enter a program.

        SHARDED program on dp=2,tp=2
        %w: f32[4,6] [-,tp] = parameter "w"
        %b: f32[4] [-] = parameter "b"
        %x: f32[8,6] [dp,tp] = batch "0"
        %einsum: f32[8,4] [dp,-] partial(tp) = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %add: f32[8,4] [dp,-] = aten.add.Tensor(%einsum as [dp,-], %b)
        return value "y" = %add as [-,-]
    becomes
        EXPLICIT program on dp=2,tp=2
        %w: f32[4,6] [-,tp] = parameter "w"
        %b: f32[4] [-] = parameter "b"
        %x: f32[8,6] [dp,tp] = batch "0"
        %einsum: f32[8,4] [dp,-] partial(tp) = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %all_reduce: f32[8,4] [dp,-] = autopar.all_reduce.default(%einsum, "tp", "sum")
        %add: f32[8,4] [dp,-] = aten.add.Tensor(%all_reduce, %b)
        %all_gather: f32[8,4] [-,-] = autopar.all_gather.default(%add, "dp", 0, 1)
        return value "y" = %all_gather

    A value is moved once for all users that want it alike. A computed value is moved where it is made, so that a
    gradient is on its way early; an input where it is first used, so that nothing is gathered ahead of time. With
    sequence parallelism what the forward pass gathered is gathered again for the backward pass, so that only pieces
    are kept in between (arXiv 2205.05198, section 4.2.2); with ZeRO-3 parameters are (arXiv 1910.02054, section 5.3).
    Under a precision no gradient of a weight, nor of what is computed of weights, is summed shorter than was asked for.
    """
    return with_gather_notes(_Reshard(program, plan).run())


@dataclass(frozen=True, slots=True)
class ReshardMove:
    """One move and the layout that it gives."""

    name: str
    args: tuple[str | int, ...]
    layout: Layout


class _Reshard:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.plan = program, plan
        self.stored = stored_nodes(program, plan)
        self.build = Builder(MADE_BY)
        self.moved: dict[fx.Node, dict[Layout, fx.Node]] = {}
        self.gathered: dict[fx.Node, dict[Layout, fx.Node]] = {}  # for the backward pass alone
        self.leaving: dict[fx.Node, dict[Layout, fx.Node]] = {}  # for outputs beside the loss alone
        self.carried: dict[tuple[fx.Node, fx.Node], dict[Layout, fx.Node]] = {}  # keys and values, by attention
        self.sent: dict[tuple[fx.Node, fx.Node], dict[Layout, fx.Node]] = {}  # to owners, by index
        self.waiting: set[tuple[fx.Node, fx.Node]] = set()  # rows, and who wants them, whose index comes later
        results = program.leaving
        self.beside = frozenset(node for node, out in results if out.kind in BESIDE)
        self.wants: dict[fx.Node, list[tuple[fx.Node, Layout]]] = {}  # users with the layouts that they want
        self.outputs: dict[fx.Node, Output] = {}  # as what each result leaves first
        for node, out in results:
            if node is not None:
                self.outputs.setdefault(node, out)

    def run(self) -> Program:
        is_owned = False
        for user in self.program.graph.nodes:
            for node, wanted in zip(operand_nodes(user), record(user).operands, strict=False):
                self.wants.setdefault(node, []).append((user, wanted))
                is_owned = is_owned or bool(wanted.owned)
        self.routing = Routing(self.program, table_of(self.plan), self.plan.options.expert_rows) if is_owned else None
        return self.build.rewrite(self.program, self._put, level=Level.EXPLICIT)

    def _put(self, node: fx.Node) -> fx.Node:
        made = self._copy(node)
        layouts = record(node).layouts
        is_given = node.op == "placeholder" or node in self.stored
        if not is_given and record(node).is_tensor and layouts and layouts[0] is not None:
            # whole ones first: what is split is sliced from them
            for user, wanted in sorted(self.wants.get(node, ()), key=lambda pair: len(pair[1].axes)):
                if self._lacks_route(node, wanted, user):
                    self.waiting.add((node, user))
                elif not (self._is_kept(node, user) or self._key(node, user)):
                    self._move(node, wanted, user)
        return made

    def _copy(self, node: fx.Node) -> fx.Node:
        """A node that reads its operands in the layouts in which it wants them."""
        operands, wanted = operand_nodes(node), record(node).operands
        if not wanted:
            return self.build.copy(node)
        moved = iter([self._move(*pair, node) for pair in zip(operands, wanted, strict=True)])
        return self.build.copy(node, lambda old: next(moved) if record(old).is_tensor else self.build.value[old])

    def _move(self, node: fx.Node, wanted: Layout, user: fx.Node) -> fx.Node:
        """The node that holds `node` in the layout `wanted`, made if need be."""
        has = record(node).layout
        if has == wanted:
            return self.build.value[node]
        moved = self.moved.setdefault(node, {})
        if self._is_kept(node, user):
            pieces = {layout: made for layout, made in moved.items() if not _is_gathered(made)}
            moved = self.gathered.setdefault(node, pieces)
        elif user.op == "output" and node in self.beside:  # whole for the user: the step goes on with the pieces
            moved = self.leaving.setdefault(node, dict(moved))
        if self._key(node, user):  # of this attention alone, and on its stage
            moved = self.carried.setdefault((node, user), {})
        if self.routing is not None and wanted.owned and not has.owned:
            moved = self.sent.setdefault((node, self.routing.index_of(node, user)), dict(moved))
        if wanted in moved:
            return moved[wanted]
        # Micro-batches first: what they add up to is moved once, not once for each; but then it is kept whole.
        first = self.plan.zero_axes if user.op == "output" and self.plan.zero >= 2 else ()
        made, steps = self._shortest(node, wanted, moved, first, self._home(node, wanted, user))
        like = self._like(node, has, wanted, user)
        if self._is_rounded(node, steps):  # it is a sum in `reduce_dtype`, and short again behind it
            made = self._cast(made, self.plan.options.reduce_dtype, like)
            for step in steps:
                made = self._step(made, step, like)
            made = moved[wanted] = self._cast(made, record(node).type.dtype, like)
            return made
        for step in self._in_order(steps, node, user):
            made = moved[step.layout] = moved.get(step.layout) or self._routed(made, step, like, (node, user))
        return made

    def _routed(self, made: fx.Node, step: ReshardMove, like: Record, between: tuple[fx.Node, fx.Node]) -> fx.Node:
        """A step, which rows take by the route of their index if they go to their owners, or come back."""
        has = record(made).layout
        if self.routing is None or has.owned == step.layout.owned:
            return self._step(made, step, like)
        index, axis = self.routing.index_of(*between), str(step.args[0])
        home = Layout((step.layout if has.owned else has).dims[:1])
        self._make(index)
        order, counts, bound = self.routing.route(self.build, index, self._move(index, home, between[1]), axis)
        is_index = self.routing.is_index(between[0], index)  # it is computed, not sent
        name, args = ("owned_index", [counts]) if is_index else (step.name, [order, counts])
        type_ = record(made).type
        return self.build.lay(
            op(name), made, axis, *args, *bound, like=like, type_=type_, layout=step.layout, name=name
        )

    def _home(self, node: fx.Node, wanted: Layout, user: fx.Node) -> tuple[Factor, ...]:
        """How rows lie that go to owners, or come back: as their index does, where that is split over the same axes."""
        owned = next((one for one in (record(node).layout, wanted) if one.owned), None)
        if self.routing is None or owned is None:
            return ()
        home, (lies, *_) = owned.at_home.dims[0], record(self.routing.index_of(node, user)).layout.dims
        return lies if _without_integers(lies) == _without_integers(home) else home

    def _make(self, index: fx.Node) -> None:
        """Put an index that stands further down in the program, and what it is made of."""
        missing, pending = {index} - self.build.value.keys(), [index]
        while pending:
            more = {node for node in pending.pop().all_input_nodes if node not in self.build.value} - missing
            missing |= more
            pending += more
        for node in self.program.graph.nodes if missing else ():
            if node in missing and node not in self.build.value:
                self._put(node)

    def _lacks_route(self, node: fx.Node, wanted: Layout, user: fx.Node) -> bool:
        """True for rows that go to owners whose index is not there yet where the rows are made."""
        if self.routing is None or not (wanted.owned or record(node).layout.owned):
            return False
        return self.routing.index_of(node, user) not in self.build.value

    def _like(self, node: fx.Node, has: Layout, wanted: Layout, user: fx.Node) -> Record:
        """The record of the moves between two layouts, but for these."""
        given = record(node)
        return given.with_(
            flops=0,
            module=given.module or record(user).module,
            source=given.source or record(user).source,
            phase=record(user).phase if self._is_late(node, user) else given.phase,
            reason=self._reason(node, has, wanted, user),
        )

    def _step(self, made: fx.Node, step: ReshardMove, like: Record) -> fx.Node:
        type_ = record(made).type
        return self.build.lay(
            op(step.name), made, *step.args, like=like, type_=type_, layout=step.layout, name=step.name
        )

    def _cast(self, made: fx.Node, dtype: torch.dtype, like: Record) -> fx.Node:
        type_, layout = replace(record(made).type, dtype=dtype), record(made).layout
        return self.build.lay(CAST, made, dtype=dtype, like=like, type_=type_, layout=layout, name="cast")

    def _is_rounded(self, node: fx.Node, steps: list[ReshardMove]) -> bool:
        """True for the gradient of what is computed of parameters (merged adapters, a table that a layer projects) that
        would be added up in a shorter dtype than was asked for: over data axes, or whole over those of a sequence.
        What else is added up there is the gradient of an activation, which stays as it was computed."""
        options, known = self.plan.options, record(node)
        if options.sums_dtype is None or not known.is_backward or not is_short(known.type.dtype, options.reduce_dtype):
            return False
        sums = [(set(str(step.args[0]).split(":")), step.name) for step in steps if step.args[-1] == "sum"]
        return any(
            axes & {*DATA_AXES, MICROBATCH} or (name == "all_reduce" and axes & {*CONTEXT_AXES, SLICE})
            for axes, name in sums
        )

    def _in_order(self, steps: list[ReshardMove], node: fx.Node, user: fx.Node) -> list[ReshardMove]:
        """The moves, of which those over slices that go from each to the next wait for no other slice."""
        key, back = self._key(node, user), carried_back(node)
        reshard_moves = []
        for step in steps:
            if key and step.name == "all_gather" and step.args[0] == SLICE:
                step = ReshardMove("earlier", (*step.args, key), step.layout)
            if back and step.name == "reduce_scatter" and step.args[0] == SLICE:
                step = ReshardMove("later", (*step.args[:-1], back), step.layout)
            reshard_moves.append(step)
        return reshard_moves

    def _key(self, node: fx.Node, user: fx.Node) -> str | None:
        """The key of keys or values that slices keep for causal attention `user`."""
        is_sliced = record(node).is_tensor and SLICE in record(node).layout.axes
        return carried(node, user) if is_sliced else None

    def _is_late(self, node: fx.Node, user: fx.Node) -> bool:
        """True for a value that is moved where it is used, not where it is made."""
        is_given = node.op == "placeholder" or node in self.stored
        is_late = is_given or self._is_kept(node, user) or (node, user) in self.waiting
        return is_late or self._key(node, user) is not None

    def _is_kept(self, node: fx.Node, user: fx.Node) -> bool:
        """True for a value of the forward pass that the backward pass gathers again."""
        if node in self.stored:
            return record(user).is_backward and self.plan.is_gathered_again(self.stored[node])
        phases = record(node).phase, record(user).phase
        if record(user).operands and self._goes_to_owners(node, user):
            return False  # rows at their owners stay there: they would be sent again
        along = self.plan.sequence_parallel or any(axis in record(node).layout.axes for axis in CONTEXT_AXES)
        return along and node.op != "placeholder" and phases == ("forward", "backward")

    def _goes_to_owners(self, node: fx.Node, user: fx.Node) -> bool:
        return self.routing is not None and any(
            one is user and wanted.owned for one, wanted in self.wants.get(node, ())
        )

    def _shortest(
        self,
        node: fx.Node,
        wanted: Layout,
        moved: dict[Layout, fx.Node],
        first: tuple[str, ...],
        home: tuple[Factor, ...],
    ) -> tuple[fx.Node, list[ReshardMove]]:
        """The way to `wanted` with the fewest collectives: from the value, or from what was made of it already."""
        starts = [(record(node).layout, self.build.value[node]), *moved.items()]
        ways = [
            (made, moves(layout, wanted, self.program.mesh, first, home))
            for layout, made in starts
            if _reaches(layout, wanted)
        ]
        return min(ways, key=lambda way: sum(is_collective(op(step.name)) for step in way[1]))

    def _reason(self, node: fx.Node, has: Layout, wanted: Layout, user: fx.Node) -> str:
        if has.owned != wanted.owned:
            way = "come back from" if has.owned else "go to"
            return f"rows {way} the ranks of their experts: %{node.name} is {has}, but %{user.name} wants {wanted}"
        if user.op != "output":
            return f"%{node.name} is {has}, but %{user.name} wants {wanted}"
        out = self.outputs[node]
        what = f"gradient of '{out.name}'" if out.kind == "gradient" else f"{out.kind} '{out.name}'"
        return f"%{node.name} is {has}, but it leaves as the {what} in {wanted}"


def stored_nodes(program: Program, plan: Plan) -> dict[fx.Node, str]:
    """The parameters that ZeRO split, and what they are in another dtype, with their first names."""
    splits = set(plan.zero_axes)
    names = {node: entry.name for node, entry in program.parameters()}
    split = [node for node in program.nodes if is_given(node) and splits.intersection(record(node).layout.axes)]
    owners = {node: node if node.op == "placeholder" else node.all_input_nodes[0] for node in split}
    return {node: names[owner] for node, owner in owners.items() if owner in names}


def moves(
    has: Layout, wanted: Layout, mesh: Mesh, first: tuple[str, ...] = (), home: tuple[Factor, ...] = ()
) -> list[ReshardMove]:  # fmt: skip
    """The shortest sequence of collectives and slices that turns one layout into another.

    What can be sliced is sliced first, so that less is moved. Partial axes are reduced (or reduced and scattered),
    splits that are not wanted are gathered innermost first, missing ones sliced outermost first; a split that goes
    from one dim to another is an all-to-all. What moves alike over several data axes moves once, over all of them.
    What an axis splits inside of another one stays where it is, if both layouts have it at the same places: over tp=2
    [tp:2:mb] is gathered to [4:mb], and sliced from it, and no micro-batch is moved.
    `first`: the axes over which sums are scattered before micro-batches are added up. `home`: how the dim of rows lies
    that go to owners, or come back.
    """
    return _Moves(has, wanted, mesh, first, home).steps


Owned = tuple[tuple[int, str], ...]  # dims with rows at their owners, and the axis of each


class _Moves:
    """staying: the dims of which some axes split the same places in both layouts, inside of what others split."""

    def __init__(
        self, has: Layout, wanted: Layout, mesh: Mesh, first: tuple[str, ...], home: tuple[Factor, ...]
    ) -> None:
        self.mesh = mesh
        owned = next((one for one in (has, wanted) if one.owned), None)
        self.first, self.home = first, home or (owned.at_home.dims[0] if owned else ())
        self.dims = [list(dim) for dim in has.dims]
        self.partial = list(has.partial)
        self.steps: list[ReshardMove] = []
        stays = has.owned == wanted.owned
        self.wanted = wanted if stays or not wanted.owned else Layout((self.home, *wanted.dims[1:]), wanted.partial)
        self._from_owners(() if stays else has.owned)
        self.staying = {dim for dim, wants in enumerate(self.wanted.dims) if _stay(self.dims[dim], wants, mesh)}
        self._slice()
        self._reduce()
        self._gather()
        self._split()
        self._make_partial()
        self._to_owners(() if stays else wanted.owned, wanted)
        assert self._layout() == wanted, (str(has), str(wanted), str(self._layout()))

    def _layout(self) -> Layout:
        return Layout(tuple(_without_tail(dim) for dim in self.dims), tuple(self.partial))

    def _step(self, name: str, *args: str | int) -> None:
        self.steps.append(ReshardMove(name, args, self._layout()))

    def _from_owners(self, owned: Owned) -> None:
        """Rows come back to their places, before anything else: there they may be summed, and be fewer."""
        if owned:
            self.dims[0] = list(self.home)
            self._step("combine", group_name([axis for _, axis in owned]))

    def _to_owners(self, owned: Owned, wanted: Layout) -> None:
        """Rows go to their owners last: where these are, ranks have different numbers of them. Along several axes they
        go at once."""
        if owned:
            self.dims[0] = list(wanted.dims[0])
            self._step("dispatch", group_name([axis for _, axis in owned]))

    def _slice(self) -> None:
        """Split over axes that the value is still whole on, where that is the next factor of a dim."""
        held = {axis for axis, _ in self.partial}.union(*map(_without_integers, self.dims))
        for dim, wanted in enumerate(self.wanted.dims):
            for axis in _without_integers(wanted):
                place = self._next_split(axis) if axis not in held else None
                if place is not None:
                    self.dims[dim] = self._with(dim, axis)
                    self._step("shard", axis, *place)

    def _reduce(self) -> None:
        while left := [part for part in self.partial if part not in self.wanted.partial]:
            axis, kind = min(left, key=self._turn)
            alike = [other for other, its_kind in left if its_kind == kind and _moves_with(axis, other)]
            place = self._scattered_to(axis, kind)
            if place is not None:
                self._scatter(axis, alike, *place)
                continue
            axes = [other for other in alike if self._scattered_to(other, kind) is None]
            self.partial = [part for part in self.partial if part[0] not in axes]
            self._step("all_reduce", group_name(axes), kind)

    def _scatter(self, axis: str, alike: list[str], dim: int, outer: int) -> None:
        """Scatter a sum over an axis, and over those after it in the wanted layout that move alike."""
        wanted = self.wanted.dims[dim]
        is_alone = outer < 0 or dim in self.staying  # as what is mirrored is
        after = () if is_alone else wanted[wanted.index(axis) + 1 :]
        axes = [axis, *map(str, takewhile(alike.__contains__, after))]
        self.partial = [part for part in self.partial if part[0] not in axes]
        self.dims[dim] = self._with(dim, axes[-1])
        self._step("reduce_scatter", group_name(axes), dim, outer, "sum")

    def _turn(self, part: tuple[str, str]) -> tuple[bool, bool, bool]:
        """When a partial axis is reduced: what is scattered before what is not, so that less is moved."""
        axis, stays = part[0], self._scattered_to(*part) is None
        return stays or axis not in self.first, axis not in TIME_AXES, stays

    def _scattered_to(self, axis: str, kind: str) -> tuple[int, int] | None:
        return self._next_split(axis) if kind == "sum" else None

    def _next_split(self, axis: str) -> tuple[int, int] | None:
        """(dim, outer) if `axis` is the next factor that the wanted layout has beyond the present one."""
        for dim, wanted in enumerate(self.wanted.dims):
            if axis in wanted and dim in self.staying:
                is_next = axis not in self.dims[dim] and not self._left(dim, wanted)
                return (dim, outer_of(self._with(dim, axis), axis)) if is_next else None
            if axis in wanted:
                before = _without_integers(wanted[: wanted.index(axis)])
                if _without_integers(self.dims[dim]) == before and _prefix(self.dims[dim], wanted):
                    return dim, outer_of(wanted, axis)
        return None

    def _with(self, dim: int, axis: str) -> list[Factor]:
        """The factors of a dim that is split further, over an axis of the wanted layout."""
        wanted = self.wanted.dims[dim]
        if dim in self.staying:
            return _alone(wanted, {axis, *_without_integers(self.dims[dim])}, self.mesh)
        return list(wanted[: wanted.index(axis) + 1])

    def _without(self, dim: int, axes: list[str]) -> list[Factor]:
        """The factors of a dim that is gathered over some axes."""
        factors = self.dims[dim]
        if dim in self.staying:
            return _alone(factors, {*_without_integers(factors)}.difference(axes), self.mesh)
        return list(_without_tail(factors[: factors.index(axes[0])]))

    def _left(self, dim: int, wanted: tuple[Factor, ...]) -> list[str]:
        """The axes of a dim that are to be gathered."""
        if dim in self.staying:
            return [axis for axis in _without_integers(self.dims[dim]) if axis not in wanted]
        return _without_integers(self.dims[dim][_common(self.dims[dim], wanted) :])

    def _gather(self) -> None:
        """Gather what lies inside of axes in time, then over these, one after the other, and then the rest."""
        for is_next in (lambda left: left[-1] not in TIME_AXES, lambda left: True, None):
            self._gather_while(is_next)

    def _gather_while(self, is_next: Callable[[list[str]], bool] | None) -> None:
        """Gather over the axes of each dim, innermost first; is_next: while an axis in time is left there, and this
        is true of those that are left."""
        for dim, wanted in enumerate(self.wanted.dims):
            while left := self._left(dim, wanted):
                if is_next is not None and not (set(left) & {*TIME_AXES} and is_next(left)):
                    break
                axis = left[-1]
                outer = outer_of(self.dims[dim], axis)
                target = self._goes_to(axis, dim)
                axes = [axis] if target is not None else self._gathered_with(axis, dim, left)
                self.dims[dim] = self._without(dim, axes)
                if target is not None:
                    other, other_outer = target
                    self.dims[other] = self._with(other, axis)
                    self._step("all_to_all", axis, dim, outer, other, other_outer)
                else:
                    self._step("all_gather", group_name(axes), dim, outer)
            if is_next is None:
                self.dims[dim] = list(_without_tail(self.dims[dim]))

    def _goes_to(self, axis: str, dim: int) -> tuple[int, int] | None:
        """(dim, outer) if `axis` is the next factor of another dim than the one that it splits."""
        target = self._next_split(axis)
        return target if target is not None and target[0] != dim else None

    def _gathered_with(self, axis: str, dim: int, left: list[str]) -> list[str]:
        """The axes of `left`, `axis` the last of them, that split a dim one right after the other, and move alike."""
        factors, found = self.dims[dim], [axis]
        for place in reversed(range(factors.index(axis))):
            one = factors[place]
            if not (isinstance(one, str) and one in left and _moves_with(axis, one)) or is_mirrored(factors, place):
                break
            if self._goes_to(one, dim) is not None:
                break
            found.insert(0, one)
        return found

    def _split(self) -> None:
        for dim, wanted in enumerate(self.wanted.dims):
            for factor in wanted:
                if isinstance(factor, str) and factor not in self.dims[dim]:
                    self.dims[dim] = self._with(dim, factor)
                    self._step("shard", factor, dim, outer_of(self.dims[dim], factor))
            if dim in self.staying:
                self.dims[dim] = list(wanted)

    def _make_partial(self) -> None:
        for axis, kind in self.wanted.partial:
            if (axis, kind) not in self.partial:
                assert kind == "sum", kind
                self.partial = [pair for pair in self.wanted.partial if pair in self.partial or pair == (axis, kind)]
                self._step("keep_first", axis)


def _moves_with(axis: str, other: str) -> bool:
    """True if a value moves over both axes at once. Over tp it moves alone: in a server, and not between servers."""
    return axis == other or any(axis in group and other in group for group in (GRADIENT_AXES, TIME_AXES))


def _is_gathered(node: fx.Node) -> bool:
    return node.target is op("all_gather")


def _reaches(has: Layout, wanted: Layout) -> bool:
    """True if a move leads from one to the other: only a sum can be made partial again, and rows at their owners, whose
    number is known nowhere else, are split no further."""
    if has.owned and has.owned == wanted.owned and has.dims[0] != wanted.dims[0]:
        return False
    return all(kind == "sum" for axis, kind in wanted.partial if (axis, kind) not in has.partial)


def _without_integers(factors: Sequence[Factor]) -> list[str]:
    return [factor for factor in factors if isinstance(factor, str)]


def _without_tail(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Integer factors after the last axis say nothing."""
    found = list(factors)
    while found and isinstance(found[-1], int):
        found.pop()
    return tuple(found)


def _prefix(factors: list[Factor], of: tuple[Factor, ...]) -> bool:
    return list(of[: len(factors)]) == list(factors)


def _stay(has: Sequence[Factor], wanted: Sequence[Factor], mesh: Mesh) -> bool:
    """True for two layouts of a dim in which the axes that both have split the same places, and where the usual way
    would gather one of these to come to what lies outside of it."""
    both = {axis for axis in _without_integers(has) if axis in wanted}
    if both.issubset(has[: _common(has, wanted)]) or any(isinstance(f, int) and f <= OWNED for f in (*has, *wanted)):
        return False
    if mesh.lengths and (SLICE in has) != (SLICE in wanted):
        return False  # pieces that differ in length are no factor
    return _alone(has, both, mesh) == _alone(wanted, both, mesh)


def _alone(factors: Sequence[Factor], axes: Collection[str], mesh: Mesh) -> list[Factor]:
    """The factors of a dim that some of its axes alone split: what others do is there whole, as an integer."""
    found: list[Factor] = []
    for factor in factors:
        size = mesh[factor] if isinstance(factor, str) and factor not in axes else factor
        last = found[-1] if found else ""
        if isinstance(size, int) and isinstance(last, int):
            found[-1] = last * size
        elif size != 1:
            found.append(size)
    return list(_without_tail(found))


def _common(a: Sequence[Factor], b: Sequence[Factor]) -> int:
    """How many leading factors two dims share."""
    count = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        count += 1
    return count
