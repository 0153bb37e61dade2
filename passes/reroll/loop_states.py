"""Carried states that are linear, element by element: h[t] = a[t] h[t-1] + b[t]."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import facts_of
from autopar.ir.program import record
from autopar.passes.reroll.families import Family
from autopar.passes.reroll.slots import FamilySlot, Slots, components
from autopar.passes.rules import call_of, rule_of
from autopar.passes.rules.build import FIRST

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Term:
    """A number, or an operand of a family in all its steps, or what an op gives for terms, or a term some steps away.

    target: None, "slot", the op, or "moved". args: the number; the family and the place of its operand; terms; a term
    and the steps.
    """

    target: Any
    args: tuple[Any, ...]

    @staticmethod
    def of(target: Any, *args: Term) -> Term:
        return Term(target, args)


ONE = Term(None, (1,))
Affine = tuple[Term | None, Term | None]  # what a value is as a[t] h + b[t]; None for zero


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A state that each step makes of that `by` steps away, which is -1, or 1 from the end.

    state: its family. start: what stands before the first step, and which step that is; None for zeros before all.
    """

    state: Family
    by: int
    a: Term
    b: Term | None
    start: tuple[int, fx.Node] | None


class NotLinear(Exception):
    """A state is no linear recurrence."""


def recurrence_of(families: Collection[Family], slots: Slots) -> Recurrence | None:
    """The recurrence that families which hang on each other over the steps make; None if it is of another kind."""
    try:
        return _Reader(families, slots).read()
    except NotLinear:
        return None


class _Reader:
    """Writes the state as a function of itself one step away. Where families read others of that step, these are
    functions of its state there."""

    def __init__(self, families: Collection[Family], slots: Slots) -> None:
        self.families, self.at = families, slots.at
        self.slots = {family: slots.of(family) for family in families}

    def read(self) -> Recurrence:
        """Raises NotLinear."""
        inside = [slot for found in self.slots.values() for slot in found if slot.family in self.families]
        steps = {slot.by for slot in inside} - {0}
        carried = {slot.family: None for slot in inside if slot.by and slot.family is not None}
        types = {record(family.sample).types for family in self.families}
        _require(len(steps) == 1 and steps <= {1, -1} and len(types) == 1)
        (by,) = steps
        start = self._start(by)
        if len(carried) == 1:
            return self._of_state(next(iter(carried)), by, start)
        _require(start is None)
        for state in self.families:
            try:
                return self._of_state(state, by, start)
            except NotLinear:
                continue
        raise NotLinear

    def _of_state(self, state: Family, by: int, start: tuple[int, fx.Node] | None) -> Recurrence:
        _require(record(state.sample).type.dtype.is_floating_point)
        others = set(self.families) - {state}
        rest = {one: [slot.family for slot in self.slots[one] if slot.family in others] for one in others}
        _require(all(len(one) == 1 and one[0] not in rest[one[0]] for one in components(rest)))  # type: ignore[arg-type]
        a, b = self._applied(state, state, is_next=True)
        _require(a is not None)
        assert a is not None
        return Recurrence(state, by, a, b, start)

    def _is_inside(self, node: fx.Node) -> bool:
        """Whether a value hangs on the state."""
        found = self.at(node)
        return found is not None and found[0] in self.families

    def _start(self, by: int) -> tuple[int, fx.Node] | None:
        """What the first step reads in place of a state."""
        starts = set()
        for family, found in self.slots.items():
            for slot in found:
                if slot.family in self.families and slot.by:
                    first = family.steps[0] if by < 0 else family.steps[-1]
                    _require(set(slot.others) <= {first} and not any(map(self._is_inside, slot.others.values())))
                    starts.add(next(iter(slot.others.items()), None))
        _require(len(starts) == 1)
        return starts.pop()

    def _applied(self, family: Family, state: Family, is_next: bool) -> Affine:
        """A family as a function of the state: of the step before if `is_next`, else of its own step."""
        slots = enumerate(self.slots[family])
        return _applied(family.sample, [self._of_slot(family, i, slot, state, is_next) for i, slot in slots])

    def _of_slot(self, family: Family, i: int, slot: FamilySlot, state: Family, is_next: bool) -> Affine:
        if slot.family not in self.families:
            _require(not any(map(self._is_inside, slot.values.values())))
            return None, Term("slot", (family, i))
        assert slot.family is not None
        if not slot.by:
            _require(not slot.others and (slot.family is not state or not is_next))
            return (ONE, None) if slot.family is state else self._applied(slot.family, state, is_next)
        _require(is_next)
        if slot.family is state:
            return ONE, None
        a, b = self._applied(slot.family, state, is_next=False)
        return _moved(a, slot.by), _moved(b, slot.by)


def _require(good: bool) -> None:
    if not good:
        raise NotLinear


def _applied(node: fx.Node, parts: list[Affine]) -> Affine:
    """What an op makes of affine operands. Raises NotLinear."""
    target = node.target
    _require(not node.kwargs)
    left = iter(parts)
    args = [next(left) if isinstance(arg, fx.Node) else (None, Term(None, (arg,))) for arg in node.args]
    facts = facts_of(target)
    if facts.moves == "same":
        return args[0]
    if len(args) == 1 and facts.pointwise and (rule := rule_of(call_of(node))) and rule[0].linear == FIRST:
        return _each(target, args[0])
    if target in (aten.add.Tensor, aten.sub.Tensor) and len(args) == 2:
        (a, b), (c, d) = args[0], args[1] if target is aten.add.Tensor else _each(aten.neg.default, args[1])
        return _sum(a, c), _sum(b, d)
    if target in (aten.mul.Tensor, aten.mul.Scalar) and len(args) == 2:
        state, factor = args if args[1][0] is None else args[::-1]
        _require(factor[0] is None)
        return _each(aten.mul.Tensor, state, factor[1])
    if target in (aten.div.Tensor, aten.div.Scalar) and len(args) == 2:
        _require(args[1][0] is None)
        return _each(aten.div.Tensor, args[0], args[1][1])
    if target is aten.where.self:
        _require(args[0][0] is None)
        return _chosen(args[0][1], args[1][0], args[2][0]), _chosen(args[0][1], args[1][1], args[2][1])
    raise NotLinear


def _moved(term: Term | None, by: int) -> Term | None:
    return None if term is None else Term("moved", (term, by))


def _each(target: Any, value: Affine, *rest: Any) -> Affine:
    a, b = (None if one is None else Term.of(target, one, *rest) for one in value)
    if target is aten.mul.Tensor and value[0] is ONE:
        (a,) = rest
    return a, b


def _sum(a: Term | None, b: Term | None) -> Term | None:
    return Term.of(aten.add.Tensor, a, b) if a is not None and b is not None else a or b


def _chosen(condition: Any, a: Term | None, b: Term | None) -> Term | None:
    zero = Term(None, (0.0,))
    return None if a is None and b is None else Term.of(aten.where.self, condition, a or zero, b or zero)
