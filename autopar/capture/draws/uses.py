"""Know which parameters a step uses, by how its coins come up: the plain module gives the others no gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.capture.draws.joins import CoinJoin
from autopar.capture.draws.trail import UNKNOWN, Place, Trail

_KEPT = 1024  # ways through the coins of which the answer is kept


@dataclass(frozen=True, slots=True)
class Uses:
    """Where the results of a step come from. loss: what is differentiated. operands: of each call. instead: of each
    result that a coin may leave out, the coin, the side on which it does, and what is used then. writers: of a memory
    the calls that write into it, by their operands, each with the coin and the side that leaves it out (-1: none).
    births: the memory of each result. names: of parameters among the inputs."""

    loss: Place
    operands: Mapping[tuple[int, int], Sequence[Place]]
    instead: Mapping[Place, tuple[int, bool, Place]]
    writers: Mapping[Place, Sequence[tuple[int, bool, Sequence[Place]]]]
    births: Mapping[Place, Place]
    names: Sequence[str | None]
    _known: dict[tuple[bool, ...], frozenset[str]] = field(default_factory=dict)

    @staticmethod
    def of(trail: Trail, joins: Mapping[int, CoinJoin], names: Sequence[str | None]) -> Uses:
        """What a run has shown, which ended with its results."""
        steps = {(s, n): step for s, segment in enumerate(trail.segments) for n, step in enumerate(segment)}
        writers: dict[Place, list[tuple[int, bool, Sequence[Place]]]] = {}
        for (segment, number), step in steps.items():
            join = joins.get(segment - 1)
            is_left_out = join is not None and join.start <= number < join.end
            side = (join.coin, not join.keeps) if join is not None and is_left_out else (-1, False)
            for memory in step.written:
                writers.setdefault(memory, []).append((*side, step.operands))
        instead = {v: (join.coin, not join.keeps, u) for join in joins.values() for v, u in join.pairs}
        operands = {key: step.operands for key, step in steps.items()}
        return Uses(trail.segments[-1][-1].operands[0], operands, instead, writers, dict(trail.births), tuple(names))

    def unused(self, coins: Sequence[bool]) -> frozenset[str]:
        """The parameters that the loss does not hang on. coins: as they come up."""
        key = tuple(coins)
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = self._found(key)
        return self._known[key]

    def _found(self, coins: tuple[bool, ...]) -> frozenset[str]:
        seen, pending = set[Place](), [self.loss]
        used = set[str]()
        while pending:
            place = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            if place[0] == UNKNOWN[0]:
                return frozenset()  # it may hang on anything
            if place[0] == "input" and place[1] < len(self.names):
                used.add(self.names[place[1]] or "")
            pending += self._before(place, coins)
        return frozenset(name for name in self.names if name is not None and name not in used)

    def _before(self, place: Place, coins: tuple[bool, ...]) -> Iterator[Place]:
        """What a result is made of."""
        coin, side, other = self.instead.get(place, (-1, False, place))
        if coin >= 0 and coins[coin] == side:
            yield other
            return
        if place[0] == "call":
            yield from self.operands[place[1], place[2]]
        yield from (part for part in place if isinstance(part, tuple) and part and isinstance(part[0], str))
        for coin, side, operands in self.writers.get(self.births.get(place, place), ()):
            if coin < 0 or coins[coin] != side:
                yield from operands
