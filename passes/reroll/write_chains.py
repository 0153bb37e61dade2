"""A chain as one call: its step as text, and what that reads as values of all steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.chain_step import FIXED, ROWS, STATES, ChainBody, print_body
from autopar.ir.ops.ops import op
from autopar.ir.program import Record, TensorType, record
from autopar.passes.reroll.calls import CallAdder, typed
from autopar.passes.reroll.chain_steps import Chain, outputs_of
from autopar.passes.reroll.families import Family
from autopar.passes.reroll.slots import FamilySlot, Slots
from autopar.passes.reroll.step_forms import with_slots

aten = torch.ops.aten


class ChainWriter:
    """Writes chains. value: of a node of the old program; operand: of a slot, in all steps."""

    def __init__(
        self,
        calls: CallAdder,
        slots: Slots,
        value: Callable[[fx.Node], fx.Node],
        operand: Callable[[FamilySlot, Record], fx.Node],
    ) -> None:
        self.calls, self.slots, self.value, self.operand = calls, slots, value, operand

    def write(self, chain: Chain) -> dict[Family, fx.Node]:
        """The values of all steps of those of its families that something else reads."""
        outputs = outputs_of(chain, self.slots)
        known = record(outputs[-1].sample)
        step = _Step(self, chain, known)
        text = step.text(outputs)
        flops = sum(record(node).flops for family in chain.families for node in family.members.values())
        types = tuple(_stacked(record(one.sample).type, chain.length) for one in outputs)
        like = known.with_(types=types, several=True, origin="", flops=flops)
        given = [list(step.operands[kind].values()) for kind in (STATES, ROWS, FIXED)]
        made = self.calls.build.call(op("chain"), *given, text, chain.by > 0, like=like, name="chain")
        infer = self.calls.build.infer
        return {one: infer(operator.getitem, made, i, like=known, name="state") for i, one in enumerate(outputs)}


class _Step:
    """The body of one chain. operands: of each kind what the call is given, by what it stands for."""

    def __init__(self, writer: ChainWriter, chain: Chain, known: Record) -> None:
        self.writer, self.chain, self.known, self.calls = writer, chain, known, writer.calls
        self.graph = fx.Graph()
        self.operands: dict[str, dict[Hashable, fx.Node]] = {kind: {} for kind in (STATES, ROWS, FIXED)}
        self.placed: dict[tuple[str, Hashable], fx.Node] = {}
        self.values: dict[Family, fx.Node] = {}
        self.carried: list[Family] = []  # the family of each state

    def text(self, outputs: tuple[Family, ...]) -> str:
        """What the step says. outputs: the families that it gives."""
        for family in self.chain.families:
            slots = self.writer.slots.of(family)
            args, kwargs = with_slots((family.sample.args, dict(family.sample.kwargs)), list(map(self._read, slots)))
            made = self.graph.create_node("call_function", family.sample.target, args, kwargs)
            self.values[family] = self._where_it_is(family, made)
        after = tuple(map(self.values.__getitem__, self.carried))
        return print_body(ChainBody(self.graph, tuple(self.values[one] for one in outputs), after))

    def _read(self, slot: FamilySlot) -> fx.Node:
        """The value of an operand in one step."""
        if slot.always is not None:
            return self._fixed(slot.always)
        if slot.family not in self.chain.families:
            key = slot.family, slot.by, *(slot.values if slot.is_listed else slot.others).items()
            return self._operand(ROWS, key, lambda: self.writer.operand(slot, self.known))
        others = dict(slot.others)
        chosen = self._state(slot, others) if slot.by else self.values[slot.family]
        for t, node in others.items():
            chosen = self._chosen(t, self._fixed(node), chosen)
        return chosen

    def _state(self, slot: FamilySlot, others: dict[int, fx.Node]) -> fx.Node:
        """What the step before has of a family. What the first step reads in its place is taken out of `others`."""
        assert slot.family is not None
        start, known = others.pop(self.chain.first, None), record(slot.family.sample)
        if (slot.family, start) not in self.operands[STATES]:
            self.carried.append(slot.family)
        return self._operand(STATES, (slot.family, start), lambda: self._start(start, known))

    def _start(self, node: fx.Node | None, known: Record) -> fx.Node:
        if node is not None:
            return self.writer.value(node)
        like = typed(self.known, known)
        return self.calls.expanded(self.calls.number(0, like), known.type.shape, like)

    def _where_it_is(self, family: Family, made: fx.Node) -> fx.Node:
        """A value that must be zero in the steps in which its family has no member."""
        if family in self.writer.slots.zeroed:
            like = typed(self.known, record(family.sample))
            for t in sorted(set(range(family.length)) - set(family.members)):
                made = self._chosen(t, self._operand(FIXED, like.types, lambda: self.calls.number(0, like)), made)
        return made

    def _chosen(self, t: int, there: fx.Node, other: fx.Node) -> fx.Node:
        """One value in step t and another in all others."""
        mask = self._operand(ROWS, t, lambda: self.calls.is_step(self.chain.length, t, 1, self.known))
        return self.graph.call_function(aten.where.self, (mask, there, other))

    def _fixed(self, node: fx.Node) -> fx.Node:
        return self._operand(FIXED, node, lambda: self.writer.value(node))

    def _operand(self, kind: str, key: Hashable, make: Callable[[], fx.Node]) -> fx.Node:
        """The placeholder of an operand, which is made where it is first read."""
        if key not in self.operands[kind]:
            place = self.placed[kind, key] = self.graph.placeholder(f"{kind}{len(self.operands[kind])}")
            assert place.name == f"{kind}{len(self.operands[kind])}"
            self.operands[kind][key] = make()
        return self.placed[kind, key]


def read_outside(chain: Chain, slots: Slots) -> Iterator[Any]:
    """The slots of a chain that read other values, and the nodes that some of its steps read in place of its own."""
    for family in chain.families:
        for slot in slots.of(family):
            if slot.family in chain.families:
                yield from slot.others.values()
            else:
                yield slot


def _stacked(type_: TensorType, length: int) -> TensorType:
    return TensorType((length, *type_.shape), type_.dtype)
