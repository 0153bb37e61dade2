"""Join the two sides of a coin where one of them only leaves calls out: LayerDrop, stochastic depth.

Runs on shapes, with one coin or another come up on its other side, show which calls it leaves out and what the calls
behind them take instead of their results. The step then makes these calls and chooses: `where(coin, u, v)`. That is one
program for all coins, in place of two for each. A coin for which the runs do not fit decides a program of its own.

    kept      v = layer(u)   w = head(v)
    left out                 w = head(u)
    joined    v = layer(u)   w = head(where(coin, u, v))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.capture.draws.trail import Place, Trail, TrailStep

MOST = 64  # coins of a step that may be joined; of more each decides a program
Sides = Mapping[int, Any]  # by the number of the coin; of the others False
Run = Callable[[Sides], Trail | None]  # None: it fails


class _Unfit(Exception):
    """A run that is not what the others say it should be."""


@dataclass(frozen=True, slots=True)
class CoinJoin:
    """A coin whose other side leaves out some calls of its segment, from `start` to `end`. pairs: of each result of
    theirs that is used later, what is used instead. before, draws: random ops before them and among them."""

    coin: int
    keeps: bool  # the side that makes the calls
    start: int
    end: int
    pairs: tuple[tuple[Place, Place], ...] = ()
    before: int = 0
    draws: int = 0

    def has(self, place: Place) -> bool:
        """True for a result of the calls that are left out, and for what torch makes of such."""
        if place[0] == "by":
            return any(isinstance(part, tuple) and self.has(part) for part in place)
        return place[0] == "call" and place[1] == self.coin + 1 and self.start <= place[2] < self.end


@dataclass(frozen=True, slots=True)
class CoinPlan:
    """joins: by coin. alone: the coins that decide a program."""

    joins: Mapping[int, CoinJoin]
    alone: frozenset[int]

    def side(self, coin: int) -> bool:
        """The side on which all is computed."""
        return coin in self.joins and self.joins[coin].keeps


def plan(run: Run, fixed: Sides) -> CoinPlan:
    """How the coins of a model become part of its step. run: makes a run with these sides, and False for all else.
    fixed: of coins that are known to decide programs."""
    first = run(fixed)
    if first is None:
        return CoinPlan({}, frozenset())
    count = len(first.coins)
    free = [coin for coin in range(count) if coin not in fixed and first.reads[coin] is bool]
    alone = set(fixed)
    if count <= MOST:
        for sets in (_sets, _each):
            try:
                joinable = [coin for coin in free if coin not in alone]
                return CoinPlan(_joins(run, dict(fixed), joinable, first, sets), frozenset(alone))
            except _Unfit:
                alone |= {coin for coin in free if not _fits(run, fixed, coin, first)} if sets is _sets else set()
    return CoinPlan({}, frozenset(range(count)))


def _fits(run: Run, fixed: Sides, coin: int, first: Trail) -> bool:
    try:
        _joins(run, dict(fixed), [coin], first, _sets)
    except _Unfit:
        return False
    return True


def _joins(
    run: Run, fixed: dict[int, Any], free: list[int], first: Trail, sets: Callable[[list[int]], list[list[int]]]
) -> dict[int, CoinJoin]:
    """The joins of these coins, from runs in which some of them leave out; every two of them differ in one. sets: of
    coins that leave out together."""
    if not free:
        return {}
    flipped = _run(run, {**fixed, **dict.fromkeys(free, True)})
    if len(flipped.segments) != len(first.segments):  # another side meets other coins
        raise _Unfit
    longer = {coin: len(flipped.segments[coin + 1]) > len(first.segments[coin + 1]) for coin in free}
    kept = {**fixed, **longer}
    whole = first if not any(longer.values()) else _run(run, kept)
    joins: dict[int, CoinJoin] = {}
    pairs: dict[tuple[int, Place], Place] = {}
    for dropped in sets(free):
        other = _run(run, {**kept, **{coin: not kept[coin] for coin in dropped}})
        for coin in dropped:
            found = _left_out(coin, kept[coin], whole, other)
            if joins.setdefault(coin, found) != found:
                raise _Unfit
        _compare(whole, other, {coin: joins[coin] for coin in dropped}, pairs)
    for (_, place), instead in pairs.items():
        if whole.shapes.get(place) != whole.shapes.get(instead) or place[0] != "call":
            raise _Unfit
    of_coin = {coin: tuple((v, u) for (c, v), u in pairs.items() if c == coin) for coin in joins}
    return {coin: replace(join, pairs=of_coin[coin]) for coin, join in joins.items()}


def _run(run: Run, sides: Sides) -> Trail:
    trail = run(sides)
    if trail is None:
        raise _Unfit
    return trail


def _sets(coins: list[int]) -> list[list[int]]:
    """Sets of coins that leave out together: of every two there is one with the first and without the second."""
    if len(coins) == 1:
        return [coins]
    found = []
    for bit in range((len(coins) - 1).bit_length()):
        for value in (1, 0):
            found.append([coin for i, coin in enumerate(coins) if i >> bit & 1 == value])
    return [*found, coins]


def _each(coins: list[int]) -> list[list[int]]:
    """Sets of one coin each before those, which say where results come from that several leave out."""
    return [*([coin] for coin in coins), *_sets(coins)]


def _left_out(coin: int, keeps: bool, whole: Trail, other: Trail) -> CoinJoin:
    """The calls that a run leaves out of the segment of a coin."""
    if len(whole.segments) != len(other.segments):
        raise _Unfit
    steps, rest = whole.segments[coin + 1], other.segments[coin + 1]
    count = len(steps) - len(rest)
    if count < 0:
        raise _Unfit
    for start in range(len(rest) + 1):
        if [step.key for step in steps[start + count :]] == [step.key for step in rest[start:]]:
            break
        if steps[start].key != rest[start].key:
            raise _Unfit
    else:
        raise _Unfit
    join = CoinJoin(coin, keeps, start, start + count)
    draws = whole.met[coin] if start == 0 else steps[start - 1].draws
    for step in steps[start : start + count]:
        if not all(join.has(place) for place in step.written):
            raise _Unfit  # it writes into what is older
    return CoinJoin(
        coin, keeps, start, start + count, (), draws, steps[start + count - 1].draws - draws if count else 0
    )


def _compare(
    whole: Trail, other: Trail, dropped: Mapping[int, CoinJoin], pairs: dict[tuple[int, Place], Place]
) -> None:
    """Raise _Unfit unless a run is the whole one without what these coins leave out. pairs: what is used in place of
    its results, which is learnt here where it is new."""
    for number, (steps, rest) in enumerate(zip(whole.segments, other.segments, strict=True)):
        join = dropped.get(number - 1)
        steps = steps if join is None else [*steps[: join.start], *steps[join.end :]]
        if len(steps) != len(rest):
            raise _Unfit
        for step, found in zip(steps, rest, strict=True):
            _compare_step(step, found, dropped, pairs)


def _compare_step(
    step: TrailStep, found: TrailStep, dropped: Mapping[int, CoinJoin], pairs: dict[tuple[int, Place], Place]
) -> None:
    if step.key != found.key or len(step.operands) != len(found.operands):
        raise _Unfit
    for place, other in zip(step.operands, found.operands, strict=True):
        now = in_whole(other, dropped)
        expected: Place | None = place
        while expected is not None and expected != now:
            owner = next((join.coin for join in dropped.values() if join.has(expected)), None)
            if owner is None:
                raise _Unfit
            key = owner, expected
            expected = pairs.setdefault(key, now)
            if any(join.has(expected) and join.coin >= owner for join in dropped.values()):
                raise _Unfit


def in_whole(place: Place, dropped: Mapping[int, CoinJoin]) -> Place:
    """Find where the whole run has what a run without some calls has at a place."""
    if place[0] == "by":
        return tuple(in_whole(part, dropped) if isinstance(part, tuple) else part for part in place)
    join = dropped.get(place[1] - 1) if place[0] == "call" else None
    if join is None or place[2] < join.start:
        return place
    return "call", place[1], place[2] + join.end - join.start, place[3]
