"""Which families become one op each, and which carried states a recurrence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.program import record
from autopar.passes.reroll.chain_steps import Chain, chain_of
from autopar.passes.reroll.families import Families, Family
from autopar.passes.reroll.loop_states import Recurrence, recurrence_of
from autopar.passes.reroll.reading import Reading
from autopar.passes.reroll.slots import FamilySlot, Slots, components
from autopar.passes.reroll.step_forms import form_of
from autopar.passes.reroll.steps import (
    Free,
    complete,
    count_anew,
    count_as_rows,
    count_in_order,
    drop_ends,
    is_miscounted,
    start_sooner,
)
from autopar.passes.rules.rule import Table

aten = torch.ops.aten
Unit = Family | fx.Node
ROUNDS = 3  # in which steps are counted anew, and ends that differ fall off
COUNTS = 2  # what is found of a loop when its steps are counted may be more of it


@dataclass(slots=True)
class Chosen:
    """What is rolled up. states: the recurrences by the family of their state; chains: those of another kind by each of
    their families; sums: of additions the families of which
    they add all members; collected: of what joins or writes a value of each step those values; rows: the members that
    something else reads."""

    reading: Reading
    slots: Slots
    table: Table
    states: dict[Family, Recurrence] = field(default_factory=dict)
    chains: dict[Family, Chain] = field(default_factory=dict)
    sums: dict[fx.Node, list[Family]] = field(default_factory=dict)
    collected: dict[fx.Node, tuple[int, FamilySlot]] = field(default_factory=dict)
    rows: dict[Family, set[int]] = field(default_factory=dict)

    @property
    def is_worth_it(self) -> bool:
        """Whether more than rows of a value is collected, or carried."""
        read = [one for found in self.sums.values() for one in found]
        read += [slot.family for _, slot in self.collected.values() if slot.family is not None]
        return bool(self.states or self.chains) or any(one.piece is None for one in read)

    def unit(self, node: fx.Node) -> Unit:
        """The family that stands for a node, or the node."""
        found = self.slots.at(self.reading.same[node])
        return found[0] if found is not None else self.reading.same[node]


def choose(families: Families, table: Table) -> Chosen:
    """What of a program is rolled up."""
    chosen = Chosen(families.reading, Slots(families, set(families.all)), table)
    _order_steps(chosen)
    _find_states(chosen)
    _drop_split(chosen)
    _find_collected(chosen)
    placed = [family for family in chosen.slots.rolled if family.placed is not None]
    lost = [family for family in placed if not _is_summed(family, chosen)]
    if lost:
        chosen.slots.rolled.difference_update(lost)
        chosen.sums.clear()
        chosen.collected.clear()
        _find_collected(chosen)
    _find_rows(chosen)
    return chosen


def _find_states(chosen: Chosen) -> None:
    """Find what is carried. What has no form for all steps at once stays in one by one, or is part of a chain."""
    rolled, inside = chosen.slots.rolled, {one for loop in _loops(chosen) for one in loop}
    rolled -= {family for family in rolled if family not in inside and not _has_form(family, chosen)}
    while False in [_is_state(loop, chosen) for loop in _loops(chosen)]:
        chosen.states.clear()
        chosen.chains.clear()


def _is_state(loop: list[Unit], chosen: Chosen) -> bool:
    """Note the recurrence or the chain that a loop is; if it is none, it has fewer families from then on."""
    inside = [one for one in loop if isinstance(one, Family)]
    formless = {family for family in inside if not _has_form(family, chosen)}
    is_whole = len(inside) == len(loop)
    state = recurrence_of(inside, chosen.slots) if is_whole and not formless else None
    chain = chain_of(inside, chosen.slots) if is_whole and state is None else None
    if state is not None:
        chosen.states[state.state] = state
    elif chain is not None:
        chosen.chains.update(dict.fromkeys(chain.families, chain))
    else:
        chosen.slots.rolled.difference_update(formless or inside)
    return state is not None or chain is not None or not inside


def _drop_split(chosen: Chosen) -> None:
    """Leave out what reads several results of nodes that stay, or of another step: none stacks or moves them."""
    rolled, count = chosen.slots.rolled, -1
    while count != len(rolled):
        count = len(rolled)
        lost = {family for family in rolled if any(map(_is_split, chosen.slots.of(family)))}
        broken = {chain for family, chain in chosen.chains.items() if family in lost or family not in rolled}
        lost.update(family for chain in broken for family in chain.families)
        rolled.difference_update(lost)
        chosen.chains = {family: chain for family, chain in chosen.chains.items() if family not in lost}


def _is_split(slot: FamilySlot) -> bool:
    is_own = slot.always is not None or (slot.family is not None and not slot.by and not slot.others)
    return not is_own and any(record(value).several for value in slot.values.values())


def _order_steps(chosen: Chosen) -> None:
    """Settle which step is which, and what belongs to the first and the last."""
    slots, order = chosen.slots, chosen.reading.order
    families = sorted(slots.families.all, key=lambda one: min(map(order.__getitem__, one.members.values())))
    for loop in _families_in_loops(chosen):
        for _ in range(ROUNDS):
            for family in families:
                if family in loop:
                    count_anew(family, slots)
    for _ in range(COUNTS):
        loops = _families_in_loops(chosen)
        for loop in loops:
            if is_miscounted(loop, slots):
                count_in_order(loop, slots)
                count_as_rows(loop, slots)
        inside = {family for loop in loops for family in loop}
        rounds: tuple[Free, ...] = ("none", "outside", "outside", "outside", "any", "none")
        for free in rounds:
            for family in families:
                if not family.is_full:
                    complete(family, slots, family in inside, free)
    for loop in loops:
        start_sooner(loop, slots)
        for _ in range(ROUNDS):
            for family in loop:
                drop_ends(family, loop, slots)


def _families_in_loops(chosen: Chosen) -> list[list[Family]]:
    return [[one for one in loop if isinstance(one, Family)] for loop in _loops(chosen)]


def _loops(chosen: Chosen) -> list[list[Unit]]:
    """The families and nodes that hang on each other."""
    graph: dict[Unit, dict[Unit, None]] = {}
    for node, first in chosen.reading.same.items():
        if node is first:
            unit = chosen.unit(node)
            piece = unit.piece if isinstance(unit, Family) else None
            read: Iterable[fx.Node] = node.all_input_nodes if piece is None else [piece.source]
            graph.setdefault(unit, {}).update((chosen.unit(one), None) for one in read)
    return [each for each in components(graph) if len(each) > 1 or each[0] in graph[each[0]]]


def _has_form(family: Family, chosen: Chosen) -> bool:
    if family.piece is not None or family.placed is not None:
        return True
    stacked = [slot.always is None for slot in chosen.slots.of(family)]
    return any(stacked) and form_of(family.sample, stacked, family.length, chosen.table) is not None


def _find_collected(chosen: Chosen) -> None:
    """Find what adds up, joins or writes the members of a family."""
    for node, leaves in chosen.reading.sums.items():
        summed = _summed(leaves, chosen)
        if summed:
            chosen.sums[node] = summed
    for node in chosen.reading.program.calls():
        joined = _joined(node, chosen)
        if joined is not None:
            chosen.collected[node] = joined


def _summed(leaves: tuple[fx.Node, ...], chosen: Chosen) -> list[Family]:
    """The families of which each member is added once."""
    steps: dict[Family, list[int]] = {}
    for leaf in leaves:
        at = chosen.slots.at(leaf)
        if at is not None:
            steps.setdefault(at[0], []).append(at[1])
    return [family for family, each in steps.items() if sorted(each) == list(family.steps)]


def _joined(node: fx.Node, chosen: Chosen) -> tuple[int, FamilySlot] | None:
    """The dim along which a node has the values of all steps, and these."""
    values: dict[int, fx.Node] = {}
    written = chosen.reading.written.get(node)
    if written is not None:
        dim = written.dim
        values = {t: row for t in written.rows if (row := written.row(t)) is not None}
    elif node.target in (aten.stack.default, aten.cat.default):
        parts, *rest = node.args
        dim = rest[0] if rest else 0  # type: ignore[assignment]
        values = {t: chosen.reading.same[part] for t, part in enumerate(parts)}  # type: ignore[union-attr, arg-type]
    slot = chosen.slots.read(values) if len(values) > 3 else None
    is_whole = slot is not None and slot.family is not None and slot.by == 0 and slot.family.length == len(values)
    return (dim, slot) if is_whole and slot is not None else None


def _is_summed(family: Family, chosen: Chosen) -> bool:
    """Whether all that reads the members is one sum."""
    reading, own = chosen.reading, set(family.members.values())
    readers = {user for node in own for user in reading.users.get(node, ())}
    sums = [node for node, summed in chosen.sums.items() if family in summed]
    return len(sums) == 1 and readers <= reading.inner | set(sums)


def _find_rows(chosen: Chosen) -> None:
    """Find the members that something reads alone."""
    reading = chosen.reading
    for node, first in reading.same.items():
        is_other = node is not first or node in reading.inner or node in reading.written or chosen.slots.at(node)
        if is_other or node in chosen.sums or node in chosen.collected:
            continue
        for operand in node.all_input_nodes:
            at = chosen.slots.at(reading.same[operand])
            if at is not None:
                chosen.rows.setdefault(at[0], set()).add(at[1])
