"""Identical parts of a graph, found by its structure: they share their decisions.

Colour refinement (Weisfeiler and Leman 1968): calls with equal ops, arguments and types, whose neighbours agree up
to a few steps, are one class. No module is known by name. A stack of identical layers falls into the classes of
its first, inner and last layers, so that their number does not grow with its depth.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

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
