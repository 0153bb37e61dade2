"""expert_loops: a loop over experts becomes products of all rows, each by the matrix of its expert."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of, is_view
from autopar.ir.ops.ops import key_place, op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, Record, erase_unused, is_getitem, operand_nodes, record
from autopar.passes.rules import call_of, table_of
from autopar.passes.rules.rule import Table
from autopar.passes.rules.through import Through, resize, through
from autopar.passes.sorts.loop_bodies import MASK, Apart, Bodies, ExpertTerm, Places, bodies_of
from autopar.passes.sorts.loop_masks import Loop, Numbering, constant, find_loops, mask_of_index
from autopar.passes.sorts.loop_rows import LoopRows
from autopar.passes.sorts.loop_stacks import Stacks, shaped

MADE_BY = "expert_loops"
_PRODUCTS = (op("expert_mm"), op("expert_mm_backward"))
TRIES = 3  # rewrites of a program of which some loops turn out to stay
aten = torch.ops.aten


def expert_loops(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. On a mesh with `ep`, a loop over experts is computed for all rows at once.

        mesh: ep=2
        CAPTURED program
        %w: f32[2,8,5] = parameter "w"
        %x: f32[6,8] = batch "0"
        %scores: f32[6,2] = batch "1"
        %expert: i64[6] = aten.argmax.default(%scores, 1)
        %one: i64[] = aten.full.default([], 1, dtype=i64)
        %zero: i64[] = aten.full.default([], 0, dtype=i64)
        %eq: b8[6] = aten.eq.Scalar(%expert, 0)
        %select: f32[8,5] = aten.select.int(%w, 0, 0)
        %unsqueeze: f32[1,8,5] = aten.unsqueeze.default(%select, 0)
        %where: i64[6] = aten.where.self(%eq, %zero, %one)
        %expert_mm: f32[6,5] = autopar.expert_mm.default(%x, %unsqueeze, %where)
        %eq_1: b8[6] = aten.eq.Scalar(%expert, 1)
        %select_1: f32[8,5] = aten.select.int(%w, 0, 1)
        %unsqueeze_1: f32[1,8,5] = aten.unsqueeze.default(%select_1, 0)
        %where_1: i64[6] = aten.where.self(%eq_1, %zero, %one)
        %expert_mm_1: f32[6,5] = autopar.expert_mm.default(%x, %unsqueeze_1, %where_1)
        %add: f32[6,5] = aten.add.Tensor(%expert_mm, %expert_mm_1)
        return value "y" = %add
    becomes
        CAPTURED program
        %w: f32[2,8,5] = parameter "w"
        %x: f32[6,8] = batch "0"
        %scores: f32[6,2] = batch "1"
        %expert: i64[6] = aten.argmax.default(%scores, 1)
        %expert_mm: f32[6,5] = autopar.expert_mm.default(%x, %w, %expert)
        return value "y" = %expert_mm

    A row has one expert, or a few: it stands once for each. What a body computes for rows of others is seen by nobody
    (see `capture/rows/selected.py`), and what leaves it is zero there and is added up. So of the rows of all experts
    each is computed once, with the matrix, the bias, the weight of its own. A loop in which experts meet otherwise
    stays as it is.
    """
    if not plan.expert_axes:
        return program
    if any(_is_hidden(node) for node in program.calls()):
        program = _with_own_gradients(program)
    program = _with_own_checks(program)
    values, place = Numbering(program), {node: i for i, node in enumerate(program.graph.nodes)}
    bodies, notes = list[Bodies](), list[str]()
    for loop in find_loops(program, values):
        try:
            bodies.append(bodies_of(loop, place))
        except Apart as why:
            notes.append(_note(loop, why))
    for _ in range(TRIES):
        try:
            made = _joined(program, bodies, place, values, table_of(plan)) if bodies else program
            return made.with_(notes=(*made.notes, *dict.fromkeys(notes))) if notes else made
        except _Failed as failed:
            notes.append(_note(failed.bodies.loop, failed))
            bodies.remove(failed.bodies)
    return program


def _is_hidden(node: fx.Node) -> bool:
    """True for the gradient of rows that an expert puts in their places, where other experts put theirs later:
    `where(mask, where(other, 0, gradient), 0)`."""
    if node.target is not aten.where.self or constant(node.args[2]) != 0:
        return False
    given = _bare(node.args[1])
    return given.target is aten.where.self and constant(given.args[1]) == 0


def _bare(node: Any) -> fx.Node:
    """A value without the zeros that it is added to."""
    while node.target is aten.add.Tensor and not node.kwargs and constant(node.args[0]) == 0:
        if not isinstance(node.args[1], fx.Node) or record(node.args[1]).type != record(node).type:
            break
        node = node.args[1]
    found: fx.Node = node
    return found


def _with_own_gradients(program: Program) -> Program:
    """The program in which such a gradient is `where(mask, gradient, 0)`, where no row has both experts."""
    expert: dict[fx.Node, tuple[int, int]] = {}
    for number, loop in enumerate(find_loops(program, Numbering(program))):
        for i, masks in enumerate(loop.masks if loop.chosen == 1 else ()):
            expert.update(dict.fromkeys(masks, (number, i)))
    build = Builder(MADE_BY)

    def of(mask: Any) -> tuple[int, int] | None:
        while mask not in expert and mask.op == "call_function" and is_view(mask.target):
            (mask,) = mask.all_input_nodes
        return expert.get(mask)

    def put(node: fx.Node) -> fx.Node | None:
        if node.target is aten.where.self and constant(node.args[1]) == 0 and of(node.args[0]):
            mask, zero, rest = node.args[0], node.args[1], _bare(node.args[2])
            given = (build.value[one] for one in (mask, zero, rest))  # type: ignore[index]
            return build.call(aten.where.self, *given, like=record(node), name=node.name)
        mine = of(node.args[0]) if _is_hidden(node) else None
        before: Any = _bare(node.args[1]) if mine else None
        while mine and before.target is aten.where.self and constant(before.args[1]) == 0:
            other = of(before.args[0])
            if other is None or other[0] != mine[0] or other[1] == mine[1]:
                break
            before = _bare(before.args[2])
        if not mine or before is node.args[1]:
            return None
        mask, zero = (build.value[node.args[i]] for i in (0, 2))  # type: ignore[index]
        return build.call(aten.where.self, mask, build.value[before], zero, like=record(node), name=node.name)

    made = build.rewrite(program, put)
    erase_unused(made.graph)
    return made


def _with_own_checks(program: Program) -> Program:
    """The program in which what the host reads of masks has masks of its own."""
    masks, guarding = {mask_of_index(node) for node in program.calls()} - {None}, program.guarding()
    if not any(one in masks for node in guarding for one in node.all_input_nodes):
        return program
    build, own = Builder(MADE_BY), dict[fx.Node, fx.Node]()

    def operand(node: fx.Node) -> fx.Node:
        if node not in masks:
            return build.value[node]
        if node not in own:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), build.value.__getitem__)
            own[node] = build.call(node.target, *args, like=record(node), **kwargs)  # type: ignore[arg-type]
        return own[node]

    return build.rewrite(program, lambda node: build.copy(node, operand) if node in guarding else None)


def _note(loop: Loop, why: Exception) -> str:
    known = record(loop.first)
    place = known.source + (f" in {known.module}" if known.module else "")
    return f"the loop over {len(loop.masks)} experts at {place} takes one at a time: {why}"


class _Failed(Exception):
    def __init__(self, bodies: Bodies, why: Apart) -> None:
        super().__init__(str(why))
        self.bodies = bodies


def _joined(program: Program, bodies: list[Bodies], place: Places, values: Numbering, table: Table) -> Program:
    """The program with all experts of each loop at once. Raises _Failed where that cannot be."""
    build = Builder(MADE_BY)
    given = dict[tuple[fx.Node, ...], fx.Node]()
    joins = [_Join(one, Stacks(build, len(one.loop.masks), given), values, table) for one in bodies]
    at = {node: (join, number) for join in joins for node, number in join.bodies.last(place)}
    roots = {root: join for join in joins for root in (*join.bodies.sums, *join.bodies.choices)}
    later = {node for one in bodies for node in (*one.member, *one.inner, *one.sums, *one.choices)}

    def put(node: fx.Node) -> fx.Node | None:
        join = at[node][0] if node in at else roots.get(node)
        if join is None:
            return None
        try:
            if node in at:
                join.compute(at[node][1])
                return build.value.get(node)
            return join.total(node) if node in join.bodies.sums else join.choose(node)
        except Apart as why:
            raise _Failed(join.bodies, why) from None

    made = build.rewrite(program, put, later)
    erase_unused(made.graph)
    return made


@dataclass(frozen=True, slots=True)
class _Rows:
    """What each row's own expert gives, along a dim. is_zero: rows of none are zero."""

    node: fx.Node
    dim: int = 0
    is_zero: bool = False


@dataclass(frozen=True, slots=True)
class _Mask:
    """That a row has its expert: a mask of one column a row, with more dims of size 1. node: None if all rows do."""

    node: fx.Node | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Index:
    """The expert of each row, in a product."""


@dataclass(frozen=True, slots=True)
class _Total:
    """The sum over experts of what they give."""

    node: fx.Node


@dataclass(frozen=True, slots=True)
class _Stack:
    """What each expert gives, along a new first dim."""

    node: fx.Node


_Value = Any  # one of these, or a tuple of them


class _Join:
    """The rows of all experts of one loop, computed at once."""

    def __init__(self, bodies: Bodies, stacks: Stacks, values: Numbering, table: Table) -> None:
        self.bodies, self.build, self.values, self.table = bodies, stacks.build, values, table
        self.count, self.stacks = stacks.count, stacks
        self.of = LoopRows(bodies.loop, self.build, stacks)
        self.rows, self.chosen = self.of.rows, self.of.chosen
        self.made: dict[int, _Value] = {}
        self._spread: dict[tuple[fx.Node, int], fx.Node] = {}

    # -- what is computed of them -------------------------------------------------------------------------------

    def compute(self, number: int) -> None:
        """Enter what a family gives, and what each of its members is where the program gives that."""
        nodes = self.bodies.families[number]
        like = record(nodes[0])
        if number == MASK:
            value: _Value = _Mask(self.of.start(like), (self.of.size,))
        elif is_getitem(nodes[0]):
            value = self.made[self._family(nodes[0].args[0])][nodes[0].args[1]]
        else:
            value = self._computed(nodes, like)
        self.made[number] = value
        if isinstance(value, _Stack):
            self.stacks.given[nodes] = value.node
        if number in self.bodies.alone:
            if not isinstance(value, _Stack):
                raise Apart(f"what one of them gives at {like.source} leaves the model")
            for expert, node in enumerate(nodes):
                self.build.value[node] = self.build.infer(
                    aten.select.int, value.node, 0, expert, like=record(node), name=node.name
                )

    def _family(self, node: Any) -> int:
        return self.bodies.member[node][0]

    def _computed(self, nodes: tuple[fx.Node, ...], like: Record) -> _Value:
        if mask_of_index(nodes[0]) is not None and nodes[0].args[0] in self.bodies.member:
            return _Index()
        sources = list(zip(*(operand_nodes(node) for node in nodes), strict=True))
        given: list[_Value] = []
        for source in sources:
            if source[0] in self.bodies.member:
                given.append(self.made[self._family(source[0])])
            elif len({self.values.of[one] for one in source}) == 1:
                given.append(None)  # the same for all
            else:
                given.append(self._drawn(source, like) or source)  # of each expert its own
        if nodes[0].target in _PRODUCTS:
            return self._product(nodes[0], given, sources, like)
        if key_place(nodes[0].target) >= 0:
            return self._dropped(nodes, given[0], like)
        if any(isinstance(one, _Index) for one in given):
            raise Apart(f"{nodes[0].target} at {like.source} sees who has a row")
        if any(isinstance(one, _Mask) for one in given):
            found = self._masked(nodes[0], given, like)
            if found is not None:
                return found
            given = [self._shown(one, like) if isinstance(one, _Mask) else one for one in given]
        if any(isinstance(one, _Stack) for one in given):
            return self._of_each(nodes[0], given, like)
        if all(not isinstance(one, _Total) for one in given):
            known = {i: (one.dim, 1) for i, one in enumerate(given) if isinstance(one, _Rows)}
            way = through(call_of(nodes[0]), known, self.table, self.rows, adds=False)
            if not isinstance(way, str) and self._is_along(way):
                return self._row_by_row(nodes[0], way, given, like)
        return self._linear(nodes[0], given, like)

    def _again(self, node: fx.Node, *args: Any, like: Record, **kwargs: Any) -> fx.Node:
        """A call of a node's op, with its name."""
        target: Any = node.target
        return self.build.infer(target, *args, like=like, name=node.name, **kwargs)

    def _is_along(self, way: Through) -> bool:
        """True if all tensors have the rows as a dim."""
        tensors = zip((*way.operands, *way.results), (*way.call.operands, *way.call.results), strict=True)
        return all(at is None or (at[1] == 1 and type_.shape[at[0]] == self.rows) for at, type_ in tensors)

    def _product(
        self, node: fx.Node, given: list[_Value], sources: list[tuple[fx.Node, ...]], like: Record
    ) -> _Value:  # fmt: skip
        """A product of rows with a matrix of each expert, or the gradient of these."""
        if not isinstance(given[2], _Index) or any(isinstance(one, (_Mask, _Stack, _Total)) for one in given[:2]):
            raise Apart(f"{node.target} at {like.source} takes rows of other experts")
        rows = [self._along(given[i], sources[i][0], 0, like) for i in range(2 if _is_gradient(node) else 1)]
        if _is_gradient(node):
            made = self._again(node, *rows, self.of.index, self.count, like=like)
            return _Stack(self.build.infer(aten.unsqueeze.default, made, 1, like=like))
        matrices = self.stacks.of(sources[1], like)
        shape = record(matrices).type.shape
        matrices = shaped(self.build, matrices, [shape[0], *shape[2:]], like)
        return _Rows(self._again(node, *rows, matrices, self.of.index, like=like), 0, True)

    def _drawn(self, nodes: tuple[fx.Node, ...], like: Record) -> _Value | None:
        """What each expert makes of the same rows by draws of its own, before its mask is seen; None for others."""
        first = nodes[0]
        operands = [list(node.all_input_nodes) for node in nodes]
        if any(node.target is not first.target or not one for node, one in zip(nodes, operands, strict=True)):
            return None
        sources = tuple(one[0] for one in operands)
        is_same = len({self.values.of[one] for one in sources}) == 1
        if first.op == "call_function" and key_place(first.target) >= 0:
            return self._dropped(nodes, None if is_same else self._drawn(sources, like), like)
        inner = None if is_same or len(operand_nodes(first)) > 1 else self._drawn(sources, like)
        way = through(call_of(first), {0: (inner.dim, 1)}, self.table, self.rows, adds=False) if inner else ""
        return None if isinstance(way, str) else self._row_by_row(first, way, [inner], like)

    def _dropped(self, nodes: tuple[fx.Node, ...], value: _Value, like: Record) -> _Value:
        """Dropout of rows, each with the key of its expert and by its place in the mask."""
        node = nodes[0]
        at = key_place(node.target)
        keys: list[Any] = [one.args[at] for one in nodes]
        step = keys[1] - keys[0] if len(keys) > 1 else 0
        is_even = keys == [keys[0] + step * i for i in range(len(keys))]
        source, seed = operand_nodes(node)
        whole, p = list(record(source).type.shape), node.args[3]
        if node.target is not op("dropout") or not is_even or whole[0] != self.rows:
            raise Apart(f"{node.target} at {like.source} draws otherwise for each of them")
        rows = self._along(value, source, 0, like)
        place = self.of.places(like)
        made = self.build.infer(
            op("dropout_of_rows"), rows, self.build.value[seed], keys[0], step, p, place, self.of.index,
            whole, whole[1:], [0] * (len(whole) - 1), like=like, name=node.name,
        )  # fmt: skip
        return _Rows(made, 0, value is not None and value.is_zero)

    def _along(self, value: _Value, source: fx.Node, dim: int, like: Record) -> fx.Node:
        """An operand of which each row stands for its own expert."""
        if isinstance(value, _Rows):
            if value.dim != dim:
                raise Apart(f"rows lie otherwise at {like.source}")
            return value.node
        if value is not None:
            return self.of.gathered(value, dim, like)
        key = (source, dim)
        if key not in self._spread:
            self._spread[key] = self.of.repeated(self.build.value[source], dim, like)
        return self._spread[key]

    def _masked(self, node: fx.Node, given: list[_Value], like: Record) -> _Value | None:
        """What is made of a mask alone, and rows that it chooses."""
        if (
            node.target is aten.where.self
            and isinstance(given[0], _Mask)
            and not any(isinstance(one, _Mask) for one in given[1:])
        ):
            return self._chosen(node, given, like)
        if is_view(node.target) and math.prod(record(node).type.shape) == self.rows and len(given) == 1:
            shape = record(node).type.shape
            if shape[0] != self.rows:
                return None
            mask = given[0].node
            sizes = (self.of.size, *shape[1:])
            made = mask and shaped(self.build, mask, list(sizes), like)
            return _Mask(made, sizes)
        return None

    def _chosen(self, node: fx.Node, given: list[_Value], like: Record) -> _Value | None:
        """where(mask, rows, other)."""
        mask, shape = given[0], record(node).type.shape
        if not isinstance(given[1], (_Rows, type(None))) or len(mask.shape) > len(shape):
            return None
        dim = len(shape) - len(mask.shape)
        source = node.args[1]
        assert isinstance(source, fx.Node)
        if record(source).type.shape != shape or shape[dim] != self.rows:
            return None
        rows = self._along(given[1], source, dim, like)
        is_zero = given[2] is None and constant(node.args[2]) == 0
        if mask.node is None:
            return _Rows(rows, dim, is_zero)
        if not is_zero:
            return None
        other = self.build.value[node.args[2]]  # type: ignore[index]
        return _Rows(self.build.infer(aten.where.self, mask.node, rows, other, like=like, name=node.name), dim, True)

    def _shown(self, mask: _Mask, like: Record) -> _Rows:
        """A mask as a tensor."""
        node = mask.node
        if node is None:
            node = self.build.infer(aten.full.default, list(mask.shape), True, like=like, dtype=torch.bool)
        return _Rows(node, 0, True)

    def _row_by_row(self, node: fx.Node, way: Through, given: list[_Value], like: Record) -> _Value:
        """A call that takes each row by itself, or adds them up."""
        zeros = {i for i, one in enumerate(given) if isinstance(one, _Rows) and one.is_zero}
        if way.adds_up and node.target is aten.sum.dim_IntList and 0 in zeros:
            return self._added(node, given[0], like)
        is_zero = any(group <= zeros for group in way.linear)
        if way.adds_up and (not is_zero or any(one is not None for one in way.results)):
            raise Apart(f"{node.target} at {like.source} adds rows up")
        result = way.call.results[0].shape
        at = next((one for one in way.results if one is not None), None)
        # Operands of the rows themselves, the same for all rows, or of each expert: these are looked up for each row.
        new: dict[fx.Node, fx.Node] = {}
        for source, value, where in zip(operand_nodes(node), given, way.operands, strict=True):
            if where is not None:
                made = self._along(value, source, where[0], like)
            elif value is None:
                made = self.build.value[source]
            elif facts_of(node.target).pointwise and at is not None:
                made = self.of.looked(value, at[0], len(result), like)
            else:
                raise Apart(f"{node.target} at {like.source} takes another tensor for each")
            if new.setdefault(source, made) is not made:
                raise Apart(f"{node.target} at {like.source} takes one tensor in two ways")
        args, kwargs = node.args, node.kwargs
        if self.chosen > 1:
            args, kwargs = resize(way, self.rows, self.of.size).arguments
        args, kwargs = fx.node.map_arg((args, kwargs), new.__getitem__)
        made = self._again(node, *args, like=like, **kwargs)
        if way.adds_up:
            return _Total(made)
        if not record(node).several:
            assert at is not None
            return _Rows(made, at[0], is_zero)
        return tuple(
            _Rows(self.build.infer(operator.getitem, made, i, like=like), where[0], is_zero)
            for i, where in enumerate(way.results)
            if where is not None
        )

    def _added(self, node: fx.Node, value: _Rows, like: Record) -> _Stack:
        """The sum of each expert's rows."""
        infer = self.build.infer
        shape = record(value.node).type.shape
        dims = {dim % len(shape) for dim in _dims(node)}
        others = sorted(dims - {value.dim})
        summed = infer(aten.sum.dim_IntList, value.node, others, True, like=like) if others else value.node
        order = [value.dim, *(dim for dim in range(len(shape)) if dim != value.dim)]
        summed = infer(aten.permute.default, summed, order, like=like)
        rest = record(summed).type.shape[1:]
        flat = shaped(self.build, summed, [shape[value.dim], math.prod(rest)], like)
        made = infer(op("embedding_backward"), flat, self.of.index, self.count, -1, like=like, name=node.name)
        return _Stack(shaped(self.build, made, [self.count, *record(node).type.shape], like))

    def _linear(self, node: fx.Node, given: list[_Value], like: Record) -> _Total:
        """A call that is linear in what is added up afterwards."""
        mine = [i for i, one in enumerate(given) if one is not None]
        row = self.table.get(str(node.target))
        rule = row.rule(call_of(node)) if row is not None else None
        is_sum = node.target is aten.sum.dim_IntList
        if len(mine) != 1 or rule is None or not (is_sum or frozenset(mine) in rule.linear) or record(node).several:
            raise Apart(f"{node.target} at {like.source} takes the rows of each together")
        (i,) = mine
        source = operand_nodes(node)[i]
        new = {one: self.build.value[one] for one in operand_nodes(node) if one is not source}
        new[source] = self._summed(given[i], record(source))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), new.__getitem__)
        return _Total(self._again(node, *args, like=like, **kwargs))

    def _of_each(self, node: fx.Node, given: list[_Value], like: Record) -> _Stack:
        """A call for what each expert has one of."""
        new = dict[fx.Node, fx.Node]()
        for source, value in zip(operand_nodes(node), given, strict=True):
            if not isinstance(value, (_Stack, tuple)):
                raise Apart(f"{node.target} at {like.source} takes more than what each gives")
            new[source] = value.node if isinstance(value, _Stack) else self.stacks.of(value, like)
        return _Stack(self.stacks.batched(node, new, like))

    # -- what leaves the loop -----------------------------------------------------------------------------------

    def _summed(self, value: _Value, like: Record) -> fx.Node:
        """The sum over experts of what each gives."""
        infer = self.build.infer
        if isinstance(value, _Total):
            return value.node
        if isinstance(value, _Stack):
            return infer(aten.sum.dim_IntList, value.node, [0], like=like)
        if not isinstance(value, _Rows) or not value.is_zero:
            raise Apart(f"what is added at {like.source} is not zero for rows of others")
        made, dim = value.node, value.dim
        if self.chosen > 1:
            shape = record(made).type.shape
            sizes = [*shape[:dim], self.rows, self.chosen, *shape[dim + 1 :]]
            apart = shaped(self.build, made, sizes, like)
            made = infer(aten.sum.dim_IntList, apart, [dim + 1], like=like)
        return self.of.turned(made, dim, like, back=True)

    def total(self, root: fx.Node) -> fx.Node:
        """What stands for a sum over experts."""
        leaves, rest = self.bodies.sums[root]
        like, infer = record(root), self.build.infer
        if any(node not in self.build.value for node in rest):
            raise Apart(f"what another loop gives is added to it at {like.source}")
        terms = [self.build.value[node] for node in rest]
        for leaf in dict.fromkeys(ExpertTerm(leaf.family, 0, leaf.shape, leaf.dim) for leaf in leaves):
            value = self.made[leaf.family]
            terms.append(self._summed(value, like) if leaf.dim is None else self._put(value, leaf, like))
        made = terms[0]
        for term in terms[1:]:
            made = infer(aten.add.Tensor, made, term, like=like)
        return made

    def choose(self, root: fx.Node) -> fx.Node:
        """What stands for rows that all experts put in their places."""
        choice, like = self.bodies.choices[root], record(root)
        mask = self.made[choice.mask]
        if isinstance(choice.value, fx.Node):
            rows = self.build.value[choice.value]
        else:
            value = self.made[choice.value]
            is_along = isinstance(value, _Rows) and value.dim == 0 and record(value.node).type == like.type
            if not is_along:
                raise Apart(f"{root.target} at {like.source} puts rows elsewhere")
            rows = self.of.turned(value.node, 0, like, back=True)
        if not isinstance(mask, _Mask) or choice.base not in self.build.value:
            raise Apart(f"{root.target} at {like.source} takes what several of them give")
        shown = mask.node or self._shown(mask, like).node
        base = self.build.value[choice.base]
        chosen = self.of.turned(shown, 0, like, back=True)
        if mask.node is None and not isinstance(choice.value, fx.Node):
            return rows
        return self.build.infer(aten.where.self, chosen, rows, base, like=like, name=root.name)

    def _put(self, value: _Value, leaf: ExpertTerm, like: Record) -> fx.Node:
        """What each expert gives, along a dim at the place of each."""
        infer = self.build.infer
        assert leaf.dim is not None
        if leaf.shape[leaf.dim] != self.count:
            raise Apart(f"the sum at {like.source} is not over all of them")
        if isinstance(value, _Stack):
            order = [*range(1, leaf.dim + 1), 0, *range(leaf.dim + 1, len(leaf.shape))]
            return value.node if leaf.dim == 0 else infer(aten.permute.default, value.node, order, like=like)
        if not isinstance(value, _Rows) or not value.is_zero or leaf.dim != 1 or len(leaf.shape) != 2:
            raise Apart(f"what is put together at {like.source} has other dims")
        sizes = [self.rows, self.chosen]
        places = shaped(self.build, self.of.place, sizes, like)
        given = shaped(self.build, value.node, sizes, like)
        dtype = record(value.node).type.dtype
        zeros = infer(aten.full.default, list(leaf.shape), 0, like=like, dtype=dtype)
        made = infer(aten.scatter_add.default, zeros, 1, places, given, like=like)
        return self.of.turned(made, 0, like, back=True)


def _dims(node: fx.Node) -> list[int]:
    """The dims of a sum."""
    dims: Any = node.args[1]
    return [dims] if isinstance(dims, int) else list(dims)


def _is_gradient(node: fx.Node) -> bool:
    return node.target is op("expert_mm_backward")
