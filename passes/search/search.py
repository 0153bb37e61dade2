"""The search for one axis: candidates, then the exact choice over classes of identical calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.errors import RuleError
from autopar.ir.program import Input, Program, TensorType, is_getitem, operand_nodes, record
from autopar.passes.rules import Call, Rule, call_of, replicated, rule_of
from autopar.passes.rules.rule import Table
from autopar.passes.search.classes import classify
from autopar.passes.search.costs import BYTES_PER_FLOP, BYTES_PER_SUM, move_cost
from autopar.passes.search.intents import Intent, Role, batch_size
from autopar.passes.search.solve import Edge, Problem, solve
from autopar.passes.search.states import Choice, Split, State, Strategy, choice_at, place, strategies

Entries = Mapping[fx.Node, Input]  # what the placeholders hold

MAX_OUTERS = 4  # candidate sub-splits of one name: more make the search slow, and never were of use


@dataclass(slots=True)
class Item:
    """A class of identical nodes, seen through its first member."""

    node: fx.Node
    count: int
    rule: Rule | None  # None for a placeholder
    types: tuple[TensorType, ...]  # of the tensor results
    sources: tuple[tuple[int, int], ...]  # the classes of the operands, with the index of the result
    has_row: bool = True
    role: Role | None = None
    taken: list[tuple[Choice, int]] = field(default_factory=list)  # choices on earlier axes
    states: list[dict[str, State]] = field(default_factory=list)  # of each result, by axis
    wanted: list[dict[str, State]] = field(default_factory=list)  # of each operand, by axis

    @property
    def is_product(self) -> bool:
        """True for matrix products, convolutions and their weights."""
        return bool(self.rule.flops) if self.rule else self.role is not None and self.role.multiplied


@dataclass(slots=True)
class Classes:
    """A program as classes of identical nodes, with the edges between them."""

    items: list[Item]
    of: dict[fx.Node, int]
    edges: list[tuple[int, int, int, int]]  # (source class, result index, user class, operand position)
    gradients: list[tuple[int, int, int]]  # (source class, result index, parameter class)
    results: list[tuple[int, int]]  # what leaves the program whole: (class, result index)
    of_parameters: set[int]  # the classes computed from parameters alone
    of_batch: set[int]  # the classes computed from the batch
    of_gradients: set[int]  # the classes that are, or add up to, the gradient of a weight


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that computes a tensor, and which of its tensor results it is."""
    if not is_getitem(node):
        return node, 0
    producer, index = node.args
    assert isinstance(producer, fx.Node) and isinstance(index, int)
    return producer, sum(type_ is not None for type_ in record(producer).types[:index])


def build_classes(program: Program, table: Table, pins: Mapping[str, Mapping[str, State]]) -> Classes:
    """Group the nodes; `pins` are the user's layouts of parameters, as states by axis."""
    nodes = [node for node in program.graph.nodes if node.op != "output" and not is_getitem(node)]
    number = {node: i for i, node in enumerate(nodes)}
    entries = dict(zip(program.placeholders, program.inputs, strict=True))
    by_name = {entry.name: node for node, entry in entries.items()}
    sources: list[list[tuple[int, int]]] = []
    for node in nodes:
        operands = operand_nodes(node) if node.op == "call_function" else ()
        sources.append([(number[source], result) for source, result in map(source_of, operands)])
    pairs = [(node, out) for node, out in zip(program.results, program.outputs, strict=True) if node is not None]
    linked = [list(found) for found in sources]
    for node, out in pairs:
        if out.kind == "gradient":  # a parameter's class depends on its gradient's
            source, result = source_of(node)
            linked[number[by_name[out.name]]].append((number[source], result))

    def key(i: int) -> object:
        entry = entries.get(nodes[i])
        if entry is not None:
            pin = pins.get(entry.name)
            return entry.kind, record(nodes[i]).types, tuple(sorted(pin.items(), key=str)) if pin else None
        return _call_key(nodes[i])

    colours = classify(len(nodes), key, linked)
    members: dict[int, list[int]] = {}
    for i, colour in enumerate(colours):
        members.setdefault(colour, []).append(i)
    classes = Classes([], {node: colours[i] for i, node in enumerate(nodes)}, [], [], [], set(), set(), set())
    for colour in range(len(members)):
        first = members[colour][0]
        found = tuple((colours[source], result) for source, result in sources[first])
        classes.items.append(_item(nodes[first], len(members[colour]), found, table))
    edges = {
        (colours[source], result, colours[i], position): None
        for i, operands in enumerate(sources)
        for position, (source, result) in enumerate(operands)
    }
    classes.edges = list(edges)
    for node, out in pairs:
        source, result = source_of(node)
        place_ = (colours[number[source]], result)
        if out.kind == "gradient":
            classes.gradients.append((*place_, colours[number[by_name[out.name]]]))
        else:
            classes.results.append(place_)
    classes.gradients = list(dict.fromkeys(classes.gradients))
    _find_values(classes, nodes, sources, colours, entries)
    _give_roles(classes, entries)
    _find_gradient_values(classes)
    return classes


def _find_values(
    classes: Classes, nodes: list[fx.Node], sources: list[list[tuple[int, int]]], colours: list[int], entries: Entries
) -> None:
    pure: set[int] = set()
    fed: set[int] = set()
    for i, node in enumerate(nodes):
        entry = entries.get(node)
        if entry.kind == "parameter" if entry else bool(sources[i]) and all(s in pure for s, _ in sources[i]):
            pure.add(i)
        if entry.kind == "batch" if entry else any(s in fed for s, _ in sources[i]):
            fed.add(i)
    classes.of_parameters.update(colours[i] for i in pure)
    classes.of_batch.update(colours[i] for i in fed)


def _find_gradient_values(classes: Classes) -> None:
    """From the gradients of weights back through sums and views, to the products that make them."""
    pending = []
    for source, _, parameter in classes.gradients:
        role = classes.items[parameter].role
        assert role is not None
        used = _used(classes, parameter, role)
        if used.multiplied or used.table:
            pending.append(source)
    while pending:
        i = pending.pop()
        rule = classes.items[i].rule
        if i in classes.of_gradients or rule is None:
            continue
        classes.of_gradients.add(i)
        if frozenset(range(len(rule.operands))) in rule.linear:
            pending += [source for source, _ in classes.items[i].sources]


def _call_key(node: fx.Node) -> tuple[object, ...]:
    args = fx.node.map_arg((node.args, dict(node.kwargs)), lambda _: "%")
    return str(node.target), repr(args), record(node).types


def _item(node: fx.Node, count: int, sources: tuple[tuple[int, int], ...], table: Table) -> Item:
    types = tuple(type_ for type_ in record(node).types if type_ is not None)
    rule, has_row = None, True
    if node.op == "call_function":
        call: Call = call_of(node)
        try:
            found = rule_of(call, table)
        except RuleError as error:  # of an op of the user's, called as its patterns do not say
            raise RuleError(f"{error}\nThe call is at {record(node).source}.") from None
        rule, has_row = (found[0], True) if found else (replicated(call), False)
    item = Item(node, count, rule, types, sources, has_row)
    item.states = [{} for _ in types]
    item.wanted = [{} for _ in sources]
    return item


def _give_roles(classes: Classes, entries: Entries) -> None:
    placeholders = [(entries[item.node], item) for item in classes.items if item.rule is None]
    size = batch_size([(entry, item.types[0]) for entry, item in placeholders if item.types])
    for entry, item in placeholders:
        is_batch = bool(item.types and item.types[0].shape and item.types[0].shape[0] == size)
        if item.types:
            item.role = Role(entry, item.types[0], (), is_batch=is_batch)


def search_axis(
    classes: Classes,
    axis: str,
    size: int,
    intent: Intent,
    pins: Mapping[str, Mapping[str, State]],
    sizes: dict[str, int],
) -> bool:
    """Choose a state on `axis` for every value; False if that had to break the intent's prohibitions."""
    options = _options(classes, axis, size, intent, pins, sizes)
    strict = True
    chosen = solve(_problem(classes, options, size, intent, sizes, strict=True))
    if chosen is None:
        strict = False
        chosen = solve(_problem(classes, options, size, intent, sizes, strict=False))
    assert chosen is not None, "every call may run whole, so a plan exists"
    for item, option, index in zip(classes.items, options, chosen[: len(options)], strict=True):
        strategy, _ = option[index]
        for states, state in zip(item.states, strategy.results, strict=True):
            states[axis] = state
        for wanted, state in zip(item.wanted, strategy.operands, strict=True):
            wanted[axis] = state
        if strategy.choice is not None:
            item.taken.append((strategy.choice, size))
    return strict


Options = list[list[tuple[Strategy, float]]]


def _options(
    classes: Classes,
    axis: str,
    size: int,
    intent: Intent,
    pins: Mapping[str, Mapping[str, State]],
    sizes: dict[str, int],
) -> Options:
    candidates = _candidates(classes, intent)
    options: Options = []
    for item, names in zip(classes.items, candidates, strict=True):
        if item.rule is None:
            options.append([])
            continue
        flops = item.rule.flops * BYTES_PER_FLOP * item.count
        found = strategies(item.rule, names, size, tuple(item.taken))
        sums = sum(_bytes(*result, sizes) for result in zip(item.types, item.states, strict=True)) * item.count
        options.append([(one, flops * one.work + BYTES_PER_SUM * sums * one.is_linear) for one in found])
    for i, item in enumerate(classes.items):
        if item.rule is None:
            options[i] = _placeholder_options(classes, i, options, axis, intent, pins)
    return options


def _placeholder_options(
    classes: Classes, i: int, options: Options, axis: str, intent: Intent,
    pins: Mapping[str, Mapping[str, State]],
) -> list[tuple[Strategy, float]]:  # fmt: skip
    item = classes.items[i]
    if item.role is None:
        return [(Strategy((), (None,) * len(item.types)), 0.0)]
    pin = pins.get(item.role.entry.name)
    if pin is not None:
        return [(Strategy((), (pin.get(axis),)), 0.0)]
    common: set[State] | None = None
    for source, _, user, position in classes.edges:
        if source == i:
            accepted = {strategy.operands[position] for strategy, _ in options[user]}
            common = accepted if common is None else common & accepted
    splits = sorted(state for state in common or () if isinstance(state, tuple))
    item.role = replace(_used(classes, i, item.role), splits=tuple(splits))
    return [(Strategy((), (state,)), cost * item.count) for state, cost in intent.states(item.role)]


def _candidates(classes: Classes, intent: Intent) -> list[dict[str, set[int]]]:
    """The splits of each name that are worth a thought: those that spread from what the intent splits.

    They spread along names through calls and along edges between them, both ways, until nothing new is found. A
    compound dim `(c n)` that is split on n is seen by its neighbours at outer = size(c): so the fused weight of a
    chunked projection learns of its sub-split from the attention behind it.
    """
    found: list[dict[str, set[int]]] = [{} for _ in classes.items]
    values: dict[tuple[int, int], set[Split]] = {}
    users: dict[tuple[int, int], list[int]] = {}
    inputs: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    for source, result, user, position in classes.edges:
        users.setdefault((source, result), []).append(user)
        inputs.setdefault(user, []).append((position, (source, result)))
    pending: dict[int, None] = {}
    for i, item in enumerate(classes.items):
        if item.role is not None:
            values[i, 0] = set(intent.seeds(_used(classes, i, item.role)))
            pending.update(dict.fromkeys(users.get((i, 0), ())))
    while pending:
        i = next(iter(pending))
        del pending[i]
        rule = classes.items[i].rule
        assert rule is not None
        sizes = dict(rule.sizes)
        tensors = [(value, rule.operands[position]) for position, value in inputs.get(i, ())]
        tensors += [((i, r), dims) for r, dims in enumerate(rule.results)]
        new = False
        for value, dims in tensors:
            for split in values.get(value, ()):
                choice = choice_at(dims, split, sizes)
                if choice is None or choice[0] in rule.whole:
                    continue
                outers = found[i].setdefault(choice[0], set())
                if choice[1] not in outers and len(outers) < MAX_OUTERS:
                    outers.add(choice[1])
                    new = True
        if not new:
            continue
        for value, dims in tensors:
            known = values.setdefault(value, set())
            for name, outers in found[i].items():
                for outer in outers:
                    placed = place(dims, (name, outer), sizes)
                    if placed is not None and placed not in known:
                        known.add(placed)
                        touched = [value[0], *users.get(value, ())]
                        pending.update(dict.fromkeys(t for t in touched if classes.items[t].rule is not None))
    return found


def _used(classes: Classes, i: int, role: Role) -> Role:
    """The role of a placeholder with what its direct users make of it."""
    multiplied = table = vocabulary = False
    for source, _, user, position in classes.edges:
        if source == i:
            item = classes.items[user]
            assert item.rule is not None
            looked_up = any(item.rule.indexed & set(dim) for dim in item.rule.operands[position])
            multiplied = multiplied or item.rule.flops > 0
            table = table or looked_up
            vocabulary = vocabulary or (looked_up and any(s in classes.of_batch for s, _ in item.sources))
    return replace(role, multiplied=multiplied, table=table, vocabulary=vocabulary)


def _problem(
    classes: Classes, options: Options, size: int, intent: Intent, sizes: dict[str, int], strict: bool
) -> Problem:
    products = frozenset(i for i, item in enumerate(classes.items) if item.is_product)
    problem = Problem([[cost for _, cost in option] for option in options], deciding=products)
    results = [tuple(strategy.results for strategy, _ in option) for option in options]
    operands = [tuple(strategy.operands for strategy, _ in option) for option in options]

    reductions = sum(
        move_cost("sum", None, _bytes(item.types[result], item.states[result], sizes) * item.count, size)
        for item, result in ((classes.items[source], result) for source, result, _ in classes.gradients)
    )

    def add(source: int, result: int, user: int, wanted: tuple[State, ...], to_gradient: bool = False) -> None:
        given = tuple(states[result] for states in results[source])
        item = classes.items[source]
        bytes_ = _bytes(item.types[result], item.states[result], sizes) * item.count
        move = {}
        for s in dict.fromkeys(given):
            for t in dict.fromkeys(wanted):
                factor = _factor(classes, intent, source, s, t, to_gradient) if strict else 1.0
                if factor is not None:
                    more = reductions if strict and intent.is_last_resort(s, t) else 0.0
                    move[s, t] = move_cost(s, t, bytes_, size) * factor + more
        problem.edges.append(Edge((source, result), source, given, user, wanted, move))

    for source, result, user, position in classes.edges:
        add(source, result, user, tuple(states[position] for states in operands[user]))
    for source, result, parameter in classes.gradients:
        add(source, result, parameter, tuple(states[0] for states in results[parameter]), to_gradient=True)
    if classes.results:
        problem.costs.append([0.0])
        for source, result in dict.fromkeys(classes.results):
            add(source, result, len(problem.costs) - 1, (None,))
    return problem


def _factor(
    classes: Classes, intent: Intent, source: int, state: State, target: State, to_gradient: bool
) -> float | None:
    if source in classes.of_gradients:
        return intent.gradient_factor(state, target)
    return intent.factor(state, target, source in classes.of_parameters, to_gradient)


def _bytes(type_: TensorType, states: Mapping[str, State], sizes: Mapping[str, int]) -> float:
    bytes_ = float(type_.bytes_)
    for axis, state in states.items():
        if isinstance(state, tuple):
            bytes_ /= sizes[axis]
    return bytes_


def operations(items: Sequence[Item]) -> int:
    """All matrix operations of the program."""
    return sum(item.rule.flops * item.count for item in items if item.rule)
