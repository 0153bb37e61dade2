"""Which step a member of a family belongs to, and the members at the ends of a loop, which read other values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from torch import fx

from autopar.ir.program import record
from autopar.passes.reroll.families import Family
from autopar.passes.reroll.slots import FamilySlot, Slots
from autopar.passes.reroll.step_forms import slots_of

# none, those that lie outside of all steps (start: as the only operands that differ), or all that have no member
Free = Literal["none", "outside", "start", "any"]


def count_anew(family: Family, slots: Slots) -> None:
    """Let a family of a loop count its steps as the last of its operands do."""
    if family.piece is None:
        read = [slot for slot in slots.of(family) if slot.family is not None and slot.family is not family]
        _move(family, _away(family, read, slots), slots)


def is_miscounted(loop: Collection[Family], slots: Slots) -> bool:
    """True if a family of a loop reads, as it is counted, one of another step than its own and that before it."""
    order = slots.families.reading.order
    for family in loop:
        before = -1 if _ends(family, order)[1] else 1
        if any(slot.family in loop and slot.by not in (0, before) for slot in slots.of(family)):
            return True
    return False


def count_in_order(loop: Collection[Family], slots: Slots) -> None:
    """Let the families of a loop count their steps as the program does: a step begins where the first family that has
    a member in each has its own. So none reads what comes after it."""
    order = slots.families.reading.order
    places = {family: sorted(map(order.__getitem__, family.members.values())) for family in loop}
    longest = max(len(family.members) for family in loop)
    first = min((family for family in loop if len(family.members) == longest), key=lambda family: places[family][0])
    start, forwards = _ends(first, order)
    for family in loop:
        number = bisect_right(places[first], places[family][0]) - 1
        own, is_alike = _ends(family, order)
        if family.piece is None and is_alike == forwards:
            _move(family, start + (number if forwards else -number) - own, slots)


def _ends(family: Family, order: Mapping[fx.Node, int]) -> tuple[int, bool]:
    """The step that comes first, and whether the others are counted upwards from it."""
    first, last = (order[family.members[t]] for t in (family.steps[0], family.steps[-1]))
    return (family.steps[0], True) if first < last else (family.steps[-1], False)


def complete(family: Family, slots: Slots, is_fixed: bool, free: Free) -> None:
    """Find the members of the first and last steps. is_fixed: its steps are those of a loop; else they may be those of
    the gradients that it reads, or of the places among zeros that it fills. free: which of its
    operands may be a value of no family."""
    if family.piece is not None:
        return
    if family.placed:
        _move(family, family.placed, slots)
    _fill(family, slots, free)
    if is_fixed or family.placed is not None or family.is_full:
        return
    own = dict(family.members)
    gradients = [slot for slot in slots.of(family) if slot.family and record(slot.family.sample).is_backward]
    away = _away(family, gradients, slots)
    for by in range(1, abs(away) + 1):
        _move(family, by if away > 0 else -by, slots)
        _fill(family, slots, free)
        if family.is_full:
            return
        for node in family.members.values():
            del slots.families.at[node]
        family.members = own
        _move(family, 0, slots)


def _away(family: Family, read: Collection[FamilySlot], slots: Slots) -> int:
    """By how many steps a family is away from what it reads last, in the order in which its members stand."""
    order = slots.families.reading.order
    first, last = (order[family.members[t]] for t in (family.steps[0], family.steps[-1]))
    steps = [slot.by for slot in read] or [0]
    return max(steps) if first < last else min(steps)


def _move(family: Family, by: int, slots: Slots) -> bool:
    """Count the steps of a family from another one on, if none falls out; false if they stay as they were."""
    if family.steps[0] + by < 0 or family.steps[-1] + by >= family.length:
        by = 0
    family.members = {t + by: node for t, node in family.members.items()}
    family.placed = None if family.placed is None else family.placed - by
    slots.families.at.update((node, (family, t)) for t, node in family.members.items())
    return by != 0


def _fill(family: Family, slots: Slots, free: Free) -> None:
    for t in (family.steps[0] - 1, family.steps[-1] + 1):
        found = next(_missing(family, t, slots, free), None) if 0 <= t < family.length else None
        if found is not None:
            family.members = dict(sorted({**family.members, t: found}.items()))
            slots.families.at[found] = family, t


def _missing(family: Family, t: int, slots: Slots, free: Free) -> Iterator[fx.Node]:
    """The nodes that do in step t what a family does in others."""
    families, reading = slots.families, slots.families.reading
    read = slots.of(family)
    wanted = [_value(slot, t, slots) for slot in read]
    if any(one is None and not _is_free(slot, t, free) for slot, one in zip(read, wanted, strict=True)):
        return
    value = next((value for slot, value in zip(read, wanted, strict=True) if slot.family and value), None)
    if value is None and free == "start":
        value = next(filter(None, wanted), None)
    for user in reading.users.get(value, ()) if value is not None else ():
        is_free = user not in families.at and user not in reading.sums and user not in reading.inner
        if is_free and families.alike(user, t, family):
            operands = [reading.same[one] for one in slots_of(user)]
            pairs = zip(operands, wanted, strict=True) if len(operands) == len(wanted) else ()
            if pairs and all(a is b if b is not None else a not in families.at for a, b in pairs):
                yield user


def _is_free(slot: FamilySlot, t: int, free: Free) -> bool:
    """Whether a slot may read a value of no family where its own family has none."""
    is_outside = slot.family is not None and not 0 <= t + slot.by < slot.family.length
    return free == "any" or (free in ("outside", "start") and is_outside)


def _value(slot: FamilySlot, t: int, slots: Slots) -> fx.Node | None:
    """What a slot of a family would read in a step without a member."""
    if slot.family is None:
        return slot.always
    return slots.member(slot.family, t + slot.by)


def count_as_rows(loop: Collection[Family], slots: Slots) -> None:
    """Let what reads rows of the next step be of that step, with all that hangs on it."""
    read = {family: [slot for slot in slots.of(family) if slot.family is not None] for family in loop}
    steps = {slot.by for found in read.values() for slot in found if slot.family in loop} - {0}
    if len(steps) != 1 or not steps <= {1, -1}:
        return
    (by,) = steps
    group: dict[Family, None] = {}
    for family in loop:
        rows = [slot.by for slot in read[family] if slot.family not in loop]
        if _has_room(family, by) and rows.count(-by) > rows.count(0):
            group[family] = None
    for family in (queue := list(group)):
        found = [one for one in loop if one not in group and any(_is_now(slot, family) for slot in read[one])]
        group.update(dict.fromkeys(found))
        queue += found
    if all(_has_room(family, by) for family in group):
        for family in group:
            _move(family, -by, slots)


def _has_room(family: Family, by: int) -> bool:
    """True if the members of a family may be of the next step each."""
    return family.piece is None and (family.steps[-1] < family.length - 1 if by < 0 else family.steps[0] > 0)


def _is_now(slot: FamilySlot, family: Family) -> bool:
    return slot.family is family and not slot.by


def start_sooner(loop: Collection[Family], slots: Slots) -> None:
    """Let what a loop computes for its next step alone be of that step, if the first one has it, too: of what stands
    before the loop (a product of zeros)."""
    read = {family: [slot for slot in slots.of(family) if slot.family in loop] for family in loop}
    steps = {slot.by for found in read.values() for slot in found} - {0}
    if len(steps) != 1 or not steps <= {1, -1}:
        return
    (by,) = steps
    group = {family for family in loop if _lacks_last(family, by)}
    count = -1
    while count != len(group):
        count = len(group)
        read_now = {slot.family for family in loop if family not in group for slot in read[family] if not slot.by}
        group -= read_now  # type: ignore[arg-type]
    before = {family: family.members for family in group}
    for family in group:
        _move(family, -by, slots)
    for _ in group:
        for family in group:
            _fill(family, slots, "start")
    if not all(family.is_full for family in group):
        _restore(before, slots)


def _lacks_last(family: Family, by: int) -> bool:
    """True if a family has a member in all steps but the one that comes last."""
    is_first = family.steps[0] == 0 if by < 0 else family.steps[-1] == family.length - 1
    return is_first and len(family.members) == family.length - 1 and not family.piece and family.placed is None


def _restore(before: Mapping[Family, dict[int, fx.Node]], slots: Slots) -> None:
    for family, members in before.items():
        for node in family.members.values():
            del slots.families.at[node]
        family.members = members
        slots.families.at.update((node, (family, t)) for t, node in members.items())


def drop_ends(family: Family, loop: Collection[Family], slots: Slots) -> None:
    """Leave out the first or last member of a family of a loop where it does not read the value of its own step."""
    for slot in slots.of(family):
        if slot.family in loop and not slot.by:
            for t in slot.others:
                if t in (family.steps[0], family.steps[-1]) and t in family.members:
                    del slots.families.at[family.members.pop(t)]
