"""The program with families rolled up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.op_facts import is_zeros
from autopar.ir.ops.ops import op, op_name
from autopar.ir.ops.storage import is_view
from autopar.ir.program import Builder, Program, Record, TensorType, erase_unused, record
from autopar.passes.reroll.calls import CallAdder, typed
from autopar.passes.reroll.choose_loops import Chosen, Unit
from autopar.passes.reroll.families import Family
from autopar.passes.reroll.slots import FamilySlot
from autopar.passes.reroll.step_forms import equation_of, form_of, slots_of, with_slots, with_step
from autopar.passes.reroll.write_chains import ChainWriter, read_outside
from autopar.passes.reroll.write_states import StateWriter, places_of

aten = torch.ops.aten
MADE_BY = "reroll"
ROWS = 4  # so many rows of a value are summed out of it one by one; more are taken of the whole


class FamilyWriter:
    """Writes each family as one node where the last of its members stood, or where it is needed before."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen, self.reading = chosen, chosen.reading
        self.build = Builder(MADE_BY)
        self.all: dict[Family, fx.Node] = {}  # the value of all steps
        self.rows: dict[tuple[Family, int], fx.Node] = {}
        self.calls = CallAdder(self.build)
        self.states = StateWriter(self.calls, chosen.slots, self._value, self._operand)
        self.chains = ChainWriter(self.calls, chosen.slots, self._value, self._operand)
        self.written: set[Family] = set()  # the families of the chains that are

    def run(self) -> Program:
        reading, last = self.reading, {}
        for family in self.chosen.slots.rolled:
            last[max(family.members.values(), key=reading.order.__getitem__)] = family
        for node in reading.program.graph.nodes:
            at = self.chosen.slots.at(node)
            if node in last:
                if last[node].placed is None:
                    self._ensure(last[node])
            elif node.op == "output":
                for one in node.all_input_nodes:
                    self._ensure(self.chosen.unit(one))
                self.build.copy(node, self._value)
            elif at is None and reading.same[node] is node and not self._is_part(node):
                self._ensure(node)
        erase_unused(self.build.graph)
        return reading.program.with_(graph=self.build.graph)

    def _is_part(self, node: fx.Node) -> bool:
        """True for what is needed only if something reads it: terms of a sum, and rows written one after the other."""
        return node in self.reading.inner or node in self.reading.written

    # --- order

    def _ensure(self, unit: Unit) -> None:
        """Write what stands for a unit, after all that it reads."""
        queue = [unit]
        while queue:
            unit = queue[-1]
            left = [] if self._is_there(unit) else [one for one in self._read(unit) if not self._is_there(one)]
            queue.extend(reversed(left))
            if not left:
                queue.pop()
                if not self._is_there(unit):
                    self._write(unit)

    def _is_there(self, unit: Unit) -> bool:
        return unit in self.all or unit in self.written if isinstance(unit, Family) else unit in self.build.value

    def _read(self, unit: Unit) -> Iterator[Unit]:
        """What must be there before a unit."""
        if isinstance(unit, Family):
            yield from self._read_by_family(unit)
        elif unit in self.chosen.sums:
            families = self.chosen.sums[unit]
            for family in families:
                yield from self._read_by_family(family)
            yield from map(self.chosen.unit, self._rest(unit, families))
        elif unit in self.chosen.collected:
            yield from self._units([self.chosen.collected[unit][1]])
        else:
            yield from map(self.chosen.unit, unit.all_input_nodes)

    def _read_by_family(self, family: Family) -> Iterator[Unit]:
        state, chain = self.chosen.states.get(family), self.chosen.chains.get(family)
        if family.piece is not None:
            yield self.chosen.unit(family.piece.source)
        elif chain is not None:
            for one in read_outside(chain, self.chosen.slots):
                yield from self._units([one]) if isinstance(one, FamilySlot) else [self.chosen.unit(one)]
        elif state is None:
            yield from self._units(self.chosen.slots.of(family))
        else:
            for term in (state.a, state.b):
                yield from self._units(self.chosen.slots.of(one)[place] for one, place in places_of(term))
            if state.start is not None:
                yield self.chosen.unit(state.start[1])

    def _units(self, slots: Iterable[FamilySlot]) -> Iterator[Unit]:
        for slot in slots:
            if slot.always is not None:
                yield self.chosen.unit(slot.always)
            elif slot.family is not None:
                yield slot.family
            yield from map(self.chosen.unit, slot.values.values() if slot.is_listed else slot.others.values())

    def _rest(self, node: fx.Node, families: list[Family]) -> list[fx.Node]:
        """What a sum adds beside the members of families."""
        return [
            leaf
            for leaf in self.reading.sums[node]
            if (at := self.chosen.slots.at(leaf)) is None or at[0] not in families
        ]

    # --- values

    def _write(self, unit: Unit) -> None:
        if isinstance(unit, Family) and unit in self.chosen.chains:
            chain = self.chosen.chains[unit]
            self.all.update(self.chains.write(chain))
            self.written.update(chain.families)
        elif isinstance(unit, Family):
            state = self.chosen.states.get(unit)
            self.all[unit] = self.states.write(state, self._known(unit)) if state is not None else self._family(unit)
        elif unit in self.chosen.sums:
            self.build.value[unit] = self._sum(unit)
        elif unit in self.chosen.collected:
            self.build.value[unit] = self._collected(unit)
        else:
            self.build.copy(unit, self._value)

    def _value(self, node: fx.Node) -> fx.Node:
        """The new node of one of the old program."""
        node = self.reading.same[node]
        at = self.chosen.slots.at(node)
        return self.build.value[node] if at is None else self._row(*at)

    def _row(self, family: Family, t: int) -> fx.Node:
        """One member of a family. Summed out of zeros, it needs no rank to have the others."""
        if (family, t) not in self.rows:
            known = record(family.members.get(t, family.sample))
            rows = self.chosen.rows.get(family, set())
            if family.piece is not None:
                piece = self._piece(family, t, known)
            elif known.type.dtype.is_floating_point and len(rows) <= ROWS:
                alone = self.calls.chosen(family.length, t, self.all[family], self.calls.number(0, known), known)
                piece = self.build.infer(aten.sum.dim_IntList, alone, [0], like=known, name="row")
            else:
                piece = self.build.infer(aten.select.int, self.all[family], 0, t, like=known, name="row")
            self.rows[family, t] = piece
        return self.rows[family, t]

    def _piece(self, family: Family, t: int, known: Record) -> fx.Node:
        assert family.piece is not None
        source, dim = self._value(family.piece.source), family.piece.dim
        if family.piece.keep:
            return self.build.infer(aten.slice.Tensor, source, dim, t, t + 1, like=known, name="row")
        return self.build.infer(aten.select.int, source, dim, t, like=known, name="row")

    def _family(self, family: Family) -> fx.Node:
        known = self._known(family)
        if family.piece is not None:
            return self._rows_of(family, known)
        slots = self.chosen.slots.of(family)
        stacked = [slot.always is None for slot in slots]
        form = form_of(family.sample, stacked, family.length, self.chosen.table)
        assert form is not None
        values = []
        for i, (slot, operand) in enumerate(zip(slots, slots_of(family.sample), strict=True)):
            value = self._operand(slot, known)
            if i in form.repeated:
                shape = (family.length, *record(operand).type.shape)
                value = self.build.infer(aten.expand.default, value, list(shape), like=known, name="repeated")
            if i in form.shapes:
                value = self.calls.reshaped(value, form.shapes[i], known)
            values.append(value)
        args, kwargs = with_slots((form.args, form.kwargs), values)
        made = self.build.call(form.target, *args, like=known, name=op_name(form.target), **kwargs)
        return self._members(made, family, known) if family in self.chosen.slots.zeroed else made

    def _known(self, family: Family) -> Record:
        """The record of all members as one."""
        known = record(family.sample)
        types = tuple(
            None if type_ is None else TensorType((family.length, *type_.shape), type_.dtype) for type_ in known.types
        )
        flops = sum(record(one).flops for one in family.members.values())
        return known.with_(types=types, flops=flops, origin="")

    def _rows_of(self, family: Family, known: Record) -> fx.Node:
        """A value with the dim of the steps in front."""
        assert family.piece is not None
        source, dim = self._value(family.piece.source), family.piece.dim
        order = [dim, *(i for i in range(len(record(source).type.shape)) if i != dim)]
        found = self.build.infer(aten.permute.default, source, order, like=known, name="steps") if dim else source
        return self.calls.reshaped(found, known.type.shape, known) if family.piece.keep else found

    def _operand(self, slot: FamilySlot, like: Record) -> fx.Node:
        """What a slot is in all steps, or in each."""
        if slot.always is not None:
            return self._value(slot.always)
        if slot.family is None:
            first = next(iter(slot.values.values()))
            rows = [self._value(slot.values.get(t, first)) for t in range(slot.length)]
            return self.build.infer(aten.stack.default, rows, 0, like=like, name="steps")
        moved = self.calls.moved(self.all[slot.family], slot.by, like)
        for t, node in slot.others.items():
            if not (is_zeros(node) and not 0 <= t + slot.by < slot.length):
                moved = self.calls.chosen(slot.length, t, self._value(node), moved, like)
        return moved

    # --- what collects

    def _collected(self, node: fx.Node) -> fx.Node:
        """What joins the values of all steps: the dim of the steps goes where it has them."""
        dim, slot = self.chosen.collected[node]
        assert slot.family is not None
        known, value = record(node), self._operand(slot, record(node))
        ndim = len(record(slot.family.sample).type.shape)
        dim %= ndim if node.target is aten.cat.default else ndim + 1
        return self.calls.behind(value, dim, known, node.name)

    def _sum(self, node: fx.Node) -> fx.Node:
        families = self.chosen.sums[node]
        known = record(node)
        terms = [self._summed(family, known) for family in families]
        terms += [self._value(leaf) for leaf in self._rest(node, families)]
        found = terms[0]
        for i, term in enumerate(terms[1:], 2):
            like = known if i == len(terms) else known.with_(origin="")
            found = self.build.call(aten.add.Tensor, found, term, like=like, name=node.name)
        return found

    def _summed(self, family: Family, known: Record) -> fx.Node:
        """The sum of all members of a family."""
        like = known.with_(origin="")
        if family.placed is not None:
            return self._placed(family, like)
        slots = self.chosen.slots.of(family)
        viewed = _viewed(family, slots)
        if viewed is not None:  # the view of the sum: what is summed need not be there for each step
            summed = self._summed(viewed, typed(like, record(viewed.sample)))
            args, kwargs = with_slots((family.sample.args, dict(family.sample.kwargs)), [summed])
            target: Any = family.sample.target
            return self.build.call(target, *args, like=like, name="sum", **kwargs)
        equation = equation_of(family.sample)
        if equation is not None and all(slot.always is None for slot in slots):
            values = [self._members(self._operand(slot, like), family, like) for slot in slots]
            equation = with_step(equation, [True, True], summed=True)
            like = like.with_(flops=self._known(family).flops)
            return self.build.call(op("einsum"), *values, equation, like=like, name="einsum")
        if family not in self.all:
            self._ensure(family)
        value = self._members(self.all[family], family, like)
        return self.build.infer(aten.sum.dim_IntList, value, [0], like=like, name="sum")

    def _placed(self, family: Family, like: Record) -> fx.Node:
        """Rows that each stand at a place of their own among zeros."""
        (slot,) = self.chosen.slots.of(family)
        value = self._members(self._operand(slot, like), family, like)
        dim: Any = family.sample.args[2]
        ndim = len(like.type.shape)
        value = self.calls.moved(value, -family.placed, like) if family.placed else value
        return self.calls.behind(value, dim % ndim, like, "steps")

    def _members(self, value: fx.Node, family: Family, like: Record) -> fx.Node:
        """A value of all steps, zero where a family has no member."""
        known = typed(like, record(value))
        for t in sorted(set(range(family.length)) - set(family.members)):
            value = self.calls.chosen(family.length, t, self.calls.number(0, known), value, known)
        return value


def _viewed(family: Family, slots: list[FamilySlot]) -> Family | None:
    """The family of which each member of another one is the same view."""
    if not is_view(family.sample) or record(family.sample).several or len(slots) != 1:
        return None
    (slot,) = slots
    is_same = slot.family is not None and not slot.by and not slot.others
    return (
        slot.family if is_same and slot.family and slot.family.steps == family.steps and not slot.family.piece else None
    )
