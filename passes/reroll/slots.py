"""What the members of a family read: one value in all steps, the members of a family, or any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import fx

from autopar.passes.reroll.families import Families, Family
from autopar.passes.reroll.step_forms import slots_of

aten = torch.ops.aten
Values = dict[int, fx.Node]  # by step
T = TypeVar("T")
ENDS = 2  # steps of which a slot may read something else


@dataclass(frozen=True, slots=True)
class FamilySlot:
    """One operand of a family. In step t that is `always`, or the member t + `by` of a family, but for `others`."""

    values: Values
    length: int  # how many steps there are
    always: fx.Node | None = None
    family: Family | None = None
    by: int = 0
    others: Values = field(default_factory=dict)

    @property
    def is_listed(self) -> bool:
        """True where the values of the steps have nothing in common."""
        return self.always is None and self.family is None


@dataclass(slots=True)
class Slots:
    """The slots of all families, of which `rolled` are one op each. zeroed: those that must be zero where they have no
    member."""

    families: Families
    rolled: set[Family]
    zeroed: set[Family] = field(default_factory=set)

    def of(self, family: Family) -> list[FamilySlot]:
        """The operands of a family, as they stand in its arguments."""
        return [self._unlike(slot) for slot in self._read(family)]

    def read(self, values: Values) -> FamilySlot:
        """What values of all steps are."""
        return self._unlike(self.slot(values, len(values)))

    def _read(self, family: Family) -> list[FamilySlot]:
        if family.piece is not None:
            return []
        same = self.families.reading.same
        members = {t: [same[one] for one in slots_of(node)] for t, node in family.members.items()}
        count = len(slots_of(family.sample))
        return [self.slot({t: found[i] for t, found in members.items()}, family.length) for i in range(count)]

    def slot(self, values: Values, length: int) -> FamilySlot:
        """What one operand is in all steps."""
        if len(set(values.values())) == 1:
            return FamilySlot(values, length, always=next(iter(values.values())))
        found = {t: self.at(node) for t, node in values.items()}
        counts = Counter((at[0], at[1] - t) for t, at in found.items() if at is not None)
        if not counts:
            return FamilySlot(values, length)
        (family, by), _ = counts.most_common(1)[0]
        others = {t: node for t, node in values.items() if found[t] is None or found[t] != (family, t + by)}
        return (
            FamilySlot(values, length)
            if len(others) > ENDS
            else FamilySlot(values, length, family=family, by=by, others=others)
        )

    def _unlike(self, slot: FamilySlot) -> FamilySlot:
        """A slot without what its family comes to by itself where it has no member."""
        if slot.family is None:
            return slot
        family = slot.family
        others = {t: one for t, one in slot.others.items() if self.natural(family, t + slot.by) is not one}
        return replace(slot, others=others)

    def member(self, family: Family, t: int) -> fx.Node | None:
        """A member of a family, or what it comes to without one."""
        return family.members.get(t) or self.natural(family, t)

    def natural(self, family: Family, t: int) -> fx.Node | None:
        """The value in a step without a member: a sum with what lies before the first step, or after the last, is the
        other value."""
        if family.sample.target is not aten.add.Tensor or t in family.members or not 0 <= t < family.length:
            return None
        slots = self._read(family)
        if len(slots) != 2 or family.sample.kwargs:
            return None
        for zero, other in (slots, slots[::-1]):
            if self._is_nothing(zero, t, 3):
                return other.always if other.family is None else self.member(other.family, t + other.by)
        return None

    def _is_nothing(self, slot: FamilySlot, t: int, depth: int) -> bool:
        """Whether a slot reads, in a step without a member, what lies outside of all steps, or its product."""
        family = slot.family
        if family is None or depth == 0:
            return False
        t += slot.by
        if not 0 <= t < family.length:
            return True
        if family.sample.target is not aten.mul.Tensor or t in family.members:
            return False
        found = any(self._is_nothing(one, t, depth - 1) for one in self._read(family))
        if found:
            self.zeroed.add(family)
        return found

    def at(self, node: fx.Node) -> tuple[Family, int] | None:
        """The family and step of a node, if that family is one op."""
        found = self.families.at.get(node)
        return found if found is not None and found[0] in self.rolled else None


def components(graph: Mapping[T, Collection[T]]) -> list[list[T]]:
    """The strongly connected components of a graph (Tarjan 1972), each after those that it reads."""
    place: dict[T, int] = {}
    low: dict[T, int] = {}
    stack: list[T] = []
    on_stack: set[T] = set()
    components: list[list[T]] = []
    for root in graph:
        if root in place:
            continue
        # A stack of our own instead of recursion: a loop of a thousand steps would be deeper than Python allows.
        work = [(root, iter(graph[root]))]
        place[root] = low[root] = len(place)
        stack.append(root)
        on_stack.add(root)
        while work:
            unit, rest = work[-1]
            step = next((one for one in rest if one not in place or one in on_stack), None)
            if step is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[unit])
                # Nothing below reads something above: all that was pushed since `unit` is one component.
                if low[unit] == place[unit]:
                    at = next(i for i in range(len(stack) - 1, -1, -1) if stack[i] == unit)
                    components.append(stack[at:])
                    on_stack.difference_update(stack[at:])
                    del stack[at:]
            elif step in place:
                low[unit] = min(low[unit], place[step])
            else:
                place[step] = low[step] = len(place)
                stack.append(step)
                on_stack.add(step)
                work.append((step, iter(graph[step])))
    return components
