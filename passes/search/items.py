"""Describe a program as classes of identical calls: the rule, role and users of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.program import (
    AS_PARAMETER,
    BESIDE,
    CAST,
    Input,
    Program,
    TensorType,
    is_getitem,
    operand_nodes,
    record,
    source_of,
)
from autopar.passes.precision.gradient_terms import gradient_terms, sum_dtype
from autopar.passes.rules import Call, Rule, call_of, replicated_rule, rule_of
from autopar.passes.rules.rule import Table
from autopar.passes.rules.splits import Choice
from autopar.passes.rules.states import State
from autopar.passes.search.intents import BatchDims, Role, batch_dims_of

# Identical parts of a graph, found by its structure: they share their decisions.

ROUNDS = 4


def classify(
    count: int,
    key: Callable[[int], Hashable],
    sources: Sequence[Sequence[tuple[int, int]]],
) -> list[int]:
    """The class of each of `count` items, numbered by first appearance.

    `key(i)` is what an item is by itself; `sources[i]` are its operands as (item, result index), in order.
    """
    users: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    for item, operands in enumerate(sources):
        for position, (source, result) in enumerate(operands):
            users[source].append((item, result, position))
    numbers: dict[Hashable, int] = {}

    def number(value: Hashable) -> int:
        return numbers.setdefault(value, len(numbers))

    colours = [number(("item", key(i))) for i in range(count)]
    for _ in range(ROUNDS):
        colours = [
            number(
                (
                    colours[i],
                    tuple((colours[source], result) for source, result in sources[i]),
                    # A set: a mask that all layers use looks the same however many they are.
                    frozenset((colours[user], result, position) for user, result, position in users[i]),
                )
            )
            for i in range(count)
        ]
    first: dict[int, int] = {}
    return [first.setdefault(colour, len(first)) for colour in colours]


Entries = Mapping[fx.Node, Input]  # what the placeholders hold


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
    of_parameters: set[int]  # the classes computed from parameters alone, or with what no batch feeds
    of_batch: set[int]  # the classes computed from the batch
    of_gradients: set[int]  # the classes that are, or add up to, the gradient of a weight
    beside_once: set[int]  # those of them that are added to what is computed from parameters alone
    of_terms: set[int]  # the classes that the terms of gradients go through, where `sums` is asked for
    casts: set[int]  # the casts among them
    sums: torch.dtype | None = None  # the dtype in which gradients are summed, where it is asked for
    table: Table = field(default_factory=dict)  # of the rules
    notes: tuple[str, ...] = ()  # of the program
    written: list[tuple[int, int, int]] = field(default_factory=list)  # as `gradients`: new values of parameters
    _users: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _indices: frozenset[tuple[int, int]] | None = None

    def is_unlike_sums(self, source: int, result: int, user: int, leaves: bool) -> bool:
        """True for a term of a gradient, (class, result) as a class reads it or as it leaves, in another dtype than
        that of its sums: too short, or with a cast to a shorter one before or behind it."""
        if self.sums is None or not (leaves or user in self.of_terms):
            return False
        dtype = self.items[source].types[result].dtype
        return sum_dtype(dtype, self.sums) != dtype

    def owner_indices(self) -> frozenset[tuple[int, int]]:
        """What tells of rows to which expert they go, (class, result): the indices of products by expert."""
        if self._indices is None:
            owned = [item for item in self.items if item.rule and item.rule.owned and item.rule.flops]
            self._indices = frozenset(item.sources[item.rule.owners_index] for item in owned if item.rule)
        return self._indices

    def is_by_owner(self, i: int) -> bool:
        """True for a call that multiplies or looks up by the expert of each row; any other index sends no rows."""
        rule, sources = self.items[i].rule, self.items[i].sources
        return rule is not None and rule.owned is not None and sources[rule.owners_index] in self.owner_indices()

    def as_parameters(self) -> Iterator[tuple[int, int, int, bool]]:
        """What leaves as a parameter lies: (source class, result index, parameter class, whether it is a gradient)."""
        yield from ((*place, True) for place in self.gradients)
        yield from ((*place, False) for place in dict.fromkeys(self.written))

    def users(self, i: int) -> list[tuple[int, int]]:
        """The classes that use a class, with the position of the operand."""
        if not self._users:
            for source, _, user, position in self.edges:
                self._users.setdefault(source, []).append((user, position))
        return self._users.get(i, [])


def operand_types(node: fx.Node) -> list[TensorType]:
    """The types of a call's tensor operands."""
    return [record(operand).type for operand in operand_nodes(node)]


def build_classes(
    program: Program, table: Table, pins: Mapping[str, Mapping[str, State]], sums: torch.dtype | None = None,
    batch_dims: BatchDims | None = None,
) -> Classes:  # fmt: skip
    """Group the nodes; `pins` are the user's layouts of parameters, as states by axis; `sums`: the shortest dtype in
    which gradients may be summed; batch_dims: as of `Plan`."""
    nodes = [node for node in program.graph.nodes if node.op != "output" and not is_getitem(node)]
    number = {node: i for i, node in enumerate(nodes)}
    entries = dict(program.entries)
    samples = batch_dims_of([(entry, record(node).type) for node, entry in entries.items()], batch_dims)
    by_name = {entry.name: node for node, entry in entries.items()}
    sources: list[list[tuple[int, int]]] = []
    for node in nodes:
        operands = operand_nodes(node) if node.op == "call_function" else ()
        sources.append([(number[source], result) for source, result in map(source_of, operands)])
    pairs = [(node, out) for node, out in program.leaving if node is not None]
    linked = [list(found) for found in sources]
    for node, out in pairs:
        if out.kind in AS_PARAMETER:  # a parameter's class depends on that of its gradient, and of its new value
            source, result = source_of(node)
            linked[number[by_name[out.name]]].append((number[source], result))

    def key(i: int) -> object:
        entry = entries.get(nodes[i])
        if entry is not None:
            pin = pins.get(entry.name)
            dim = samples.get(entry.name) if entry.kind == "batch" else None
            return entry.kind, record(nodes[i]).types, tuple(sorted(pin.items(), key=str)) if pin else None, dim
        return _call_key(nodes[i], table)

    colours = classify(len(nodes), key, linked)
    members: dict[int, list[int]] = {}
    for i, colour in enumerate(colours):
        members.setdefault(colour, []).append(i)
    classes = Classes(
        [],
        {node: colours[i] for i, node in enumerate(nodes)},
        [],
        [],
        [],
        set(),
        set(),
        set(),
        set(),
        set(),
        set(),
        sums,
        table,
        program.notes,
    )
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
        elif out.kind in AS_PARAMETER:
            classes.written.append((*place_, colours[number[by_name[out.name]]]))
        elif out.kind not in BESIDE:  # it is gathered at the end, and decides nothing
            classes.results.append(place_)
    classes.gradients = list(dict.fromkeys(classes.gradients))
    _find_values(classes, nodes, sources, colours, entries)
    _give_roles(classes, entries, samples)
    _find_gradient_values(classes)
    if sums is not None:
        _find_gradient_terms(classes, program, table)
    return classes


def _find_values(
    classes: Classes, nodes: list[fx.Node], sources: list[list[tuple[int, int]]], colours: list[int], entries: Entries,
) -> None:  # fmt: skip
    """What is computed from parameters alone, or element by element from those and what no batch feeds (a mask, a
    scale: the weight of a pruned layer is a weight); and what the batch feeds."""
    pure: set[int] = set()
    fed: set[int] = set()
    for i, node in enumerate(nodes):
        entry = entries.get(node)
        if entry.kind == "batch" if entry else any(s in fed for s, _ in sources[i]):
            fed.add(i)
        elif entry.kind == "parameter" if entry else _is_of_parameters([s in pure for s, _ in sources[i]], node):
            pure.add(i)
    classes.of_parameters.update(colours[i] for i in pure)
    classes.of_batch.update(colours[i] for i in fed)


def _is_of_parameters(are_pure: list[bool], node: fx.Node) -> bool:
    return any(are_pure) and (all(are_pure) or facts_of(node.target).pointwise)


def _find_gradient_values(classes: Classes) -> None:
    """From the gradients of weights back through sums and views, to the products that make them."""
    pending = []
    for source, _, parameter in classes.gradients:
        role = classes.items[parameter].role
        assert role is not None
        used = used_role(classes, parameter, role)
        if used.multiplied or used.table:
            pending.append(source)
    while pending:
        i = pending.pop()
        rule = classes.items[i].rule
        if i in classes.of_gradients or rule is None:
            continue
        classes.of_gradients.add(i)
        if frozenset(range(len(rule.operands))) in rule.linear:
            sources = [source for source, _ in classes.items[i].sources]
            pending += sources
            classes.beside_once.update(() if classes.of_parameters.isdisjoint(sources) else sources)


def _find_gradient_terms(classes: Classes, program: Program, table: Table) -> None:
    """What the terms of gradients go through, and the casts among it."""
    assert classes.sums is not None
    for node in gradient_terms(program, table):
        if is_getitem(node):
            continue
        i = classes.of[node]
        classes.of_terms.add(i)
        if node.target is CAST:
            classes.casts.add(i)


def _call_key(node: fx.Node, table: Table) -> tuple[object, ...]:
    """What decides about a call, apart from its operands; a random op's key does not."""
    row = table.get(str(node.target))
    read = node.args
    if row is not None and row.free_args:
        read = tuple(arg for i, arg in enumerate(node.args) if i not in row.free_args)
    args = fx.node.map_arg((read, dict(node.kwargs)), lambda _: "%")
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
        rule, has_row = (found[0], True) if found else (replicated_rule(call), False)
    item = Item(node, count, rule, types, sources, has_row)
    item.states = [{} for _ in types]
    item.wanted = [{} for _ in sources]
    return item


def _give_roles(classes: Classes, entries: Entries, samples: Mapping[str, int]) -> None:
    for item in classes.items:
        if item.rule is None and item.types:
            entry = entries[item.node]
            dim = samples.get(entry.name) if entry.kind == "batch" else None
            item.role = Role(entry, item.types[0], (), batch_dim=dim)


def used_role(classes: Classes, i: int, role: Role) -> Role:
    """The role of a placeholder with what is made of it."""
    users = classes.users(i)
    lookups = [user for user, position in users if _looks_up(classes, user, position)]
    vocabulary = any(s in classes.of_batch for user in lookups for s, _ in classes.items[user].sources)
    experts = role.entry.kind == "parameter" and _is_of_experts(classes, i)
    return replace(
        role, multiplied=_is_multiplied(classes, i), table=bool(lookups), vocabulary=vocabulary, experts=experts
    )


def _is_of_experts(classes: Classes, i: int) -> bool:
    """True for a parameter of which rows pick their owner's part, as it is or after views; in a program where no row
    does, for the matrices [E, ..] of a product that takes as many parts [E, ..] of the batch."""
    known, pending = {i}, [i]
    while pending:
        for user, position in classes.users(pending.pop()):
            rule = classes.items[user].rule
            is_owner = rule is not None and rule.owned and any(rule.owned[1] in dim for dim in rule.operands[position])
            if is_owner and classes.is_by_owner(user):
                return True
            if not classes.owner_indices() and user in classes.of_batch and _is_batched(rule, position):
                return True
            if user in classes.of_parameters and user not in known:
                known.add(user)
                pending.append(user)
    return False


def _is_batched(rule: Rule | None, position: int) -> bool:
    """True for a product that takes the matrices of an operand with as many parts of the other one."""
    first = rule.operands[position][:1] if rule is not None and rule.flops else ()
    return bool(first) and rule is not None and all(of[:1] == first for of in (*rule.operands, *rule.results))


def _looks_up(classes: Classes, user: int, position: int) -> bool:
    """True for a table; the matrices of experts are multiplied, not read, and their biases follow them."""
    item = classes.items[user]
    assert item.rule is not None
    return (
        not classes.is_by_owner(user)
        and not item.rule.flops
        and any(item.rule.indexed & set(dim) for dim in item.rule.operands[position])
    )


def _is_multiplied(classes: Classes, i: int) -> bool:
    """True if a value is an operand of a matrix product, as it is or after a view, picked by an index (as experts are),
    or after what is computed of parameters alone (a weight that is standardised, or made of a norm and a direction)."""
    known, pending = {i}, [i]
    while pending:
        for user, position in classes.users(pending.pop()):
            item = classes.items[user]
            assert item.rule is not None
            if item.rule.flops:
                return True
            picks = position == 0 and all(not type_.dtype.is_floating_point for type_ in operand_types(item.node)[1:])
            follows = (picks and frozenset({0}) in item.rule.linear) or user not in classes.of_batch
            if follows and user not in known:
                known.add(user)
                pending.append(user)
    return False


def operations(items: Sequence[Item]) -> int:
    """All matrix operations of the program."""
    return sum(item.rule.flops * item.count for item in items if item.rule)
