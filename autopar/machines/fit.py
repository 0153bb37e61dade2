"""Fit a machine's constants to measured times.

Peaks and bandwidths are the best that was seen. A curve of shares has points at some of the measured sizes, by least
squares over the logarithm of times (so that a factor of two counts alike on small and on large calls), with a loss that
grows linearly beyond 20 %, which a few outliers do not move.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from autopar.machines.files import COLLECTIVES
from autopar.machines.model import ALL, ANY, FRESH, MESSAGE, PRODUCTS, Curve, Device, Link, Machine, RankGroup
from autopar.machines.samples import LEAST, PRODUCT, SHARED, STREAM, UPDATE, MeasuredCall, MeasuredTransfer, Sample

TOLERANCE = 0.2
APART = 3.9  # of sizes of transfers, which have one time each, where a call of a size has several shapes
DIGITS = 4  # of a constant
LEAST_SHARE = 2e-6  # a file takes no less than half of it
MOST_SHARE = 2.0  # of what products reach


@dataclass(frozen=True, slots=True)
class TimedPoint:
    """A measured time, fixed_us + ideal_us / share of the size."""

    size: float
    fixed_us: float
    ideal_us: float
    us: float

    @property
    def share(self) -> float:
        """At least a hundredth of the time is taken for that of the bytes."""
        return self.ideal_us / max(self.us - self.fixed_us, self.us / 100)


def fit_curve(points: Sequence[TimedPoint], apart: float = 2.0, rises: bool = False) -> Curve:
    """The shares, between 0 and 1, that give the times of the points. apart: the least factor between two sizes. rises:
    what is larger reaches no less; between neighbours the shapes that were measured differ more than their sizes do."""
    if not points:
        return ALL
    knots = _knots((point.size for point in points), apart)
    sizes, fixed, ideal, us = (np.array([getattr(p, key) for p in points]) for key in TimedPoint.__slots__)
    places = np.log(sizes)

    def shares_of(logs: np.ndarray) -> np.ndarray:
        return np.exp(logs[-1] - np.append(np.cumsum(logs[-2::-1])[::-1], 0.0) if rises else logs)

    def wrong(logs: np.ndarray) -> np.ndarray:
        return np.log((fixed + ideal / np.interp(places, np.log(knots), shares_of(logs))) / us)

    least = math.log(LEAST_SHARE)
    first = np.clip([math.log(_near(points, knot)) for knot in knots], least, 0.0)
    low, high = np.full(len(knots), least), np.full(len(knots), 1e-9)
    if rises:  # the largest share, and how much less each one is than the next
        first[:-1] = np.maximum(np.diff(first), 1e-6)
        low[:-1], high[:-1] = 0.0, -least
    result = least_squares(wrong, first, bounds=(low, high), loss="soft_l1", f_scale=TOLERANCE)
    shares = np.clip(shares_of(result.x), LEAST_SHARE, 1.0)
    return Curve(tuple((short(size), short(share)) for size, share in zip(knots, shares, strict=True)))


def short(value: float) -> float:
    """What a file says: to few digits."""
    return float(f"{value:.{DIGITS}g}")


def _knots(sizes: Iterable[float], apart: float) -> list[float]:
    """Some of the sizes, from the smallest to the largest."""
    found: list[float] = []
    for size in sorted(set(sizes)):
        if not found or size >= apart * found[-1]:
            found.append(size)
    return found if size < 2 * found[-1] else [*found, size]


def _near(points: Sequence[TimedPoint], size: float) -> float:
    """The geometric mean of the shares at a size."""
    logs = [math.log(min(1.0, max(LEAST_SHARE, point.share))) for point in points if point.size == size]
    return math.exp(sum(logs) / len(logs))


# -- a device -------------------------------------------------------------------------------------------------------


def fit_device(samples: Sequence[Sample], memory: float, main: str, is_host: bool = False) -> Device:
    """A device from the times of its calls. main: the dtype whose products give the curve. is_host: large results get
    new pages, so their times say nothing of the memory's bandwidth."""
    calls = [(sample.item, sample.us) for sample in samples if isinstance(sample.item, MeasuredCall)]
    products, streams = ([(call, us) for call, us in calls if call.kind == kind] for kind in (PRODUCT, STREAM))
    fresh = [(call, us) for call, us in streams if is_host and call.result >= FRESH]
    streams = [pair for pair in streams if pair not in fresh]
    reached = [(call.dtype, call.flops / us * 1e6) for call, us in products]
    peaks = {dtype: short(max(speed for each, speed in reached if each == dtype)) for dtype in _dtypes(products)}
    bandwidth = short(max(call.bytes_ / us * 1e6 for call, us in streams))
    device = Device(
        peaks, bandwidth, short(memory), short(min(us for call, us in calls if call.kind == LEAST)),
        fit_curve([TimedPoint(each.flops, 0.0, each.flops / peaks[main] * 1e6, us)
                   for each, us in products if each.dtype == main], rises=True),
        fit_curve([TimedPoint(each.bytes_, 0.0, each.bytes_ / bandwidth * 1e6, us) for each, us in streams]),
    )  # fmt: skip
    shares: dict[str, Any] = {kind: _share(device, calls, kind) for kind in SHARED}
    return replace(device, fresh=_fresh(device, fresh), update=_update(device, calls), **shares)


def _fresh(device: Device, calls: Iterable[tuple[MeasuredCall, float]]) -> float:
    """Bytes a second of new pages: by what large results take longer than their bytes do."""
    machine = _on(device, Link(1.0, 0.0, 0.0))
    more = [(call.result, us - machine.memory_us(call.bytes_)) for call, us in calls]
    speeds = [bytes_ / us * 1e6 for bytes_, us in more if us > 0]
    return short(_mean(speeds)) if speeds else math.inf


def _update(device: Device, calls: Iterable[tuple[MeasuredCall, float]]) -> float | None:
    """The share of the bandwidth that an optimizer reaches."""
    speeds = [call.bytes_ / us * 1e6 for call, us in calls if call.kind == UPDATE]
    return short(_mean(speeds) / device.bandwidth) if speeds else None


def _dtypes(products: Iterable[tuple[MeasuredCall, float]]) -> list[str]:
    """In the order of a file."""
    seen = {call.dtype for call, _ in products}
    return [dtype for dtype in PRODUCTS if dtype in seen]


def _share(device: Device, calls: Iterable[tuple[MeasuredCall, float]], kind: str) -> float:
    """The share of what a product of as many FLOPs reaches, or a memory-bound call of as many bytes."""
    machine = _on(replace(device, least_us=0.0), Link(1.0, 0.0, 0.0))
    alike = [(call, us) for call, us in calls if call.kind == kind]
    found = [machine.call_us(call.flops, call.dtype, 0.0 if call.flops else call.bytes_) / us for call, us in alike]
    return short(min(MOST_SHARE, _mean(found))) if found else 1.0


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


# -- a link ---------------------------------------------------------------------------------------------------------


def fit_link(samples: Sequence[Sample], group: RankGroup) -> Link:
    """One level of a network from the times of the transfers of a group on it.

    The start is the least latency of all kinds, and the hop what the other collectives of a ring need more. Whatever a
    kind needs beyond them at small sizes is in its curve.
    """
    pairs = [
        (each.item, each.us) for each in samples if isinstance(each.item, MeasuredTransfer) and each.item.group == group
    ]
    first = _least(pairs)
    start = min(first.values())
    ring = [us for kind, us in first.items() if kind not in ("all_reduce", MESSAGE)]
    hop = max(0.0, min(ring) - (0 if group.nodes == 1 else start)) / (group.size - 1) if ring else 0.0
    link = Link(1.0, short(start), short(hop))
    link = replace(link, bandwidth=short(max(_speeds(link, pairs))))
    kinds = [kind for kind in (MESSAGE, *COLLECTIVES) if kind in first]
    curves = {kind: fit_curve(_points(link, [pair for pair in pairs if pair[0].kind == kind]), APART) for kind in kinds}
    others = fit_curve(_points(link, [pair for pair in pairs if pair[0].kind != MESSAGE]), APART)
    return replace(link, reached={ANY: others} | curves)


def _least(pairs: Sequence[tuple[MeasuredTransfer, float]]) -> dict[str, float]:
    """By kind, of any size: what is larger takes no less."""
    kinds = {transfer.kind for transfer, _ in pairs}
    return {each: min(us for transfer, us in pairs if transfer.kind == each) for each in kinds}


def _points(link: Link, pairs: Sequence[tuple[MeasuredTransfer, float]]) -> list[TimedPoint]:
    machine = _on(Device({}, 1.0, 1.0, 0.0), replace(link, reached={ANY: ALL}))
    return [TimedPoint(transfer.bytes_, *transfer.parts_on(machine), us) for transfer, us in pairs]


def _speeds(link: Link, pairs: Sequence[tuple[MeasuredTransfer, float]]) -> list[float]:
    """Bytes a second that a rank sends, where these take at least half of the time."""
    points = _points(link, pairs)
    clear = [point for point in points if point.us > 2 * point.fixed_us] or points
    return [point.share for point in clear]


def _on(device: Device, link: Link) -> Machine:
    return Machine("", device, link, link)


# -- how well -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a machine tells the times of what was measured. mean, most: of |predicted / measured - 1|."""

    count: int
    mean: float
    most: float
    worst: Sample


def fits(machine: Machine, samples: Iterable[Sample]) -> dict[str, Fit]:
    """By kind of call and transfer."""
    found: dict[str, list[tuple[float, Sample]]] = {}
    for sample in samples:
        found.setdefault(sample.item.kind, []).append((abs(sample.item.us_on(machine) / sample.us - 1), sample))
    return {kind: _fit(errors) for kind, errors in found.items()}


def _fit(errors: Sequence[tuple[float, Sample]]) -> Fit:
    most, worst = max(errors, key=lambda pair: pair[0])
    return Fit(len(errors), sum(error for error, _ in errors) / len(errors), most, worst)
