"""Families: the nodes that do the same in each step of a loop.

They grow from the rows of a value: where what reads row t does for (almost) every t the same, those readers are a
family, and so are in turn theirs. Which operands belong together is asked later (`slots.py`): a wrong pair is a slower
program, never another one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.program import record
from autopar.passes.reroll.reading import Reading, RowPiece

aten = torch.ops.aten
PLACED = (aten.select_backward.default, aten.slice_backward.default)  # rows among zeros; their index is args[3]
ByStep = dict[int, list[fx.Node]]


@dataclass(eq=False, slots=True)
class Family:
    """Nodes that do the same, by their step. piece: of the rows of a value (that of one of them). placed: each puts its
    operand at the row `t + placed` of zeros."""

    length: int
    members: dict[int, fx.Node]
    piece: RowPiece | None = None
    placed: int | None = None

    @property
    def sample(self) -> fx.Node:
        """A member of the middle, which does what all do."""
        return self.members[sorted(self.members)[len(self.members) // 2]]

    @property
    def steps(self) -> range:
        return range(min(self.members), max(self.members) + 1)

    @property
    def is_full(self) -> bool:
        return len(self.members) == self.length


class Families:
    """All families of a program. at: of each member its family and step."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.all: list[Family] = []
        self.at: dict[fx.Node, tuple[Family, int]] = {}
        for rows in reading.seeds():
            piece = reading.pieces[next(iter(rows.values()))]
            self._add(Family(piece.length, dict(sorted(rows.items())), piece))
        for family in self.all:  # which grows
            self._add_readers(family)

    def _add(self, family: Family) -> None:
        self.all.append(family)
        self.at.update((node, (family, t)) for t, node in family.members.items())

    def _add_readers(self, family: Family) -> None:
        """Find the families of what reads a family: first by all that is known of their operands, then by less."""
        groups: dict[Any, ByStep] = {}
        for t, node in family.members.items():
            for user in self.reading.users.get(node, ()):
                if user not in self.at and not self._collects(user, family.length):
                    groups.setdefault(self._signature(user, family, t), {}).setdefault(t, []).append(user)
        rest: dict[Any, ByStep] = {}
        for (coarse, _), by_step in groups.items():
            self._add_equal(family.length, coarse, by_step)
            for t, users in by_step.items():
                rest.setdefault(coarse, {}).setdefault(t, []).extend(user for user in users if user not in self.at)
        for coarse, by_step in rest.items():
            self._add_equal(family.length, coarse, by_step)

    def _add_equal(self, length: int, coarse: Any, by_step: ByStep) -> None:
        """Add the families of users with equal signatures: the first of each step, the second, and so on."""
        counts = Counter(len(users) for users in by_step.values() if users)
        count = counts.most_common(1)[0][0] if counts else 0
        for j in range(count):
            members = {t: users[j] for t, users in sorted(by_step.items()) if len(users) == count}
            family = Family(length, members, placed=coarse[1])
            is_new = not any(node in self.at for node in members.values())
            if is_new and len(members) >= length - 2 and len(family.steps) == len(members):
                self._add(family)

    def _collects(self, user: fx.Node, length: int) -> bool:
        """True for what reads a value of each step."""
        reading = self.reading
        is_one = user in reading.inner or user in reading.sums or user in reading.written
        return is_one or user.op != "call_function" or len(user.all_input_nodes) >= max(length - 2, 3)

    def alike(self, user: fx.Node, t: int, family: Family) -> bool:
        """Whether a node does in step t what a family does in others, but for what it reads."""
        placed = placed_at(user, family.length)
        if (None if placed is None else placed - t) != family.placed:
            return False
        sample, args = family.sample, slice(0, 3 if placed is not None else None)
        known = [
            (self._plain((one.args[args], one.kwargs)), record(one).types, record(one).is_backward)
            for one in (user, sample)
        ]
        return user.target is sample.target and known[0] == known[1]

    def _plain(self, args: Any) -> Any:
        """Arguments without operands."""
        return fx.node.map_arg(args, lambda _: None)

    def _signature(self, user: fx.Node, family: Family, t: int) -> Any:
        """What a user does with row t of a family: (op, place among zeros, arguments, type), and what else it reads."""
        others: list[Any] = []

        def token(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return tuple(map(token, value))
            if not isinstance(value, fx.Node):
                return type(value), value
            operand = self.reading.same[value]
            found = self.at.get(operand)
            if found is not None and found[0] is family:
                return found[1] - t
            others.append(self._known(operand, found, family.length, t))
            return None

        args, placed = user.args, placed_at(user, family.length)
        if placed is not None:
            args = args[:3]
        known = token(args), token(tuple(sorted(user.kwargs.items())))
        coarse = (
            user.target,
            None if placed is None else placed - t,
            known,
            record(user).types,
            record(user).is_backward,
        )
        return coarse, tuple(others)

    def _known(self, operand: fx.Node, found: tuple[Family, int] | None, length: int, t: int) -> Any:
        if found is not None:
            return id(found[0]), found[1] - t
        if operand.op == "placeholder" or len(self.reading.users.get(operand, ())) >= length - 2:
            return operand
        return operand.target, record(operand).types


def placed_at(node: fx.Node, length: int) -> int | None:
    """The index of the row of so many that a node puts among zeros."""
    if node.target not in PLACED:
        return None
    sizes: Any = node.args[1]
    dim, start, *rest = node.args[2:]
    assert isinstance(dim, int) and isinstance(start, int)
    is_row = not rest or (isinstance(rest[0], int) and rest[0] == start + 1)
    return start % length if is_row and sizes[dim] == length else None
