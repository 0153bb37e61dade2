"""The rule of a chain: what its step does to a dim, from the rules of the calls in it.

A dim may be split where the step takes it through every call as it is, from state to state, and adds nothing up along
it: dims of the batch, of heads, of channels that do not mix. The steps may be split, too: ranks take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from torch import fx

from autopar.ir.chain import operand_types, typed_body
from autopar.ir.program import TensorType, is_getitem, operand_nodes, record
from autopar.ir.step import STATES, Body, print_body
from autopar.passes.rules.build import build, replicated_rule
from autopar.passes.rules.local import local_call
from autopar.passes.rules.rule import Arguments, Call, Dim, Dims, Pieces, Row, Rule, Table, call_of

STEPS = "t"
Value = tuple[fx.Node, int]  # a result of a node of the step


@dataclass(frozen=True, slots=True)
class Way:
    """A way to split a step. dims: of each value that is split, which dim; names: of each call, what its rule calls
    that. size: of the dim."""

    dims: Mapping[Value, int]
    names: Mapping[fx.Node, str]
    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """The calls of a step with their rules, and the ways to split it, by name."""

    body: Body
    rules: Mapping[fx.Node, tuple[Rule, Row]]
    ways: Mapping[str, Way]

    @property
    def flops(self) -> int:
        return sum(rule.flops for rule, _ in self.rules.values())

    def dims(self, value: Value, own: str) -> Dims:
        """The names of a value's dims; those that may not be split begin with `own`."""
        type_ = record(value[0]).types[value[1]]
        assert type_ is not None
        known = {way.dims[value]: name for name, way in self.ways.items() if value in way.dims}
        return tuple(() if size == 1 else (known.get(dim, f"{own}{dim}"),) for dim, size in enumerate(type_.shape))


def step_of(table: Table, text: str, operands: tuple[TensorType, ...]) -> Step:
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
            way = _Spread(body, rules, (node, 0), dim).run(size) if size > 1 and not is_known else None
            if way is not None:
                ways[f"n{len(ways)}"] = way
    return Step(body, rules, ways)


Steps = Callable[[str, tuple[TensorType, ...]], Step]


class _Spread:
    """Follows a split of one dim through all calls."""

    def __init__(self, body: Body, rules: Mapping[fx.Node, tuple[Rule, Row]], value: Value, dim: int) -> None:
        self.body, self.rules = body, rules
        self.dims: dict[Value, int] = {value: dim}
        self.names: dict[fx.Node, str] = {}

    def run(self, size: int) -> Way | None:
        """The way that begins with this dim; None if some call lets it not through, or not to all results."""
        known = (-1, -1)
        while known != (len(self.dims), len(self.names)):
            known = len(self.dims), len(self.names)
            if not all(map(self._is_through, self.rules)) or not all(self._is_carried()):
                return None
        is_right = all(map(self._is_right, self.rules)) and all(_source(one) in self.dims for one in self.body.rows)
        return Way(self.dims, self.names, size) if is_right else None

    def _is_through(self, call: fx.Node) -> bool:
        """Note what a split of one value means for the others of a call; false if there can be none."""
        rule = self.rules[call][0]
        split = [(names, self.dims[value]) for value, names in self._tensors(call) if value in self.dims]
        found = {names[dim][0] if names[dim] else "" for names, dim in split}
        if len(found) != 1:
            return not found
        (name,) = found
        barred = {*rule.replicated, *rule.ordered, ""}
        return name not in barred and self._note(call, name)

    def _note(self, call: fx.Node, name: str) -> bool:
        """Split all values of a call that have a name, of which it must be all that is split first."""
        self.names[call] = name
        for value, names in self._tensors(call):
            for dim, one in enumerate(names):
                if name in one and (one[0] != name or self.dims.setdefault(value, dim) != dim):
                    return False
        return all(any(name in one for one in names) for names in self.rules[call][0].results)

    def _is_carried(self) -> Iterator[bool]:
        """What is split of a state is split of the next one."""
        for state, after in zip(self.body.of_kind(STATES), self.body.next, strict=True):
            for value, other in (((state, 0), _source(after)), (_source(after), (state, 0))):
                yield value not in self.dims or self.dims.setdefault(other, self.dims[value]) == self.dims[value]

    def _is_right(self, call: fx.Node) -> bool:
        """Whether the values that are split are those that have the name of a call."""
        name = self.names.get(call)
        return all((value in self.dims) == any(name in one for one in names) for value, names in self._tensors(call))

    def _tensors(self, call: fx.Node) -> Iterator[tuple[Value, Dims]]:
        rule = self.rules[call][0]
        yield from zip(map(_source, operand_nodes(call)), rule.operands, strict=True)
        places = [i for i, type_ in enumerate(record(call).types) if type_ is not None]
        yield from zip(((call, i) for i in places), rule.results, strict=True)


def _source(node: fx.Node) -> Value:
    """The result that a value of a step is."""
    if not is_getitem(node):
        return node, 0
    source, index = node.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    return source, index


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
    results = [(steps, *step.dims(_source(one), f"r{i}_")) for i, one in enumerate(step.body.rows)]
    names = {name for dims in (*operands, *results) for dim in dims for name in dim}
    barred = names - {STEPS, *step.ways}
    rule = build(call, operands, results, replicated=barred, flops=length * step.flops)
    return replace(rule, turns=STEPS if steps else "")


def _local(pieces: Pieces, known: Steps) -> Arguments:
    """The step on a piece: shapes among its arguments are those of one rank."""
    call = pieces.call
    step = known(call.args[3], _types(call))
    parts = {name: way.size // pieces.sizes[name] for name, way in step.ways.items()}
    graph, value = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in step.body.operands:
        value[node] = graph.node_copy(node, value.__getitem__)
    for node in step.body.calls:
        args, kwargs = (node.args, dict(node.kwargs)) if is_getitem(node) else _local_call(step, node, parts)
        args, kwargs = fx.node.map_arg((args, kwargs), value.__getitem__)
        value[node] = graph.create_node("call_function", node.target, tuple(args), dict(kwargs))
    ends = [tuple(value[one] for one in nodes) for nodes in (step.body.rows, step.body.next)]
    return (*call.args[:3], print_body(Body(graph, *ends)), *call.args[4:]), dict(call.kwargs)


def _local_call(step: Step, node: fx.Node, parts: Mapping[str, int]) -> Arguments:
    rule, row = step.rules[node]
    sizes = dict(rule.sizes)
    shapes = {i: list(type_.shape) for i, type_ in enumerate(record(node).types) if type_ is not None}
    for name, way in step.ways.items():
        if node in way.names:
            sizes[way.names[node]] //= parts[name]
            for i, shape in shapes.items():
                shape[way.dims[node, i]] //= parts[name]
    return local_call(call_of(node), row, rule, [tuple(shape) for shape in shapes.values()], sizes)


def rows(table: Table) -> Mapping[str, Row]:
    """The row of chains whose steps are made of the ops of a table."""
    known = lru_cache(maxsize=256)(partial(step_of, table))
    return {"autopar.chain.default": Row(lambda call: _chain(call, known), local=lambda pieces: _local(pieces, known))}
