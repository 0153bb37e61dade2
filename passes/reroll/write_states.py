"""A recurrence as calls: what its state is multiplied by and what is added, as values of all steps, and the scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import is_zeros
from autopar.ir.ops.ops import op, op_name
from autopar.ir.program import Record, record
from autopar.passes.reroll.calls import CallAdder
from autopar.passes.reroll.families import Family
from autopar.passes.reroll.loop_states import ONE, Recurrence, Term
from autopar.passes.reroll.slots import FamilySlot, Slots

aten = torch.ops.aten


class StateWriter:
    """Writes recurrences. value: of a node of the old program; operand: of a slot, in all steps."""

    def __init__(
        self,
        calls: CallAdder,
        slots: Slots,
        value: Callable[[fx.Node], fx.Node],
        operand: Callable[[FamilySlot, Record], fx.Node],
    ) -> None:
        self.calls, self.slots, self.value, self.operand = calls, slots, value, operand

    def write(self, state: Recurrence, known: Record) -> fx.Node:
        """The state after each step, with a record."""
        shape, reverse = known.type.shape, state.by > 0
        b = self._whole(state.b, shape, known)
        if state.a is ONE and state.start is None:
            return self.calls.build.infer(op("running_sum"), b, 0, reverse, like=known, name="state")
        a = self._whole(state.a, shape, known)
        if state.start is not None and not is_zeros(state.start[1]):
            b = self._started(state, a, b, known)
        for t in _before(state):  # what is computed where there is no step may be infinite, and times zero is no zero
            a = self.calls.chosen(state.state.length, t, self.calls.number(0, known), a, known)
            if state.start is not None:
                b = self.calls.chosen(state.state.length, t, self.calls.number(0, known), b, known)
        return self.calls.build.infer(op("linear_scan"), a, b, None, 0, reverse, like=known, name="state")

    def _started(self, state: Recurrence, a: fx.Node, b: fx.Node, known: Record) -> fx.Node:
        """The terms of a recurrence from zeros that goes on from a state."""
        assert state.start is not None
        t, node = state.start
        first = self.calls.build.infer(aten.mul.Tensor, a, self.value(node), like=known, name="start")
        first = self.calls.build.infer(aten.add.Tensor, first, b, like=known, name="start")
        return self.calls.chosen(state.state.length, t, first, b, known)

    def _whole(self, term: Term | None, shape: tuple[int, ...], like: Record) -> fx.Node:
        """A term in the shape of the state."""
        return self.calls.expanded(self._tensor(0 if term is None else self._term(term, like), like), shape, like)

    def _tensor(self, value: Any, like: Record) -> fx.Node:
        return value if isinstance(value, fx.Node) else self.calls.number(value, like)

    def _term(self, term: Term, like: Record) -> Any:
        if term.target is None:
            return term.args[0]
        if term.target == "slot":
            family, place = term.args
            return self._of_slot(family, place, like)
        if term.target == "moved":
            value, by = term.args
            return self.calls.moved(self._in_steps(value, like), by, like)
        first, *rest = (self._term(one, like) for one in term.args)
        if term.target is aten.where.self:
            rest = [self._tensor(one, like) for one in rest]
        args = self._tensor(first, like), *rest
        return self.calls.build.infer(term.target, *args, like=like, name=op_name(term.target))

    def _in_steps(self, term: Term, like: Record) -> fx.Node:
        """A term with a row for each step, if it is the same in all."""
        value, shape = self._tensor(self._term(term, like), like), like.type.shape
        own = record(value).type.shape
        if len(own) == len(shape):
            return value
        return self.calls.expanded(value, (shape[0], *(1,) * (len(shape) - 1 - len(own)), *own), like)

    def _of_slot(self, family: Family, place: int, like: Record) -> fx.Node:
        """An operand of a family, with the step in front of as many dims as the state has."""
        slot = self.slots.of(family)[place]
        value, ndim = self.operand(slot, like), len(record(family.sample).type.shape)
        own = record(value).type.shape
        if slot.always is not None or len(own) == ndim + 1:
            return value
        return self.calls.reshaped(value, (own[0], *(1,) * (ndim + 1 - len(own)), *own[1:]), like)


def _before(state: Recurrence) -> range:
    """The steps before the first of a state."""
    family = state.state
    return range(family.steps[0]) if state.by < 0 else range(family.steps[-1] + 1, family.length)


def places_of(term: Term | None) -> Iterator[tuple[Family, int]]:
    """The operands of families that a term holds."""
    if term is not None and term.target == "slot":
        yield term.args
    elif term is not None and term.target is not None:
        for one in term.args:
            yield from places_of(one) if isinstance(one, Term) else ()
