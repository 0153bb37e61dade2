"""Give a program the layouts that an earlier one of the same structure has: that of another sequence length, say."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from autopar.errors import VerificationError
from autopar.ir.layout import Layout, fits
from autopar.ir.plan import Decided, Plan
from autopar.ir.program import Builder, Level, Program, Record, is_getitem, operand_nodes, record
from autopar.passes.collectives.check_rules import check_rules
from autopar.passes.rules import Rules, call_of, table_of


def decided_by(sharded: Program, plan: Plan) -> tuple[Hashable, Decided]:
    """What a program with layouts decides for those after it, by what they must have in common with it."""
    records = [record(node) for node in sharded.graph.nodes]
    found = Decided(tuple(each.layouts for each in records), tuple(each.operands for each in records))
    return _structure(sharded, plan), found


def as_earlier(program: Program, plan: Plan) -> Program | None:
    """A captured program with the layouts of an earlier one; None if there is none that fits these sizes."""
    decided = plan.fixed.decided.get(_structure(program, plan)) if plan.fixed.decided else None
    if decided is None:
        return None
    given = dict(zip(program.graph.nodes, zip(decided.layouts, decided.operands, strict=True), strict=True))
    are_fit = all(_fits(node, layouts, operands, plan) for node, (layouts, operands) in given.items())
    if not are_fit or not _is_pinned(program, given, plan):
        return None
    build, rules = Builder("propagate"), Rules(table_of(plan))

    def put(node: fx.Node) -> fx.Node:
        layouts, operands = given[node]
        pair = rules.of(call_of(node)) if node.op == "call_function" and not is_getitem(node) else None
        flops = pair[0].flops if pair else 0
        return build.copy(node, like=record(node).with_(layouts=layouts, operands=operands, flops=flops))

    made = build.rewrite(program, put, level=Level.SHARDED, mesh=plan.layout_mesh)
    try:
        check_rules(made, plan)  # a size of 1, or a shape that is taken apart otherwise, may want another rule
    except VerificationError:
        return None
    return made


def _structure(program: Program, plan: Plan) -> Hashable:
    """All that decides whether layouts may be taken over, but for sizes: these are checked one by one."""
    whole = plan.batch_replicated, plan.context_replicated
    dims = None if plan.batch_dims is None else tuple(plan.batch_dims.items())
    of_plan = plan.layout_mesh, whole, plan.sequence_parallel, plan.zero, plan.options.attention
    return *of_plan, dims, program.inputs, program.outputs, tuple(map(_form, program.graph.nodes))


def _form(node: fx.Node) -> Hashable:
    types = tuple((type_.dtype, len(type_.shape)) if type_ else None for type_ in record(node).types)
    return node.op, str(node.target), tuple(operand.name for operand in node.all_input_nodes), types


def _fits(node: fx.Node, layouts: tuple[Layout | None, ...], operands: tuple[Layout, ...], plan: Plan) -> bool:
    known: Record = record(node)
    mesh = plan.layout_mesh
    pairs = [(type_, layout) for type_, layout in zip(known.types, layouts, strict=False) if type_ and layout]
    pairs += [(record(operand).type, layout) for operand, layout in zip(operand_nodes(node), operands, strict=True)]
    return all(fits(type_.shape, layout, mesh) for type_, layout in pairs)


def _is_pinned(
    program: Program, given: dict[fx.Node, tuple[tuple[Layout | None, ...], tuple[Layout, ...]]], plan: Plan
) -> bool:
    """Parameters lie where the plan wants them."""
    wanted = [(given[node][0][0], plan.layouts.get(entry.name)) for node, entry in program.parameters()]
    return all(pin is None or pin == layout for layout, pin in wanted)
