"""What a group computes again instead of reading it: values that are cheap to make of what it reads anyway.

A cast to a longer float, a mask, a fill or a gate need not lie in memory if every kernel that reads them can make them
of operands which it loads. Above all a forward pass keeps less for the backward pass. Only element by element: a
reduction is never computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.ir.program import record
from autopar.passes.fuse.fits import Fit
from autopar.passes.fuse.groups import Groups, Unit

MOST_CALLS = 16  # that one value may take to compute again


def recompute(groups: Groups) -> None:
    """Let groups compute again what they read, where that moves fewer bytes in all."""
    changed = True
    while changed:
        changed = False
        for value in sorted(_candidates(groups), key=lambda node: -groups.facts.place[node]):
            changed |= _everywhere(groups, value) or any([_here(groups, value, unit) for unit in _readers(groups, value)])


def _candidates(groups: Groups) -> Iterator[fx.Node]:
    """The values that a group gives to another one, made element by element."""
    for unit in groups.groups():
        assert unit.fit is not None
        for value in unit.fit.results:
            if value in unit.calls and _is_cheap(groups, value) and value not in unit.fit.columns:
                yield value


def _is_cheap(groups: Groups, call: fx.Node) -> bool:
    how = groups.facts.how.get(call)
    return call in groups.facts.joins and how is not None and how.kind in ("point", "draw", "view")


def _readers(groups: Groups, value: fx.Node) -> list[Unit]:
    """The other groups that read a value."""
    found = {groups.of[user]: None for user in groups.facts.users[value] if user in groups.of}
    mine = groups.of[value]
    return [unit for unit in found if unit is not mine and unit.fit is not None and value in unit.fit.operands()]


def _everywhere(groups: Groups, value: fx.Node) -> bool:
    """Compute a value again wherever it is read, so that it is never written; True if that was done."""
    mine, readers = groups.of[value], _readers(groups, value)
    others = [user for user in groups.facts.users[value] if groups.of.get(user) not in (mine, *readers)]
    again = [unit for user in others if (unit := groups.of.get(user)) is not None and value in unit.copies]
    if not readers or len(others) > len(again) or value in mine.gone:
        return False
    fits = [_with_copies(groups, value, unit) for unit in readers]
    assert mine.fit is not None
    smaller = Fit.of(groups.facts, mine.fit.calls, mine.copies, {**mine.gone, value: None})
    before = mine.fit.moved() + sum(unit.fit.moved() for unit in readers if unit.fit is not None)
    if not isinstance(smaller, Fit) or any(fit is None for fit in fits):
        return False
    if smaller.moved() + sum(fit.moved() for fit in fits if fit is not None) >= before:
        return False
    mine.gone[value] = None
    mine.fit = smaller
    for unit, fit in zip(readers, fits, strict=True):
        assert fit is not None
        _take(unit, fit)
    return True


def _here(groups: Groups, value: fx.Node, unit: Unit) -> bool:
    """Compute a value again in one group that reads all it takes already; True if that was done."""
    fit = _with_copies(groups, value, unit)
    assert unit.fit is not None
    if fit is None or fit.moved() >= unit.fit.moved() or not fit.operands().keys() <= unit.fit.operands().keys():
        return False
    _take(unit, fit)
    return True


def _take(unit: Unit, fit: Fit) -> None:
    unit.fit = fit
    unit.copies.update(dict.fromkeys(fit.copies))


def _with_copies(groups: Groups, value: fx.Node, unit: Unit) -> Fit | None:
    """A group that makes a value itself; None where it cannot."""
    facts, fit = groups.facts, unit.fit
    assert fit is not None
    known = {*fit.operands(), *fit.inside} - {value}
    copies = {**unit.copies}
    todo = [value]
    while todo:
        node = todo.pop()
        if node in known or node in copies:
            continue
        if node is not value and _is_stored(groups, node) and not _is_worth(groups, node, unit):
            continue
        if not _is_cheap(groups, node) or len(copies) > MOST_CALLS or node in unit.calls:
            return None
        copies[node] = None
        todo += [read.value for read in facts.reads[node]]
    if not _is_earlier(copies, unit):
        return None
    calls = sorted({*unit.calls, *copies}, key=facts.place.__getitem__)
    found = Fit.of(facts, calls, copies, unit.gone)
    return found if isinstance(found, Fit) else None


def _is_earlier(copies: dict[fx.Node, None], unit: Unit) -> bool:
    """The forward pass computes nothing of the backward pass."""
    phase = record(unit.calls[0]).phase
    return all(record(node).phase in ("forward", phase) for node in copies)


def _is_stored(groups: Groups, node: fx.Node) -> bool:
    """True for a value that lies in memory."""
    unit = groups.of.get(node)
    return unit is None or unit.fit is None or node in unit.fit.results


def _is_worth(groups: Groups, node: fx.Node, unit: Unit) -> bool:
    """True for a stored value that is made of less than it is: of nothing, or of a shorter type that is there."""
    if not _is_cheap(groups, node):
        return False
    reads = groups.facts.reads[node]
    if not all(_is_stored(groups, read.value) for read in reads):
        return False
    return sum(groups.facts.seen_bytes(read) for read in reads) < groups.facts.bytes_(node)
