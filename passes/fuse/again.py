"""What a group computes again instead of reading it: values that are cheap to make of what it reads anyway.

A cast to a longer float, a mask, a fill or a gate need not lie in memory if every kernel that reads them can make them
of operands which it loads. Above all a forward pass keeps less for the backward pass. Only element by element: a
reduction is never computed twice, nor what is compared with another number bit by bit (two kernels may round a product
and a sum in another way).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.program import record
from autopar.passes.fuse.fits import KernelFit
from autopar.passes.fuse.groups import Groups, Unit

MOST_CALLS = 16  # that one group may compute again
_aten = torch.ops.aten
# What asks whether two numbers are the same, as the gradient of a maximum does: they are if each is computed once.
_EXACT = frozenset((_aten.eq.Tensor, _aten.ne.Tensor, _aten.amax.default, _aten.amin.default))


def recompute(groups: Groups) -> None:
    """Let groups compute again what they read, where that moves fewer bytes in all."""
    again = _Again(groups)
    changed = True
    while changed:
        changed = False
        for value in sorted(again.candidates(), key=lambda node: -groups.facts.place[node]):
            changed |= again.everywhere(value)
            for unit in again.readers_of(value):
                changed |= again.here(value, unit)


@dataclass(slots=True)
class _Again:
    """readers: the groups that have a value among their operands."""

    groups: Groups
    readers: dict[fx.Node, dict[Unit, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for unit in self.groups.groups():
            assert unit.fit is not None
            for value in unit.fit.operands():
                self.readers.setdefault(value, {})[unit] = None

    def candidates(self) -> list[fx.Node]:
        """The values that a group gives to another one, made element by element."""
        fits = [unit.fit for unit in self.groups.groups() if unit.fit is not None]
        return [
            value
            for fit in fits
            for value in fit.results
            if value in self.readers and value not in fit.columns and self._is_cheap(value)
        ]

    def readers_of(self, value: fx.Node) -> list[Unit]:
        """The groups that read a value from outside."""
        return list(self.readers.get(value, ()))

    def everywhere(self, value: fx.Node) -> bool:
        """Compute a value again wherever it is read, so that it is never written; True if that was done."""
        mine, readers = self.groups.of[value], self.readers_of(value)
        assert mine.fit is not None
        if not readers or value in mine.gone or self._leaves(value):
            return False
        smaller = KernelFit.of(self.groups.facts, mine.fit.calls, mine.fit.copies, {**mine.gone, value: None})
        fits = [self._with_copies(value, unit) for unit in readers]
        before = mine.fit.moved() + sum(unit.fit.moved() for unit in readers if unit.fit is not None)
        if not isinstance(smaller, KernelFit) or any(fit is None for fit in fits):
            return False
        if smaller.moved() + sum(fit.moved() for fit in fits if fit is not None) >= before:
            return False
        mine.gone[value] = None
        self._take(mine, smaller)
        for unit, fit in zip(readers, fits, strict=True):
            assert fit is not None
            self._take(unit, fit)
        return True

    def here(self, value: fx.Node, unit: Unit) -> bool:
        """Compute a value again in one group that reads all it takes already; True if that was done."""
        fit = self._with_copies(value, unit)
        assert unit.fit is not None
        if fit is None or fit.moved() >= unit.fit.moved() or not fit.operands().keys() <= unit.fit.operands().keys():
            return False
        self._take(unit, fit)
        return True

    def _leaves(self, value: fx.Node) -> bool:
        """True if something other than a group reads a value."""
        of = self.groups.of
        units = [of.get(user) for user in self.groups.facts.users[value]]
        return any(unit is None or unit.fit is None for unit in units)

    def _take(self, unit: Unit, fit: KernelFit) -> None:
        assert unit.fit is not None
        for value in unit.fit.operands():
            self.readers.get(value, {}).pop(unit, None)
        for value in fit.operands():
            self.readers.setdefault(value, {})[unit] = None
        unit.fit = fit
        unit.copies.update(dict.fromkeys(fit.copies))

    def _is_cheap(self, call: fx.Node) -> bool:
        how = self.groups.facts.how.get(call)
        is_cheap = call in self.groups.facts.joins and how is not None and how.kind in ("point", "draw", "view")
        return is_cheap and not self._is_compared(call)

    def _is_compared(self, call: fx.Node) -> bool:
        """True for a float, or a view of one, that is compared with another bit by bit."""
        if not record(call).is_tensor or not record(call).type.dtype.is_floating_point:
            return False
        users = self.groups.facts.users[call]
        hows = {user: self.groups.facts.how.get(user) for user in users}
        views = [user for user, how in hows.items() if how is not None and how.kind == "view"]
        return any(user.target in _EXACT for user in users) or any(map(self._is_compared, views))

    def _with_copies(self, value: fx.Node, unit: Unit) -> KernelFit | None:
        """A group that makes a value itself; None where it cannot."""
        facts, fit = self.groups.facts, unit.fit
        assert fit is not None
        known = {*fit.operands(), *fit.inside} - {value}
        copies = {**unit.copies}
        todo = [value]
        while todo:
            node = todo.pop()
            if node in known or node in copies:
                continue
            if node is not value and self._is_stored(node) and not self._is_worth(node):
                continue
            if not self._is_cheap(node) or len(copies) > MOST_CALLS or node in unit.calls:
                return None
            copies[node] = None
            todo += [read.value for read in facts.reads[node]]
        if not _is_earlier(copies, unit):
            return None
        calls = sorted({*unit.calls, *copies}, key=facts.place.__getitem__)
        found = KernelFit.of(facts, calls, copies, unit.gone)
        return found if isinstance(found, KernelFit) else None

    def _is_stored(self, node: fx.Node) -> bool:
        """True for a value that lies in memory."""
        unit = self.groups.of.get(node)
        return unit is None or unit.fit is None or node in unit.fit.results

    def _is_worth(self, node: fx.Node) -> bool:
        """True for a stored value that is made of less than it is: of nothing, or of a shorter type that is there."""
        if not self._is_cheap(node):
            return False
        reads = self.groups.facts.reads[node]
        if not all(self._is_stored(read.value) for read in reads):
            return False
        return sum(self.groups.facts.seen_bytes(read) for read in reads) < self.groups.facts.bytes_(node)


def _is_earlier(copies: dict[fx.Node, None], unit: Unit) -> bool:
    """The forward pass computes nothing of the backward pass."""
    phase = record(unit.calls[0]).phase
    return all(record(node).phase in ("forward", phase) for node in copies)
