"""The calls of each stage of a pipeline, by the parameters that they read: between these data is moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from autopar.planning.shallow.graph_track import ParameterPlace
from autopar.planning.shallow.parameter_use import Weight
from autopar.planning.space.deal import Part, Ranges, Section, Sections, Share

FIRST, LAST = 2, 1  # whole layers of a stage that are looked at before, and behind, those that are like them
LAYERS, AGAIN = 1, 3  # the sections of the equal layers, and of those that compute more again, between 0 and 2
EQUAL = (LAYERS, AGAIN)
CLOSE = 1e-9  # of a section: places that are this near are one


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """What a stage computes from the first use of a weight to that of the next one. section: 0 before the equal layers,
    1 in one of them, 2 behind them, 3 in one that computes more again. unit: which section on the way through the
    model. share: of the section's time. weight: None where a weight of the stage before is at work."""

    section: int
    unit: int
    share: float
    weight: Weight | None

    def place(self, kind: str) -> ParameterPlace:
        """Where a graph of this kind reads its weight, or gives the gradient."""
        return ParameterPlace(kind, self.unit, self.weight.name if self.weight else "")


def slots_of(
    sections: Sections, shares: Sequence[Share], layers: int, ranges: Ranges = ()
) -> tuple[tuple[WeightSlot, ...], ...]:
    """Of each stage, in the order of the forward pass. shares: of all stages, one after the other. layers: of the
    model, equal ones; ranges: those of them that compute more again."""
    found: list[tuple[WeightSlot, ...]] = []
    begin = Part(0.0, 0.0, 0.0)
    for share in shares:
        end = begin + share.time
        found.append(tuple(_slots(sections, begin, end, layers, ranges)))
        begin = end
    return tuple(found)


def few(slots: Sequence[WeightSlot], enough: float) -> tuple[Sequence[WeightSlot], int, int]:
    """The slots of a stage without some of its whole layers, which are all alike; the unit of the last one before
    these, and how many they are. enough: bytes of gradients that are left with the layers before them."""
    layers = {slot.unit: slot.section for slot in slots if slot.section in EQUAL}
    inner = list(layers.items())[1:-1]  # those at the ends may be parts
    alike = (list(run) for _, run in groupby(inner, key=lambda pair: pair[1]))
    units = [unit for unit, _ in max(alike, key=len, default=[])]
    if len(units) <= FIRST + LAST:
        return slots, -1, 0
    layer = sum(slot.weight.gradient for slot in slots if slot.unit == units[0] and slot.weight)
    first = max(FIRST, math.ceil(enough / layer) + 1 if layer else 0)
    gone = frozenset(units[first:-LAST])
    return [slot for slot in slots if slot.unit not in gone], units[first - 1] if gone else -1, len(gone)


def merged(share: Share) -> tuple[WeightSlot, ...]:
    """The slots of a stage between which nothing is moved, as one for each section."""
    part = share.time
    each = part.entry, part.layers - part.again, part.behind, part.again
    return tuple(WeightSlot(i, i, share, None) for i, share in enumerate(each) if share)


def _slots(sections: Sections, begin: Part, end: Part, layers: int, ranges: Ranges) -> Iterator[WeightSlot]:
    yield from _between(sections.entry, 0, 0, begin.entry, end.entry)
    for number in range(math.floor(begin.layers + CLOSE), math.ceil(end.layers - CLOSE)):
        low, high = max(begin.layers - number, 0.0), min(end.layers - number, 1.0)
        kind = AGAIN if any(first <= number < last for first, last in ranges) else LAYERS
        yield from _between(sections.all[kind], kind, 1 + number, low, high)
    yield from _between(sections.behind, 2, 1 + layers, begin.behind, end.behind)


def _between(section: Section, kind: int, unit: int, low: float, high: float) -> Iterator[WeightSlot]:
    """The slots of a section between two shares of its time."""
    own = [weight for weight in section.weights if low - CLOSE <= weight.at < high - CLOSE]
    ends = [*(weight.at for weight in own), high]
    if ends[0] > low + CLOSE:
        yield WeightSlot(kind, unit, ends[0] - low, None)
    for weight, (start, end) in zip(own, pairwise(ends), strict=True):
        yield WeightSlot(kind, unit, end - start, weight)
