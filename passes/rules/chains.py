"""The rule of a chain: what its step does to a dim, from the rules of the calls in it.

A dim may be split where the step takes it through every call as it is, from state to state, and adds nothing up along
it: dims of the batch, of heads, of channels that do not mix. The steps may be split, too: ranks take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from torch import fx

from autopar.ir.ops.chain import operand_types, typed_body
from autopar.ir.ops.chain_step import STATES, ChainBody, print_body
from autopar.ir.program import TensorType, is_getitem, record, source_of
from autopar.passes.rules.build import build, replicated_rule
from autopar.passes.rules.follow import Value, follow, readers, type_of
from autopar.passes.rules.local import local_call
from autopar.passes.rules.rule import Arguments, Call, Dim, Dims, Pieces, Row, Rule, Table, call_of
from autopar.passes.rules.splits import Split
from autopar.passes.rules.through import Through, through

STEPS = "t"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to split a step. dims: of each value that is split, which dim; names: of each call, what its rule calls
    that. size: of the dim."""

    dims: Mapping[Value, int]
    names: Mapping[fx.Node, str]
    size: int


@dataclass(frozen=True, slots=True)
class ChainRules:
    """The calls of a step with their rules, and the ways to split it, by name."""

    body: ChainBody
    rules: Mapping[fx.Node, tuple[Rule, Row]]
    ways: Mapping[str, Way]

    @property
    def flops(self) -> int:
        return sum(rule.flops for rule, _ in self.rules.values())

    def dims(self, value: Value, own: str) -> Dims:
        """The names of a value's dims; those that may not be split begin with `own`."""
        known = {way.dims[value]: name for name, way in self.ways.items() if value in way.dims}
        return tuple(
            () if size == 1 else (known.get(dim, f"{own}{dim}"),) for dim, size in enumerate(type_of(value).shape)
        )


def step_of(table: Table, text: str, operands: tuple[TensorType, ...]) -> ChainRules:
    """What is known of a step for operands of these types, by the rules of a table."""
    body = typed_body(text, operands)
    rules = {}
    for node in body.calls:
        if not is_getitem(node):
            call = call_of(node)
            row = table.get(call.op, Row(replicated_rule))
            rules[node] = row.rule(call), row
    ways: dict[str, Way] = {}
    for node in body.operands:
        for dim, size in enumerate(record(node).type.shape):
            is_known = any(way.dims.get((node, 0)) == dim for way in ways.values())
            way = _way(body, table, (node, 0), dim) if size > 1 and not is_known else None
            if way is not None:
                ways[f"n{len(ways)}"] = way
    return ChainRules(body, rules, ways)


Steps = Callable[[str, tuple[TensorType, ...]], ChainRules]


def _way(body: ChainBody, table: Table, value: Value, dim: int) -> Way | None:
    """The way that begins with one dim of an operand; None if some call does not let it through to all its results."""

    def step(node: fx.Node, known: Mapping[int, Split]) -> Through | str:
        found = through(call_of(node), known, table, adds=False)
        if isinstance(found, Through) and not all(at is None or at[1] == 1 for at in (*found.operands, *found.results)):
            return "it joins the dim with one outside of it"
        if isinstance(found, Through) and None in found.results:
            return "it adds up along the dim, or makes what has none"
        return found

    states = [((state, 0), source_of(after)) for state, after in zip(body.of_kind(STATES), body.next, strict=True)]
    found = follow({value: (dim, 1)}, step, readers, twins=states)  # what is split of a state is split of the next one
    if found.closed or found.torn or any(found.at(one) is None for one in body.rows):
        return None
    dims = {one: at[0] for one, at in found.places.items()}
    return Way(dims, {node: one.choice[0] for node, one in found.calls.items()}, type_of(value).shape[dim])


def _types(call: Call) -> tuple[TensorType, ...]:
    """The types that one step of a call has for operands."""
    counts = [len(one) for one in call.args[:3]]
    start, rows = call.operands[: counts[0]], call.operands[counts[0] : counts[0] + counts[1]]
    return tuple(operand_types(start, rows, call.operands[counts[0] + counts[1] :]))


def _chain(call: Call, known: Steps) -> Rule:
    step = known(call.args[3], _types(call))
    length, first = call.results[0].shape[0], len(call.args[0])
    steps: Dim = () if length == 1 else (STEPS,)
    operands = []
    for i, node in enumerate(step.body.operands):
        dims = step.dims((node, 0), f"a{i}_")
        operands.append((steps, *dims) if first <= i < first + len(call.args[1]) else dims)
    results = [(steps, *step.dims(source_of(one), f"r{i}_")) for i, one in enumerate(step.body.rows)]
    names = {name for dims in (*operands, *results) for dim in dims for name in dim}
    barred = names - {STEPS, *step.ways}
    rule = build(call, operands, results, replicated=barred, flops=length * step.flops)
    return replace(rule, turns=STEPS if steps else "")


def _local(pieces: Pieces, known: Steps) -> Arguments:
    """The step on a piece, or on more rows: shapes among its arguments are those of one rank."""
    call = pieces.call
    step = known(call.args[3], _types(call))
    sizes = {name: (pieces.sizes[name], way.size) for name, way in step.ways.items()}
    graph, value = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in step.body.operands:
        value[node] = graph.node_copy(node, value.__getitem__)
    for node in step.body.calls:
        args, kwargs = (node.args, dict(node.kwargs)) if is_getitem(node) else _local_call(step, node, sizes)
        args, kwargs = fx.node.map_arg((args, kwargs), value.__getitem__)
        value[node] = graph.create_node("call_function", node.target, tuple(args), dict(kwargs))
    ends = [tuple(value[one] for one in nodes) for nodes in (step.body.rows, step.body.next)]
    return (*call.args[:3], print_body(ChainBody(graph, *ends)), *call.args[4:]), dict(call.kwargs)


def _local_call(step: ChainRules, node: fx.Node, rows: Mapping[str, tuple[int, int]]) -> Arguments:
    """rows: of each name how many there are now, and were of the whole."""
    rule, row = step.rules[node]
    sizes = dict(rule.sizes)
    shapes = {i: list(type_.shape) for i, type_ in enumerate(call_of(node).results)}
    for name, way in step.ways.items():
        if node in way.names:
            now, before = rows[name]
            sizes[way.names[node]] = sizes[way.names[node]] * now // before
            for i, shape in shapes.items():
                shape[way.dims[node, i]] = shape[way.dims[node, i]] * now // before
    return local_call(call_of(node), row, rule, [tuple(shape) for shape in shapes.values()], sizes)


def rows(table: Table) -> Mapping[str, Row]:
    """The row of chains whose steps are made of the ops of a table."""
    known = lru_cache(maxsize=256)(partial(step_of, table))
    return {"autopar.chain.default": Row(lambda call: _chain(call, known), local=lambda pieces: _local(pieces, known))}
