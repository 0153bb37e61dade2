"""unsort: rows that a mixture of experts sorts by expert are computed in their own order instead."""

from __future__ import annotations

from torch import fx

from autopar.ir.mesh import CONTEXT_AXES, DATA_AXES
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, erase_unused, record
from autopar.passes.rules import table_of
from autopar.passes.sorts.sorted_rows import Make, RowsInOrder, SortedRows

MADE_BY = "unsort"


def unsort(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. A sort whose order nobody sees is left out, so that the rows can be split.

        CAPTURED program
        %w: f32[4,8,5] = parameter "w"
        %x: f32[6,8] = batch "0"
        %expert: i64[6] = batch "1"
        %sort: (i64[6], i64[6]) = aten.sort.default(%expert)
        %keys: i64[6] = operator.getitem(%sort, 0)
        %order: i64[6] = operator.getitem(%sort, 1)
        %rows: f32[6,8] = aten.index.Tensor(%x, [%order])
        %expert_mm: f32[6,5] = autopar.expert_mm.default(%rows, %w, %keys)
        %inverse: i64[6] = aten.argsort.default(%order)
        %y: f32[6,5] = aten.index.Tensor(%expert_mm, [%inverse])
        return value "y" = %y
    becomes
        CAPTURED program
        %w: f32[4,8,5] = parameter "w"
        %x: f32[6,8] = batch "0"
        %expert: i64[6] = batch "1"
        %expert_mm: f32[6,5] = autopar.expert_mm.default(%x, %w, %expert)
        return value "y" = %expert_mm

    Sorting mixes rows of different ranks, so that all would be gathered. It is left out if the table of rules proves
    that it changes nothing: between the sort and the way back each op takes the rows one by one (their dim may be
    split at any place), or sums over them. Where that is not so the program stays as it is, right but whole.
    """
    instead: dict[fx.Node, Make] = {}
    moved: set[fx.Node] = set()
    known: set[fx.Node] = set()  # a sort of an order is part of what is known of the sort that made the order
    # Else the rows of all ranks would be gathered where they draw.
    draws = any(size > 1 for axis, size in plan.mesh.axes if axis in (*DATA_AXES, *CONTEXT_AXES))
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    for node in program.calls():
        if facts_of(node.target).moves == "sorted" and node not in known:
            sorted_rows = SortedRows(node, table_of(plan), places, draws)
            if sorted_rows.is_unseen():
                instead |= sorted_rows.instead
                known |= {*sorted_rows.facts, *sorted_rows.sorts}
                moved |= {value for value, fact in sorted_rows.facts.items() if isinstance(fact, RowsInOrder)}
    if not instead:
        return program
    build = Builder(MADE_BY)

    def put(node: fx.Node) -> fx.Node | None:
        if node in instead:
            return instead[node](build, node)
        if node in moved:  # another order than in the captured program: its values cannot be compared
            return build.copy(node, like=record(node).with_(made_by=MADE_BY, origin=""))
        return None

    made = build.rewrite(program, put)
    erase_unused(made.graph)
    return made
