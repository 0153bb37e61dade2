"""propagate: every value gets a layout, every operand a wanted layout."""

from __future__ import annotations

from torch import fx

from autopar.ir.layout import Layout, replicated
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import AS_PARAMETER, Builder, Level, Program, Record, operand_nodes, record, source_of
from autopar.passes.rules.states import compose
from autopar.passes.search.axes import axis_searches, classes_of
from autopar.passes.search.earlier_layouts import as_earlier
from autopar.passes.search.items import Classes
from autopar.passes.search.notes import axis_notes, rule_notes


def propagate(program: Program, plan: Plan) -> Program:
    """CAPTURED -> SHARDED. One axis after the other, each by the cheapest plan within its intent.

        mesh: dp=2,tp=2
        CAPTURED program
        %up: f32[8,4] = parameter "up"
        %down: f32[4,8] = parameter "down"
        %x: f32[6,4] = batch "0"
        %einsum: f32[6,8] = autopar.einsum.default(%x, %up, "ca,ba->cb")
        %einsum_1: f32[6,4] = autopar.einsum.default(%einsum, %down, "ca,ba->cb")
        %sum_1: f32[] = aten.sum.default(%einsum_1)
        return loss "loss" = %sum_1
    becomes
        SHARDED program on dp=2,tp=2
        %up: f32[8,4] [tp,-] = parameter "up"
        %down: f32[4,8] [-,tp] = parameter "down"
        %x: f32[6,4] [dp,-] = batch "0"
        %einsum: f32[6,8] [dp,tp] = autopar.einsum.default(%x, %up, "ca,ba->cb")
        %einsum_1: f32[6,4] [dp,-] partial(tp) = autopar.einsum.default(%einsum, %down, "ca,ba->cb")
        %sum_1: f32[] [] partial(dp,tp) = aten.sum.default(%einsum_1)
        return loss "loss" = %sum_1 as []

    A program that differs from an earlier one in its sizes alone takes that one's layouts (`plan.fixed.decided`), if
    they fit. The user's layouts (`plan.layouts`) are kept. Raises LayoutError if the tensor-parallel axis can split no
    weight.
    Method: einsum-like names (GSPMD, arXiv 2105.04663) and an integer programme (Alpa, arXiv 2201.12023).
    """
    earlier = as_earlier(program, plan)
    if earlier is not None:
        return earlier
    classes, mesh = classes_of(program, plan), plan.layout_mesh
    notes: list[str] = []
    for search in axis_searches(classes, plan):
        solution = search.solve()
        search.take(solution)
        if not (search.is_idle and plan.fixed.is_own):  # nobody asked the axis to divide that batch
            notes += axis_notes(search, solution)
    notes += rule_notes(classes)
    return _annotate(program, classes, mesh).with_(
        level=Level.SHARDED, mesh=mesh, notes=(*program.notes, *dict.fromkeys(notes))
    )


def _annotate(program: Program, classes: Classes, mesh: Mesh) -> Program:
    results, operands = _layouts(classes, mesh)
    build = Builder("propagate")
    return build.rewrite(
        program, lambda node: build.copy(node, like=_sharded(program, node, classes, results, operands))
    )


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
    """A gradient and the new value of a parameter leave in the parameter's layout, everything else whole."""
    by_name = {entry.name: results[classes.of[node]][0] for node, entry in program.parameters()}
    output = program.graph.output_node()
    result_layouts = []
    for node, out in zip(operand_nodes(output), program.outputs, strict=True):
        ndim = len(record(node).type.shape)
        result_layouts.append(by_name[out.name] if out.kind in AS_PARAMETER else replicated(ndim))
    return result_layouts
