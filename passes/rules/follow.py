"""Follow rows of one value through a graph: which values have them, and where a call is in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.program import TensorType, operand_nodes, record, source_of
from autopar.passes.rules.splits import Split
from autopar.passes.rules.through import Through

Value = tuple[fx.Node, int]  # a call or placeholder, and which of its tensor results


@dataclass(frozen=True, slots=True)
class Followed:
    """Where the rows are.

    places: of each value that has them. calls: those that let them through. closed: those that do not, with what is in
    the way. torn: the values that would have them at two places.
    """

    places: dict[Value, Split] = field(default_factory=dict)
    calls: dict[fx.Node, Through] = field(default_factory=dict)
    closed: dict[fx.Node, str] = field(default_factory=dict)
    torn: set[Value] = field(default_factory=set)

    def at(self, node: fx.Node) -> Split | None:
        """Where a tensor has the rows; None if it has none."""
        return self.places.get(source_of(node))


def follow(
    seeds: Mapping[Value, Split],
    step: Callable[[fx.Node, Mapping[int, Split]], Through | str],
    readers: Callable[[Value], Iterable[fx.Node]],
    *,
    is_end: Callable[[fx.Node, Followed], bool] = lambda node, found: False,
    twins: Iterable[tuple[Value, Value]] = (),
) -> Followed:
    """Follow rows from some values to all that reads them, and back to all that they are made of.

    step: how a call treats rows that some of its tensors (operands, then results) have, or what is in the way. is_end:
    the calls that are not looked at, by what is known when it is their turn; what becomes of them is the caller's
    matter. twins: pairs of values that have the rows at the same place though no call says so.
    """
    followed, pending = Followed(), dict[fx.Node, None]()
    pairs = list(twins)

    def locate(value: Value, at: Split) -> None:
        """Note where a value has the rows: what makes it and what reads it is looked at, again where it was before."""
        if value in followed.places:
            if followed.places[value] != at:
                followed.torn.add(value)
            return
        followed.places[value] = at
        pending.update(dict.fromkeys(one for one in (value[0], *readers(value)) if one.op == "call_function"))
        for one, other in pairs:
            if value in (one, other):
                locate(other if value == one else one, at)

    for value, at in seeds.items():
        locate(value, at)
    while pending and not followed.torn:
        node = next(iter(pending))
        del pending[node]
        if node in followed.closed or is_end(node, followed):
            continue
        # A call is asked again whenever one more of its tensors has rows: what it said before is then forgotten.
        values = tensors_of(node)
        way = step(node, {i: followed.places[value] for i, value in enumerate(values) if value in followed.places})
        if isinstance(way, str):
            followed.closed[node] = way
            followed.calls.pop(node, None)
            continue
        followed.calls[node] = way
        for value, at_ in zip(values, (*way.operands, *way.results), strict=True):
            if at_ is not None:
                locate(value, at_)
    return followed


def readers(value: Value) -> list[fx.Node]:
    """The nodes that read a value, by its node or by what picks it out of several results."""
    node = value[0]
    if not record(node).several:
        return list(node.users)
    return [reader for user in node.users if source_of(user) == value for reader in user.users]


def tensors_of(call: fx.Node) -> list[Value]:
    """The operands of a call, then its results."""
    count = sum(type_ is not None for type_ in record(call).types)
    return [*map(source_of, operand_nodes(call)), *((call, i) for i in range(count))]


def type_of(value: Value) -> TensorType:
    """The type of a value."""
    return [type_ for type_ in record(value[0]).types if type_ is not None][value[1]]
