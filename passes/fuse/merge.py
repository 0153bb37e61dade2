"""The order in which groups grow: first along values that one makes and another reads, then beside shared operands."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.passes.fuse.facts import Facts
from autopar.passes.fuse.fits import KernelFit, read_bytes
from autopar.passes.fuse.groups import Groups, Unit

LEAST_SHARED = 256  # the part of what a group moves that it must share with another: one in so many bytes


def merged(facts: Facts) -> Groups:
    """The groups of a program: no two of them could be one that moves fewer bytes."""
    groups = Groups.single(facts)
    while True:
        while _along(groups):
            pass
        if not _beside(groups):
            return groups


def _along(groups: Groups) -> bool:
    """Merge along values, those of the calls in order, the largest first; True if anything changed."""
    facts, changed = groups.facts, False
    for node in facts.reads:
        if node not in facts.joins:
            continue
        for read in sorted(facts.reads[node], key=lambda read: -facts.bytes_(read.value)):
            a, b = groups.of.get(read.value), groups.of[node]
            if a is not None and a is not b and not groups.merge(a, b):
                changed = True
    return changed


def _beside(groups: Groups) -> bool:
    """Merge groups that read the same, the largest first, where that moves fewer bytes; True if anything changed."""
    changed = False
    for value, users in _shared(groups):
        for a, b in _pairs(groups, value, users):
            if max(a.after, b.after) < min(a.before, b.before) and _saves(a, b) and not groups.merge(a, b):
                changed = True
                break
    return changed


def _shared(groups: Groups) -> list[tuple[fx.Node, list[Unit]]]:
    """The values that several groups read, the largest first."""
    readers: dict[fx.Node, dict[Unit, None]] = {}
    for unit in groups.groups():
        assert unit.fit is not None
        for value in unit.fit.operands():
            readers.setdefault(value, {})[unit] = None
    several = [(value, list(units)) for value, units in readers.items() if len(units) > 1]
    return sorted(several, key=lambda entry: -groups.facts.bytes_(entry[0]))


def _pairs(groups: Groups, value: fx.Node, users: list[Unit]) -> Iterator[tuple[Unit, Unit]]:
    live = set(groups.of.values())
    units = [unit for unit in users if unit in live]
    return ((a, b) for i, a in enumerate(units) for b in units[i + 1 :])


def _saves(a: Unit, b: Unit) -> bool:
    """True if what both read is as large as a value of their domain: less is in the caches. What goes element by
    element (a rotation of queries, and one of keys) may share less: that it is one launch is worth the rest."""
    assert a.fit is not None and b.fit is not None
    mine, its = a.fit.operands(), b.fit.operands()
    facts = a.fit.facts
    both = [value for value in mine if value in its and value in facts.types]
    if not a.fit.has_rows and not b.fit.has_rows:
        shared = sum(read_bytes(facts, value, mine[value]) for value in both)
        return shared * LEAST_SHARED > min(a.fit.moved(), b.fit.moved())
    return any(facts.types[value].numel >= min(_numel(a.fit), _numel(b.fit)) for value in both)


def _numel(fit: KernelFit) -> int:
    return fit.rows * fit.width
