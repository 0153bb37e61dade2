"""Check the layouts of every call against its rule, inferred anew, apart from the pass that chose them."""

from __future__ import annotations

from collections.abc import Hashable

from autopar.errors import VerificationError
from autopar.ir.layout import OWNED, Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_getitem, record
from autopar.passes.collectives.partition import cuts_of
from autopar.passes.rules import Rules, call_of, form_of, replicated_rule, table_of
from autopar.passes.rules.rule import Dims, Rule
from autopar.passes.rules.splits import Choice
from autopar.passes.rules.states import choices_of

State = Choice | str | None  # of an axis: what it splits, the kind of a partial value, or nothing


def check_rules(program: Program, plan: Plan) -> None:
    """Check a SHARDED program: on each axis, every call is whole, split along one name, or linear in partial sums.

    Raises VerificationError that names the call, the axis and the layouts.
    """
    rules, right = Rules(table_of(plan)), set[Hashable]()
    for node in program.calls():
        if is_getitem(node):
            continue
        known = record(node)
        layouts = tuple(layout for layout in known.layouts if layout is not None)
        if all(layout.is_replicated for layout in (*layouts, *known.operands)):
            continue
        call = call_of(node)
        key = form_of(call), known.operands, layouts
        if key in right:
            continue
        right.add(key)
        pair = rules.of(call)
        rule = pair[0] if pair else replicated_rule(call)
        cuts = cuts_of(rule, known.operands, layouts, program.mesh)
        axes = {axis: name for name, cut in cuts.items() for _, _, axis in cut}
        operands = [_names(*pair, rule, program.mesh) for pair in zip(rule.operands, known.operands, strict=True)]
        results = [_names(*pair, rule, program.mesh) for pair in zip(rule.results, layouts, strict=True)]
        for axis in program.mesh.names:
            given = tuple(states.get(axis) for states in operands)
            made = tuple(states.get(axis) for states in results)
            if not _is_right(rule, axes.get(axis), given, made):
                wanted = ", ".join(map(str, known.operands))
                raise VerificationError(
                    f"%{node.name} = {node.target} at {known.source} ({known.module}) breaks its rule on axis "
                    f"'{axis}': operands {wanted} cannot give {', '.join(map(str, layouts))}."
                )


def _names(dims: Dims, layout: Layout, rule: Rule, mesh: Mesh) -> dict[str, State]:
    """What each axis does to a tensor: the kind of a partial one, or (name, outer)."""
    return {**dict(layout.partial), **choices_of(dims, layout, rule.sizes, mesh)}


def _is_right(rule: Rule, name: str | None, operands: tuple[State, ...], results: tuple[State, ...]) -> bool:
    if name is None:
        if not any(isinstance(state, (str, tuple)) for state in (*operands, *results)):
            return True
        summed = frozenset(i for i, state in enumerate(operands) if state == "sum")
        others = all(state is None for i, state in enumerate(operands) if i not in summed)
        return others and summed in rule.linear and all(state == "sum" for state in results)
    in_order = any(isinstance(state, tuple) and state[1] > 0 for state in (*operands, *results))
    if name in rule.replicated or (name in rule.reversed and in_order):
        return False
    if rule.owned and (rule.owned[0], OWNED) in (*operands, *results):
        tensors = zip((*rule.operands, *rule.results), (*operands, *results), strict=True)
        return all(state == _with_owner(rule.owned, dims) for dims, state in tensors)
    if (name, OWNED) in (*operands, *results) and name in rule.ordered:
        return False
    contracted = any(_has(dims, name) for dims in rule.operands)
    return all(_is_cut(dims, name, s) for dims, s in zip(rule.operands, operands, strict=True)) and all(
        _is_cut(dims, name, state) if _has(dims, name) else state == (rule.partial if contracted else None)
        for dims, state in zip(rule.results, results, strict=True)
    )


def _with_owner(owned: tuple[str, str], dims: Dims) -> State:
    """What an axis does to a tensor of a call whose rows are with their owners."""
    rows, owners = owned
    return (rows, OWNED) if _has(dims, rows) else (owners, 1) if _has(dims, owners) else None


def _has(dims: Dims, name: str) -> bool:
    return any(name in dim for dim in dims)


def _is_cut(dims: Dims, name: str, state: State) -> bool:
    """A tensor that has the name is cut along it; one that lacks it is whole."""
    if not _has(dims, name):
        return state is None
    return isinstance(state, tuple) and state[0] == name
