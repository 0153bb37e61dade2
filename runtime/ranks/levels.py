"""All ranks in groups of few, level over level: none has connections to all others.

A group of Gloo connects each of its ranks with every other one: 16,383 sockets a process on 16,384 ranks. Here the
ranks of a node meet, the first ones of some nodes, the first ones of these: what is said goes up and comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from autopar.runtime.ranks.process_groups import Known, default_group

T = TypeVar("T")
NODE, NODES = 8, 24  # ranks that meet first, and groups whose first ranks meet next: 49 connections of 16,384


@dataclass(frozen=True, slots=True)
class MeetingGroup:
    """A group of this rank. first: its first rank, which speaks for it in the next level. is_last: of all levels."""

    group: Known
    first: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Levels:
    """The groups of this rank, from that of its node on: of the first ranks of groups one more."""

    levels: tuple[MeetingGroup, ...]

    @classmethod
    def all_direct(cls) -> Self:
        """All ranks in one group, torch's default."""
        return cls((MeetingGroup(default_group, 0, True),))

    @classmethod
    def of(cls, size: int, make: Callable[[list[int]], Known | None], node: int = NODE, nodes: int = NODES) -> Self:
        """make: a group of some ranks, None for a rank that is none of them. Every rank must call this."""
        levels = []
        for groups in levels_of(size, node, nodes):
            for members in groups:
                made = make(members)
                if made is not None:
                    levels.append(MeetingGroup(made, members[0], len(groups) == 1))
        return cls(tuple(levels))

    @property
    def groups(self) -> tuple[Known, ...]:
        """What gives these groups."""
        return tuple(level.group for level in self.levels)

    def highest(self, numbers: torch.Tensor) -> None:
        """Put the highest of each number over all ranks in its place. Every rank must call this."""
        for level in self.levels:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=level.group())
        for level in self._down():
            dist.broadcast(numbers, level.first, group=level.group())

    def everyone(self, mine: T) -> list[T]:
        """What each rank says, by rank. Every rank must call this."""
        said = [mine]
        for level in self.levels:
            parts: list[Any] = [None] * level.group().size()
            dist.all_gather_object(parts, said, group=level.group())
            said = [one for part in parts for one in part]
        for level in self._down():
            dist.broadcast_object_list(box := [said], level.first, group=level.group())
            said = box[0]
        return said

    def of_first(self, mine: T) -> T:
        """What rank 0 says, which is all that is sent. Every rank must call this."""
        box = [mine]
        for level in reversed(self.levels):
            dist.broadcast_object_list(box, level.first, group=level.group())
        return box[0]

    def _down(self) -> list[MeetingGroup]:
        """The groups that wait for what their first rank has learned in the others, the last one first."""
        return [level for level in reversed(self.levels) if not level.is_last]


def levels_of(size: int, node: int = NODE, nodes: int = NODES) -> list[list[list[int]]]:
    """The groups of each level: of ranks one behind the other, then of the first ones of these, until one is left."""
    ranks, width, levels = list(range(size)), node, list[list[list[int]]]()
    while not levels or len(levels[-1]) > 1:
        levels.append([ranks[i : i + width] for i in range(0, len(ranks), width)])
        ranks, width = [group[0] for group in levels[-1]], nodes
    return levels
