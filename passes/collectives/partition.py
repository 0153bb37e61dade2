"""partition: rewrite the program to local shapes, the arguments of every call those of one rank's parts."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx

from autopar.errors import VerificationError
from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import SLICE, Mesh, group_name
from autopar.ir.ops.ops import is_mesh_op, op
from autopar.ir.ops.ring_ops import CHAIN_IN_TURNS
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Level, Program, Record, is_getitem, operand_nodes, record, set_record
from autopar.passes.collectives.halos import Edges, halos_of, runs_of
from autopar.passes.collectives.owned_rows import count_of, counted, owned_name
from autopar.passes.collectives.running_states import with_states_before
from autopar.passes.collectives.sized import Cut, Sized, sized_program
from autopar.passes.rules import Rules, call_of, table_of
from autopar.passes.rules.local import local_call
from autopar.passes.rules.rule import Dims, Position, Reading, Rule, Table, starts_of
from autopar.passes.rules.states import by_outer, choices_of

MADE_BY = "partition"
Cuts = dict[str, list[Cut]]


def partition(program: Program, plan: Plan, length: int | None = None) -> Program:
    """EXPLICIT -> LOCAL. Shapes in arguments become local, lookups in a split table get the offset of their piece.

        EXPLICIT program on dp=3,tp=2
        %table: f32[8,4] [tp,-] = parameter "table"
        %tokens: i64[6] [dp] = batch "0"
        %embedding: f32[6,4] [dp,-] partial(tp) = autopar.embedding.default(%table, %tokens)
        %all_reduce: f32[6,4] [dp,-] = autopar.all_reduce.default(%embedding, "tp", "sum")
        %reshape: f32[24] [dp] = aten.reshape.default(%all_reduce, [24])
        %all_gather: f32[24] [-] = autopar.all_gather.default(%reshape, "dp", 0, 1)
        return value "rows" = %all_gather
    becomes
        LOCAL program on dp=3,tp=2
        %table: f32[4,4] of [8,4] [tp,-] = parameter "table"
        %tokens: i64[2] of [6] [dp] = batch "0"
        %coord_tp: - ? = autopar.coord.default("tp")
        %offset: - ? = operator.mul(%coord_tp, 4)
        %embedding: f32[2,4] of [6,4] [dp,-] partial(tp) = autopar.embedding.default(%table, %tokens, offset=%offset)
        %all_reduce: f32[2,4] of [6,4] [dp,-] = autopar.all_reduce.default(%embedding, "tp", "sum")
        %reshape: f32[8] of [24] [dp] = aten.reshape.default(%all_reduce, [8])
        %all_gather: f32[24] [-] = autopar.all_gather.default(%reshape, "dp", 0, 1)
        return value "rows" = %all_gather

    Programs stay the same for every rank: an offset is a rank's coordinate on an axis times a size. What a piece needs
    of the pieces beside it, its rule says (`Halo`), and a collective brings.

    length: of the slices of a sequence whose program this is, where the plan has them differ; by default a mean one.
    """
    if length is None:
        return _Partition(program, table_of(plan)).run()
    return _Partition(
        program.with_(mesh=plan.layout_mesh), table_of(plan), sized_program(program, plan.layout_mesh, length)
    ).run()


class _Partition:
    def __init__(self, program: Program, table: Table, sized: Sized | None = None) -> None:
        self.program, self.rules, self.mesh, self.sized = program, Rules(table), program.mesh, sized
        self.build = Builder(MADE_BY)
        self.coords: dict[str, fx.Node] = {}

    def run(self) -> Program:
        rewritten = self.build.rewrite(self.program, self._put, level=Level.LOCAL)
        if self.sized is not None:
            rewritten = rewritten.with_(mesh=self.sized.mesh)
            for old, new in self.build.value.items():
                set_record(new, self.sized.record(record(new), self.sized.dims[old]))
        for coord in self.coords.values():
            if not coord.users:  # of a reading that no argument needed
                rewritten.graph.erase_node(coord)
        return rewritten

    def _is_cut(self, node: fx.Node) -> bool:
        known = record(node)
        return any(any(layout.dims) for layout in (*known.operands, *known.layouts) if layout is not None)

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node.op != "call_function" or is_getitem(node) or is_mesh_op(node.target) or not self._is_cut(node):
            return None
        call, known = call_of(node), record(node)
        pair = self.rules.of(call)
        assert pair is not None, f"{node} has no rule, so it cannot be split"
        rule, row = pair
        layouts = [layout for layout in known.layouts if layout is not None]
        # Which axes cut which names of the rule, and how large the names are then.
        cuts = cuts_of(rule, known.operands, tuple(layouts), self.mesh)
        sizes = {
            name: size // math.prod(self.mesh[axis] for _, _, axis in cuts.get(name, ()))
            for name, size in rule.sizes.items()
        }
        shapes = [local_shape(type_.shape, lay, self.mesh) for type_, lay in zip(call.results, layouts, strict=True)]
        if self.sized is not None:
            shapes = self.sized.shapes(node, shapes)
            cuts = {} if self.sized.is_of_chunks(node) else cuts
            sizes = {name: self.sized.size(size, cuts.get(name, ())) for name, size in sizes.items()}
        # A rank that has some rows of a table, or of a sequence, has to know which: numbers that differ by rank.
        indexed = [name for name in rule.indexed if name in cuts]
        in_order = [len(cuts[name]) == 1 or all(outer == 1 for outer, _, _ in cuts[name]) for name in indexed]
        assert len(indexed) <= 1 and all(in_order), (node, indexed, cuts)
        halos = halos_of(rule, cuts, self.mesh)
        axis = group_name([axis for _, _, axis in cuts[indexed[0]]]) if indexed else ""
        offset = self._offset(axis, sizes[indexed[0]], known) if indexed else None
        read = cuts.keys() if row.local else cuts.keys() & rule.positional
        readings = {name: self._reading(rule.sizes[name], cuts[name], known) for name in cuts if name in read}
        starts = [
            self._position(one, known) for name in rule.positional & cuts.keys() for one in starts_of(readings[name])
        ]
        args, kwargs = local_call(call, row, rule, shapes, sizes, offset, readings, starts)
        rows, count = owned_name(cuts), None
        if rows is not None and (row.shape_arg is not None or row.local is not None):
            at, dims = next((i, dims) for i, dims in enumerate(rule.operands) if (rows,) in dims)
            count = count_of(self.build, self.build.value[operand_nodes(node)[at]], dims.index((rows,)), known)
            args, kwargs = counted((args, kwargs), call, row, rule, shapes, sizes, rows, count)
        # What the call reads beyond its own rows is fetched, and what it gives beyond them is added where it belongs.
        value = dict(self.build.value) if halos.operands else self.build.value
        for i, edges in halos.operands.items():
            operand = operand_nodes(node)[i]
            value[operand] = self._with_halos(value[operand], known.operands[i], edges, known)
        made = self.build.copy(node)
        made.args, made.kwargs = fx.node.map_arg((args, dict(kwargs)), lambda old: value.get(old, old))
        if count is not None and not count.users:
            self.build.graph.erase_node(count)
        for edges in halos.results.values():
            made = self._summed(made, edges)
        # A recurrence along a cut dim: the ranks hand their states on, by sums of all before, or in turns.
        if rule.scan and rule.scan[0] in cuts:
            name, reverse = rule.scan
            runs = runs_of(rule.results[0].index((name,)), cuts[name], self.mesh)
            return with_states_before(self.build, made, runs, reverse, self.mesh, rule.factor is not None)
        if rule.turns in cuts:
            runs = runs_of(0, cuts[rule.turns], self.mesh)
            made.target, made.args = CHAIN_IN_TURNS, (*made.args, runs.axis, self.mesh[runs.axis], runs.outer)
        return made

    def _with_halos(self, x: fx.Node, layout: Layout, edges: list[Edges], user: Record) -> fx.Node:
        """An operand with the rows beside its pieces that its user reads."""
        for one in edges:
            like = record(x).with_(
                origin="", flops=0, module=user.module, source=user.source, phase=user.phase, reason=one.reason
            )
            longer = one.longer(record(x).type)
            x = self.build.lay(op("halo"), x, *one.args, like=like, type_=longer, layout=layout, name="halo")
        return x

    def _summed(self, made: fx.Node, edges: list[Edges]) -> fx.Node:
        """A result, of which a piece has rows of those beside it, with these rows added where they belong."""
        whole = record(made)
        types = [whole.type]
        for one in edges:
            types.append(one.longer(types[-1]))
        set_record(made, whole.with_(types=(types.pop(),), origin=""))
        for one, type_ in zip(reversed(edges), reversed(types), strict=True):
            like = whole.with_(flops=0, reason=one.reason, origin=whole.origin if one is edges[0] else "")
            made = self.build.lay(op("halo_sum"), made, *one.args, like=like, type_=type_, name="halo_sum")
        return made

    def _reading(self, size: int, cut: list[Cut], like: Record) -> Reading:
        """A name as dims of its own: whole ones and cut ones, major to minor."""
        dims: list[tuple[int, int, Any]] = []
        position = 1
        for outer, _, axis in cut:
            blocks = abs(outer) // position
            if blocks > 1:
                dims.append((blocks, blocks, 0))
                position *= blocks
            size_ = self.mesh[axis]
            if self.sized is not None and axis == SLICE:
                dims.append((self.sized.places, -self.sized.count, self._coord(axis, like)))
            else:
                dims.append((-size_ if outer < 0 and blocks > 1 else size_, 1, self._coord(axis, like)))
            position *= self.mesh[axis]
        rest = size // position if self.sized is None else self.sized.size(size // position, cut)
        return (*dims, (rest, rest, 0))

    def _position(self, position: Position, like: Record) -> fx.Node:
        """A number that differs from rank to rank."""
        first, terms = position
        scalar = Record((None,), module=like.module, source=like.source, phase=like.phase)
        node: Any = first
        for factor, offset in terms:
            term = self.build.call(operator.mul, offset, factor, like=scalar, name="offset")
            node = self.build.call(operator.add, node, term, like=scalar, name="start") if node else term
        assert isinstance(node, fx.Node)
        return node

    def _coord(self, axis: str, like: Record) -> fx.Node:
        if axis not in self.coords:
            scalar = Record((None,), module=like.module, source=like.source, phase=like.phase)
            self.coords[axis] = self.build.call(op("coord"), axis, like=scalar, name=f"coord_{axis}")
        return self.coords[axis]

    def _offset(self, axis: str, size: int, like: Record) -> fx.Node:
        """Where a piece of a name begins. size: of the piece."""
        if self.sized is not None and axis == SLICE:
            size //= self.sized.count
        scalar = Record((None,), module=like.module, source=like.source, phase=like.phase)
        return self.build.call(operator.mul, self._coord(axis, like), size, like=scalar, name="offset")


def cuts_of(rule: Rule, operands: tuple[Layout, ...], results: tuple[Layout, ...], mesh: Mesh) -> Cuts:
    """Which axes cut which names, read off the layouts of a call. Raises VerificationError if one cuts none."""
    cuts: Cuts = {}
    tensors: list[tuple[Dims, Layout]] = [*zip(rule.operands, operands, strict=True)]
    tensors += zip(rule.results, results, strict=True)
    for dims, layout in tensors:
        if not any(layout.dims):
            continue
        for axis, choice in choices_of(dims, layout, rule.sizes, mesh).items():
            cut = (choice[1], mesh.names.index(axis), axis)
            known = cuts.setdefault(choice[0], [])
            if cut not in known:
                if any(other[2] == axis for other in known):
                    raise VerificationError(f"{layout} of dims {dims} splits '{choice[0]}' in another way than {known}")
                known.append(cut)
                known.sort(key=by_outer)
    return cuts
