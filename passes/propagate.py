"""propagate: every value gets a layout, every operand a wanted layout."""

from __future__ import annotations

from torch import fx

from autopar.errors import LayoutError, divisors, one_of
from autopar.ir.layout import Layout, whole
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Level, Program, Record, operand_nodes, record, set_record
from autopar.passes.rules import TABLE
from autopar.passes.rules.rule import Table
from autopar.passes.search.intents import intent_of
from autopar.passes.search.items import Classes, Item, build_classes, source_of
from autopar.passes.search.search import search_axis
from autopar.passes.search.states import compose, states_of

MADE_BY = "propagate"


def propagate(program: Program, plan: Plan, table: Table = TABLE) -> Program:
    """CAPTURED -> SHARDED. One axis after the other, each by the cheapest plan within its intent.

        %mm: f32[8,6] = aten.mm.default(%x, %w)
        %mm: f32[8,6] [dp,tp] = aten.mm.default(%x, %w)     with %x wanted [dp,-] and %w wanted [-,tp]

    The user's layouts (`plan.layouts`) are kept. Raises LayoutError if the tensor-parallel axis can split no weight.
    Method: einsum-like names (GSPMD, arXiv 2105.04663) and an integer programme (Alpa, arXiv 2201.12023).
    """
    mesh = plan.layout_mesh
    states = {name: states_of(layout, mesh) for name, layout in plan.layouts.items()}
    classes = build_classes(program, table, states, plan.memory.sums_dtype)
    notes: list[str] = []
    for axis, size in mesh.axes:
        intent = intent_of(axis, plan.sequence_parallel)
        if size == 1:
            continue
        if plan.batch_whole and intent.batch_split:
            notes.append(f"axis '{axis}' (size {size}) cannot divide this batch: every rank computes all of it")
            continue
        strict = search_axis(classes, axis, size, intent, states, dict(mesh.axes))
        if not strict:
            notes.append(f"axis '{axis}': no plan keeps all weights in place; some are gathered (see the collectives)")
        if intent.weights_split:
            notes += _whole_weights(classes, axis, size)
    notes += _without_rows(classes)
    return _annotate(program, classes, mesh).with_(
        level=Level.SHARDED, mesh=mesh, notes=(*program.notes, *dict.fromkeys(notes))
    )


def _whole_weights(classes: Classes, axis: str, size: int) -> list[str]:
    """The weights that an axis could not split; an error if it split none."""
    weights = [item for item in classes.items if item.role and item.role.multiplied]
    parameters = [item for item in weights if item.role and item.role.entry.kind == "parameter"]
    left = [item for item in parameters if item.states[0].get(axis) is None]
    if parameters and len(left) == len(parameters):
        lines = [_sizes_line(item, size) for item in parameters[:8]]
        raise LayoutError(f"axis '{axis}' (size {size}) can split no weight of the model:\n" + "\n".join(lines))
    return [
        f"'{item.role.entry.name}' {list(item.types[0].shape)} stays whole on '{axis}'" for item in left if item.role
    ]


def _sizes_line(item: Item, size: int) -> str:
    assert item.role is not None
    dims = [
        f"dim {dim} (size {n}) is not divisible by {size}: {one_of(divisors(n))} would do"
        if n % size
        else f"dim {dim} (size {n}) cannot be split by the ops that use it"
        for dim, n in enumerate(item.types[0].shape)
    ]
    return f"  '{item.role.entry.name}' {list(item.types[0].shape)}: " + "; ".join(dims)


def _without_rows(classes: Classes) -> list[str]:
    notes = []
    for item in classes.items:
        if not item.has_row:
            where = record(item.node).source
            bytes_ = sum(type_.bytes_ for type_ in item.types) * item.count
            hint = "" if str(item.node.target).startswith("aten.") else "; autopar.register_rule can give it one"
            notes.append(
                f"op '{item.node.target}' has no rule: computed whole on every rank "
                f"({item.count} times, {bytes_ / 1e6:.3g} MB of results; first at {where}){hint}"
            )
    return notes


def _annotate(program: Program, classes: Classes, mesh: Mesh) -> Program:
    results, operands = _layouts(classes, mesh)
    graph = fx.Graph()
    value: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        made = graph.node_copy(node, value.__getitem__)
        value[node] = made
        set_record(made, _sharded(program, node, classes, results, operands))
    return program.with_(graph=graph)


Composed = list[list[Layout]]


def _layouts(classes: Classes, mesh: Mesh) -> tuple[Composed, Composed]:
    """The layouts of the results and of the operands of every class."""
    results: Composed = []
    operands: Composed = []
    for item in classes.items:
        results.append([compose(s, len(t.shape), mesh) for s, t in zip(item.states, item.types, strict=True)])
        found = []
        for (source, result), wanted in zip(item.sources, item.wanted, strict=True):
            found.append(compose(wanted, len(classes.items[source].types[result].shape), mesh))
        operands.append(found)
    return results, operands


def _sharded(program: Program, node: fx.Node, classes: Classes, results: Composed, operands: Composed) -> Record:
    old = record(node)
    if node.op == "output":
        return old.with_(operands=tuple(_result_layouts(program, classes, results)))
    source, result = source_of(node)
    number = classes.of[source]
    if source is not node:
        return old.with_(layouts=(results[number][result],))
    given = iter(results[number])
    layouts = tuple(None if type_ is None else next(given) for type_ in old.types)
    rule = classes.items[number].rule
    return old.with_(layouts=layouts, operands=tuple(operands[number]), flops=rule.flops if rule else 0)


def _result_layouts(program: Program, classes: Classes, results: Composed) -> list[Layout]:
    """A gradient leaves in its parameter's layout, everything else whole."""
    by_name = {
        entry.name: results[classes.of[node]][0]
        for node, entry in zip(program.placeholders, program.inputs, strict=True)
        if entry.kind == "parameter"
    }
    output = program.graph.output_node()
    found = []
    for node, out in zip(operand_nodes(output), program.outputs, strict=True):
        ndim = len(record(node).type.shape)
        found.append(by_name[out.name] if out.kind == "gradient" else whole(ndim))
    return found
