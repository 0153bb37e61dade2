"""Layers that are alike, and that a road is without. Once each takes as long and leaves as much as the one before it,
so do those that are left out."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from autopar.passes.costs.streams import Streams
from autopar.passes.overlap.bucket import SCATTER, Buckets, Sum
from autopar.passes.overlap.coalesce import Together
from autopar.planning.shallow.graph_track import ParameterPlace

HOST, DEVICE = "host", "device"  # beside the axes
CLOSE = 1e-9
PERIODS = (1, 2, 3)  # layers, behind which buckets of gradients may be as they were; all divide `TOGETHER`


class UnsteadyError(Exception):
    """Layers that are alike do not take as long, or hold as much, one as the other: all of them are simulated."""


class AtWork(Protocol):
    """What is seen here of `Moving`, which says what each is."""

    streams: Streams
    buckets: Buckets[ParameterPlace] | None
    ends: dict[Hashable, float]
    whole: dict[Hashable, float]
    lies_in: dict[ParameterPlace, float]
    moves: list[tuple[bool, str, float]]
    level: float
    alive: float
    gone: float


@dataclass(frozen=True, slots=True)
class Before:
    """A rank at work before a layer. clocks: us of the host, the device and the collectives of each axis. held: bytes
    of what is alive, of what went that was lent, and of what gathers in each bucket, and lies where it was made; how
    many sums that are scattered are on their way. lasting: how many others are; moves: how many began, or ended."""

    clocks: Mapping[Hashable, float]
    held: Mapping[Hashable, float]
    lasting: int
    moves: int

    @classmethod
    def of(cls, moving: AtWork) -> Before:
        streams = moving.streams
        clocks = {HOST: streams.host, DEVICE: streams.device, **streams.moving}
        held: dict[Hashable, float] = {"level": moving.level, "alive": moving.alive, "gone": moving.gone}
        if moving.buckets is None:
            return cls(clocks, held, 0, len(moving.moves))
        lasting, lies_in = len(moving.buckets.started) - len(moving.buckets.scattered), moving.lies_in
        held[SCATTER] = len(moving.buckets.scattered)
        for key, bucket in moving.buckets.open.items():
            held["bytes", key] = bucket.bytes_
            held["lies in", key] = sum(lies_in.get(each.of, each.bytes_) for each in bucket.members)
        return cls(clocks, held, lasting, len(moving.moves))


def _lasting(buckets: Buckets[ParameterPlace]) -> list[Together[Sum[ParameterPlace]]]:
    """Sums that nobody awaits before all have started."""
    return [bucket for bucket in buckets.started if bucket.members[0].kind != SCATTER]


def leave_out(moving: AtWork, count: int, layers: Sequence[Before]) -> None:
    """Go on as if `count` more layers had run, like the last ones. layers: before each of them, and behind all. Raises
    UnsteadyError where none are like those before them, or would not stay as they are."""
    for period in PERIODS:
        last = layers[-1], layers[-1 - period], layers[-1 - 2 * period]
        if _is_steady(moving, last, count // period):
            _leave_out(moving, count // period, last[0], last[1])
            return
    raise UnsteadyError


def _is_steady(moving: AtWork, layers: tuple[Before, Before, Before], times: int) -> bool:
    """layers: now, before the last ones, and before as many before these. times: that these are left out."""
    now, second, first = layers
    growth = _growth(now.clocks, second.clocks, first.clocks)
    held = _growth(now.held, second.held, first.held)
    if growth is None or held is None or held.get(SCATTER) or _turns(now.clocks, growth, times):
        return False
    if now.lasting - second.lasting != second.lasting - first.lasting:
        return False
    if moving.buckets is not None:
        for key, bucket in moving.buckets.open.items():
            member = bucket.members[0]
            if bucket.bytes_ + times * held["bytes", key] >= moving.buckets.limits[member.kind, member.over]:
                return False  # it would move meanwhile
    return moving.moves[first.moves : second.moves] == moving.moves[second.moves :]


def _growth(now: Mapping[Hashable, float], *before: Mapping[Hashable, float]) -> Mapping[Hashable, float] | None:
    """By how much each value grew, if it did so twice."""
    second, first = before
    if not first.keys() == second.keys() == now.keys():
        return None
    growth = {key: value - second[key] for key, value in now.items()}
    for key, each in growth.items():
        if not math.isclose(each, second[key] - first[key], rel_tol=CLOSE, abs_tol=CLOSE * abs(now[key])):
            return None
    return growth


def _turns(clocks: Mapping[Hashable, float], growth: Mapping[Hashable, float], times: int) -> bool:
    """True if of two clocks that which is behind would pass the other one."""
    for one, other in combinations(clocks, 2):
        apart = clocks[one] - clocks[other]
        if apart * (apart + times * (growth[one] - growth[other])) < 0:
            return True
    return False


def _leave_out(moving: AtWork, times: int, now: Before, before: Before) -> None:
    """before: the last layers, which are left out so many times more."""
    streams, buckets = moving.streams, moving.buckets
    clocks = {key: times * (value - before.clocks[key]) for key, value in now.clocks.items()}
    held = {key: times * (value - before.held[key]) for key, value in now.held.items()}
    streams.skip(clocks[HOST], clocks[DEVICE], {axis: clocks[axis] for axis in streams.moving})
    for what in moving.ends:
        assert isinstance(what, Together)
        moving.ends[what] += clocks.get(str(what.members[0].over), clocks[DEVICE])
    moving.level += held["level"]
    moving.alive += held["alive"]
    moving.gone += held["gone"]
    moving.moves += times * moving.moves[before.moves :]
    if buckets is None:
        return
    for bucket in times * _lasting(buckets)[before.lasting :]:
        another = Together(bucket.members, bucket.bytes_)
        buckets.started.append(another)
        moving.ends[another], moving.whole[another] = moving.ends[bucket], moving.whole[bucket]
    for key, bucket in buckets.open.items():
        bucket.bytes_ += held["bytes", key]
        last = bucket.members[-1]
        moving.lies_in[last.of] = moving.lies_in.get(last.of, last.bytes_) + held["lies in", key]
