"""Groups of calls that become one kernel each, and which two of them may be one.

Calls that no kernel computes keep their order: each has a slot. A group runs between two slots, after all that it reads
and before all that reads it. So a collective starts no later than before and is awaited no earlier, and what a product
reads or makes lives about as long as it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.program import record
from autopar.passes.fuse.facts import Facts
from autopar.passes.fuse.fits import KernelFit

END = 1 << 60
CYCLE, PHASE, BETWEEN = "a cycle", "forward and backward", "what runs between"


@dataclass(eq=False, slots=True)
class Unit:
    """Calls that run together: a group, or a single node that has no slot of its own.

    after, before: of the slots between which it runs. fit: as one kernel; None for what no kernel computes. copies:
    calls of other units that it computes again, since it reads what they read. gone: values that nobody else reads,
    since all others compute them again.
    """

    calls: list[fx.Node]
    after: int
    before: int
    fit: KernelFit | None = None
    version: int = 0
    copies: dict[fx.Node, None] = field(default_factory=dict)
    gone: dict[fx.Node, None] = field(default_factory=dict)


@dataclass(slots=True)
class Groups:
    """The units of a program, by their nodes."""

    facts: Facts
    of: dict[fx.Node, Unit] = field(default_factory=dict)
    refused: dict[tuple[int, int, int, int], str] = field(default_factory=dict)
    kept_alive: list[Unit] = field(default_factory=list)  # so that the ids in `refused` stay their own

    @classmethod
    def single(cls, facts: Facts) -> Groups:
        """Each call on its own."""
        groups = cls(facts)
        for node in facts.reads:
            if node.op != "call_function" or node in facts.slot:
                continue
            source = node.args[0] if facts.is_part(node) else None
            if isinstance(source, fx.Node):
                groups.of[node] = groups.of[source]
                continue
            unit = groups.of[node] = Unit([node], -1, END)
            unit.after = max((groups._end(read.value) for read in facts.reads[node]), default=-1)
            if node in facts.joins:
                fit = KernelFit.of(facts, unit.calls)
                unit.fit = fit if isinstance(fit, KernelFit) else None
        for node in reversed(list(groups.of)):
            unit = groups.of[node]
            unit.before = min(unit.before, min((groups._begin(user) for user in facts.users[node]), default=END))
        return groups

    def _end(self, value: fx.Node) -> int:
        """The slot after which a value is there."""
        if value in self.facts.slot:
            return self.facts.slot[value]
        return self.of[value].after if value in self.of else -1

    def _begin(self, user: fx.Node) -> int:
        """The slot before which what `user` reads must be there."""
        if user in self.facts.slot:
            return self.facts.slot[user]
        return self.of[user].before if user in self.of else END

    def groups(self) -> list[Unit]:
        """The units that a kernel computes, in the order of their first calls."""
        return [unit for unit in dict.fromkeys(self.of.values()) if unit.fit is not None]

    def merge(self, a: Unit, b: Unit) -> str:
        """Make one of two groups; or say why they stay two."""
        key = (id(a), a.version, id(b), b.version)
        if key in self.refused:
            return self.refused[key]
        calls = sorted((*a.calls, *b.calls), key=self.facts.place.__getitem__)
        found = self.why_not(a, b, calls)
        if isinstance(found, str):
            self.refused[key] = found
            self.kept_alive += [a, b]
            return found
        a.calls, a.fit, a.version = calls, found, a.version + b.version + 1
        self._move(a, max(a.after, b.after), min(a.before, b.before))
        for node in b.calls:
            self.of[node] = a
            self.of.update(dict.fromkeys(self.facts.values(node), a))
        return ""

    def why_not(self, a: Unit, b: Unit, calls: list[fx.Node]) -> KernelFit | str:
        """The two as one kernel, or why they are not one."""
        if a.fit is None or b.fit is None:
            return "an op without a kernel"
        if record(a.calls[0]).phase != record(b.calls[0]).phase:
            return PHASE
        if max(a.after, b.after) >= min(a.before, b.before):
            return BETWEEN
        fit = KernelFit.of(self.facts, calls)
        if isinstance(fit, KernelFit) and (self._reaches(a, b) or self._reaches(b, a)):
            return CYCLE
        return fit

    def _reaches(self, a: Unit, b: Unit) -> bool:
        """True if something outside of both reads a and is read by b, however far away."""
        todo = [unit for unit in self.users(a) if unit is not b]
        seen = {a, *todo}
        while todo:
            unit = todo.pop()
            if unit is b:
                return True
            if unit.after >= b.before or unit.after > b.after:
                continue  # what reads a unit comes no earlier
            new = [user for user in self.users(unit) if user not in seen]
            seen.update(new)
            todo += new
        return False

    def users(self, unit: Unit) -> Iterator[Unit]:
        """The units that read what a unit makes, those in slots aside."""
        for node in unit.calls:
            for value in (node, *self.facts.values(node)):
                for user in self.facts.users.get(value, ()):
                    found = self.of.get(user)
                    if found is not None and found is not unit:
                        yield found

    def sources(self, unit: Unit) -> Iterator[Unit]:
        """The units that make what a unit reads, those in slots aside."""
        for node in unit.calls:
            for read in self.facts.reads[node]:
                found = self.of.get(read.value)
                if found is not None and found is not unit:
                    yield found

    def _move(self, unit: Unit, after: int, before: int) -> None:
        """Narrow the slots of a unit, and of those around it."""
        unit.after, unit.before = after, before
        todo = [unit]
        while todo:
            one = todo.pop()
            todo += list(_later(self.users(one), one.after))
        todo = [unit]
        while todo:
            one = todo.pop()
            todo += list(_earlier(self.sources(one), one.before))


def _later(units: Iterable[Unit], after: int) -> Iterator[Unit]:
    for unit in units:
        if unit.after < after:
            unit.after = after
            yield unit


def _earlier(units: Iterable[Unit], before: int) -> Iterator[Unit]:
    for unit in units:
        if unit.before > before:
            unit.before = before
            yield unit
