"""Which step a member of a family belongs to, and the members at the ends of a loop, which read other values."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx

from autopar.ir.program import record
from autopar.passes.reroll.families import Family
from autopar.passes.reroll.forms import slots_of
from autopar.passes.reroll.slots import Slot, Slots


def count_anew(family: Family, slots: Slots, loop: Collection[Family] = ()) -> None:
    """Let a family of a loop count its steps as the last of its operands do, and another as the gradients that it
    reads."""
    if family.piece is not None:
        return
    if family.placed is not None:
        _move(family, family.placed, slots)
        return
    read = [slot for slot in slots.of(family) if slot.family is not None and slot.family is not family]
    if family not in loop:
        gradients = [slot for slot in read if slot.family is not None and record(slot.family.sample).is_backward]
        read = gradients or read
    order = slots.families.reading.order
    first, last = (order[family.members[t]] for t in (family.steps[0], family.steps[-1]))
    steps = [slot.by for slot in read]
    by = (max(steps) if first < last else min(steps)) if steps else 0
    if family.steps[0] + by >= 0 and family.steps[-1] + by < family.length:
        _move(family, by, slots)


def _move(family: Family, by: int, slots: Slots) -> None:
    family.members = {t + by: node for t, node in family.members.items()}
    family.placed = None if family.placed is None else family.placed - by
    slots.families.at.update((node, (family, t)) for t, node in family.members.items())


def complete(family: Family, slots: Slots) -> None:
    """Find the member of the first or last step where it reads what a family there comes to by itself, or nothing."""
    if family.piece is not None:
        return
    for t in (family.steps[0] - 1, family.steps[-1] + 1):
        if 0 <= t < family.length:
            found = next(_missing(family, t, slots), None)
            if found is not None:
                family.members = dict(sorted({**family.members, t: found}.items()))
                slots.families.at[found] = family, t


def _missing(family: Family, t: int, slots: Slots) -> Iterator[fx.Node]:
    """The nodes that do in step t what a family does in others. Their operands are those that it would read, if there
    are any."""
    families, reading = slots.families, slots.families.reading
    wanted = [_value(slot, t, slots) for slot in slots.of(family)]
    value = next((value for slot, value in zip(slots.of(family), wanted, strict=True) if slot.family and value), None)
    for user in reading.users.get(value, ()) if value is not None else ():
        is_free = user not in families.at and user not in reading.sums and user not in reading.inner
        if is_free and families.alike(user, t, family):
            operands = [reading.same[one] for one in slots_of(user)]
            if len(operands) == len(wanted) and all(a is b or b is None for a, b in zip(operands, wanted, strict=True)):
                yield user


def _value(slot: Slot, t: int, slots: Slots) -> fx.Node | None:
    """What a slot of a family would read in a step without a member."""
    if slot.family is None:
        return slot.always
    return slot.family.members.get(t + slot.by) or slots.natural(slot.family, t + slot.by)


def drop_ends(family: Family, loop: Collection[Family], slots: Slots) -> None:
    """Leave out the first or last member of a family of a loop where it does not read the value of its own step."""
    for slot in slots.of(family):
        if slot.family in loop and not slot.by:
            for t in slot.others:
                if t in (family.steps[0], family.steps[-1]) and t in family.members:
                    del slots.families.at[family.members.pop(t)]
