"""What is to be chosen: the strategies of items, and the moves of values between them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Problem:
    """Items with strategies, and edges between their ports.

    `costs[i][s]`: the cost of strategy s of item i. An edge joins port states: `source_states[s]` is the state that
    the source's strategy s gives, `user_states[t]` the one that the user's strategy t wants; `move` maps pairs to
    their cost (a pair that is missing is impossible). No cost is negative. `deciding`: the items that most others
    follow. `shared`: those of which a choice binds many others that do not touch, the first most.
    """

    costs: list[Sequence[float]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    deciding: frozenset[int] = frozenset()
    shared: tuple[int, ...] = ()

    def content(self) -> Hashable:
        """All that decides the answer: problems that have the same are one. Values are known by their order alone, so
        that no node of a program lives as long as this does."""
        values: dict[Hashable, int] = {}
        edges = [
            (
                values.setdefault(edge.value, len(values)), edge.source, edge.source_states, edge.user,
                edge.user_states, frozenset(edge.move.items()),
            )
            for edge in self.edges
        ]  # fmt: skip
        return tuple(map(tuple, self.costs)), tuple(edges), self.deciding, self.shared

    def neighbours(self) -> list[list[int]]:
        """The items that share an edge with each item."""
        found: list[dict[int, None]] = [{} for _ in self.costs]
        for edge in self.edges:
            found[edge.source][edge.user] = found[edge.user][edge.source] = None
        return [list(items) for items in found]


@dataclass(frozen=True, slots=True)
class Edge:
    """A use of a value: `user` reads what `source` makes (indices of items).

    source_states, user_states: by strategy of each, the state that is given or wanted. move: the cost of each pair of
    states; a pair that is missing is impossible. value: edges of one value, which one port makes, share their moves.
    """

    value: Hashable
    source: int
    source_states: tuple[Hashable, ...]
    user: int
    user_states: tuple[Hashable, ...]
    move: Mapping[Any, float]


def nearest(neighbours: Sequence[Sequence[int]], seeds: Sequence[Collection[int]]) -> list[int]:
    """For each item the index of the seeds that the fewest edges part it from; -1 where none leads to it."""
    owner = [-1] * len(neighbours)
    reached = [item for group in seeds for item in group]
    for index, group in enumerate(seeds):
        for item in group:
            owner[item] = index
    for item in reached:  # it grows on the way
        for other in neighbours[item]:
            if owner[other] < 0:
                owner[other] = owner[item]
                reached.append(other)
    return owner


def connected(neighbours: Sequence[Sequence[int]], items: Collection[int]) -> list[list[int]]:
    """Groups of items, such that no edge joins two of them."""
    left, groups = set(items), []
    for first in sorted(items):
        if first not in left:
            continue
        left.discard(first)
        group = [first]
        for item in group:  # it grows on the way
            found = [other for other in neighbours[item] if other in left]
            left.difference_update(found)
            group += found
        groups.append(group)
    return groups


def within(neighbours: Sequence[Sequence[int]], items: Collection[int], reach: int) -> set[int]:
    """The items that so many edges lead to."""
    found, edge = set(items), set(items)
    for _ in range(reach):
        edge = {other for item in edge for other in neighbours[item]} - found
        found |= edge
    return found
