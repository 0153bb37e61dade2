"""Carried states of any kind: the families that hang on each other over the steps, in the order of one step."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import fx

from autopar.ir.ops.ops import NAMESPACE, semantic_of
from autopar.ir.program import is_getitem, record
from autopar.passes.reroll.families import Family
from autopar.passes.reroll.slots import FamilySlot, Slots, components


@dataclass(frozen=True, eq=False, slots=True)
class Chain:
    """A loop that stays one. families: what a step computes, in order. by: where the step before lies: -1, or 1 from
    the end."""

    families: tuple[Family, ...]
    by: int

    @property
    def length(self) -> int:
        return self.families[0].length

    @property
    def first(self) -> int:
        """The step that comes first."""
        return 0 if self.by < 0 else self.length - 1


def chain_of(families: Collection[Family], slots: Slots) -> Chain | None:
    """The chain that families which hang on each other make; None where a step reads more than the one before it."""
    order = slots.families.reading.order
    found = {*families, *_items(families, slots)}
    inside = dict.fromkeys(sorted(found, key=lambda family: order[family.sample]))
    read = {family: [slot for slot in slots.of(family) if slot.family in inside] for family in inside}
    steps = {slot.by for found in read.values() for slot in found} - {0}
    lengths = {family.length for family in inside}
    if len(steps) != 1 or len(lengths) != 1 or not steps <= {1, -1} or not all(map(_is_plain, inside)):
        return None
    own = {family: [slot.family for slot in found if not slot.by and slot.family] for family, found in read.items()}
    parts = components(own)
    is_ordered = all(len(one) == 1 and one[0] not in own[one[0]] for one in parts)
    is_fed = any(slot.always is None and slot.family not in inside for one in inside for slot in slots.of(one))
    is_right = all(_is_carried(slot, slots, inside) for found in read.values() for slot in found)
    if not is_ordered or not is_fed or not is_right or not all(_is_taken_apart(one, slots, inside) for one in inside):
        return None
    return Chain(tuple(one for (one,) in parts), steps.pop())


def _items(families: Iterable[Family], slots: Slots) -> Iterable[Family]:
    """The families of single results of what has several: nothing carries these together."""
    for family in families:
        if record(family.sample).several:
            users = {user for node in family.members.values() for user in slots.families.reading.users.get(node, ())}
            yield from {at[0]: None for user in users if is_getitem(user) and (at := slots.at(user)) is not None}


def _is_taken_apart(family: Family, slots: Slots, inside: Collection[Family]) -> bool:
    """Whether all that reads several results of one op is part of the step."""
    if not record(family.sample).several:
        return True
    users = [user for node in family.members.values() for user in slots.families.reading.users.get(node, ())]
    return all((at := slots.at(user)) is not None and at[0] in inside for user in users)


def _is_plain(family: Family) -> bool:
    """True for an op that a step may hold: of aten or our own, and with nothing drawn."""
    node, semantic = family.sample, semantic_of(family.sample.target)
    is_known = is_getitem(node) or getattr(node.target, "namespace", "") in ("aten", NAMESPACE)
    return is_known and family.piece is None and family.placed is None and not (semantic and semantic.random)


def _is_carried(slot: FamilySlot, slots: Slots, inside: Collection[Family]) -> bool:
    """Whether what a slot reads elsewhere in some step lies outside, in the type of the value that it stands for."""
    assert slot.family is not None
    type_ = record(slot.family.sample).types
    if not slot.by and not slot.others:
        return True
    is_outside = all((at := slots.at(one)) is None or at[0] not in inside for one in slot.others.values())
    is_alike = all(record(one).types == type_ for one in slot.others.values())
    return is_outside and is_alike and not record(slot.family.sample).several


def outputs_of(chain: Chain, slots: Slots) -> tuple[Family, ...]:
    """The families that something outside of a chain reads."""
    reading, own = slots.families.reading, {node for one in chain.families for node in one.members.values()}

    def is_read(node: fx.Node) -> bool:
        return any(user not in own for user in reading.users.get(node, ()))

    return tuple(one for one in chain.families if any(map(is_read, one.members.values())))
