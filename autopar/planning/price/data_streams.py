"""What the graphs of a stage take, with what they move over the data axes beside their calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from autopar.ir.mesh import Mesh
from autopar.ir.ops.measure import group_of
from autopar.machines import Machine
from autopar.passes.overlap.bucket import SCATTER, Sum
from autopar.passes.overlap.prefetch import Ahead, Gather
from autopar.planning.price.cost import Cost, Pace
from autopar.planning.price.moving import (
    COPIES,
    GATHER,
    LOSS,
    SHARDS,
    TENSOR,
    DataGroups,
    Known,
    Moving,
    Net,
    first_of,
    last_of,
    sums_of,
)  # fmt: skip
from autopar.planning.shallow.graph_track import BACKWARD, FORWARD, ParameterPlace
from autopar.planning.shallow.parameter_use import Weight
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.deal import Moved, Part, Ranges, Section, Sections, Share

FIRST, LAST = 2, 1  # whole layers of a stage that are looked at before, and behind, those that are like them
LAYERS, AGAIN = 1, 3  # the sections of the equal layers, and of those that compute more again, between 0 and 2
EQUAL = (LAYERS, AGAIN)
CLOSE = 1e-9  # of a section: places that are this near are one


@dataclass(frozen=True, slots=True)
class Data:
    """What a plan moves over its data axes, and with what. asked: `StepOptions.bucket_bytes`. known: us of collectives,
    by kind, bytes and group."""

    candidate: Candidate
    machine: Machine
    asked: int | None
    known: Known

    @property
    def groups(self) -> DataGroups:
        return DataGroups.of(self.candidate, self.machine.ranks)

    @property
    def net(self) -> Net:
        """Between which ranks what moves."""
        axes, groups, ranks = Mesh(self.candidate.axes), self.groups, self.machine.ranks
        named = {SHARDS: groups.shards, COPIES: groups.copies}
        if TENSOR in axes:
            named[TENSOR] = group_of(axes, TENSOR, ranks)
        if self.candidate.data > 1:
            named[LOSS] = groups.all
        return Net(self.machine, named, self.asked, self.known)

    @property
    def is_each(self) -> bool:
        """True if data is moved for each micro-batch, and not once a step."""
        return self.candidate.zero >= 2 and self.candidate.data > 1

    def moved_us(self, sections: Sections) -> Moved:
        """us of what moves of each weight for each micro-batch, by section: the compiler cuts as if it computed that
        long."""
        net = self.net
        return tuple(tuple(self._moved_us(one, net) for one in part.weights) for part in sections.all)

    def _moved_us(self, weight: Weight, net: Net) -> float:
        reads = (1 + weight.again) * self.candidate.gathers_again
        gathered = reads * net.us(GATHER, weight.read, SHARDS) if reads else 0.0
        return gathered + (net.us(SCATTER, weight.gradient, SHARDS) if weight.gradient else 0.0)

    def graphs(
        self, share: Share, slots: Sequence[WeightSlot], cost: Cost, known: dict[Hashable, MovingGraph]
    ) -> dict[str, MovingGraph]:  # fmt: skip
        """The graphs of a stage by kind, F and B or its halves I and W. A graph waits for all that it moves before it
        ends. cost: of the whole model. known: of the stages before it, of which many are alike.

        A parameter of ZeRO-3 is gathered while the layer before it computes (`passes/overlap/prefetch.py`), and with
        ZeRO-2 and ZeRO-3 gradients are scattered in buckets (`passes/overlap/bucket.py`).
        """
        graphs: dict[str, MovingGraph] = {}
        freed = cost.freed(self.candidate.halves)
        for kind, pace in cost.paces(self.candidate.halves).items():
            is_read, is_left = self.candidate.gathers_again and kind != "W", self.is_each and kind in "BW"
            order = slots if is_read or is_left else merged(share)
            key = kind, *alike(order)
            if key not in known:
                known[key] = MovingGraph(self, order if kind == "F" else order[::-1], is_read, is_left, kind != "F")
                known[key].run(pace, freed[kind])
            graphs[kind] = known[key]
        return graphs

    def first(self, slots: Sequence[WeightSlot], once: float) -> Moving:
        """What a rank does before its first micro-batch. once: us of what it computes then, of whole parameters."""
        candidate, net = self.candidate, self.net
        once /= candidate.shards
        if not candidate.zero or candidate.gathers_again or candidate.data == 1:
            moving = Moving(net)
            moving.streams.compute(once, 0.0)
            return moving
        # what is frozen is whole before
        gathers = list(_gathers(FORWARD, slots, lambda weight: weight.gradient > 0 or candidate.zero == 3))
        read = sum(gather.bytes_ for gather in gathers)
        # what is computed of all that moves together counts as one call: `once` has the launches of small ones
        bundles = [bundle for layer in Ahead(gathers, net.small).layers for bundle in layer] if once else []
        made = {bundle.members[0].of: once * bundle.bytes_ / read for bundle in bundles}
        return first_of(net, gathers, made)

    def last(self, slots: Sequence[WeightSlot]) -> Moving:
        """What a rank does behind the last micro-batch: sums of gradients, and that of the loss."""
        return last_of(self.net, list(self.sums_behind(slots)))

    def sums_behind(self, slots: Sequence[WeightSlot]) -> Iterator[Sum[ParameterPlace]]:
        """The sums of gradients of these."""
        kept = (slot for slot in slots[::-1] if slot.weight and not slot.weight.lent)
        return _gradients(self.candidate, kept, not self.is_each)


def _gathers(
    kind: str, slots: Iterable[WeightSlot], is_read: Callable[[Weight], bool]
) -> Iterator[Gather[ParameterPlace]]:
    """Gathers of those weights that a graph reads, in the order of their use."""
    for slot in slots:
        if slot.weight is not None and is_read(slot.weight):
            weight, layer = slot.weight, (slot.unit, slot.weight.unit)
            yield Gather(slot.place(kind), layer, SHARDS, weight.dtype, weight.read)


def _gradients(
    candidate: Candidate, slots: Iterable[WeightSlot], over_data: bool, is_part: bool = False
) -> Iterator[Sum[ParameterPlace]]:
    """Yield the sums of a stage's gradients, chain by chain, as `sums_of` says."""
    chain = sums_of(candidate, over_data, is_part)
    for slot in slots:
        if slot.weight is not None and slot.weight.gradient:
            yield from chain(slot.place(BACKWARD), slot.weight.gradient, "", ())


class MovingGraph:
    """A graph of a stage. is_read: it gathers what it reads. is_left: it scatters gradients. is_backward: it reads what
    the backward pass reads. alive: bytes of both at most, by section, in the equal layers less those of what the layers
    before have let go of: as `Peaks` counts what is kept."""

    def __init__(
        self, data: Data, slots: Sequence[WeightSlot], is_read: bool, is_left: bool, is_backward: bool
    ) -> None:
        self.kind = BACKWARD if is_backward else FORWARD
        self.moving, enough = Moving(data.net, is_added=True), 0.0
        if is_left:
            self.moving.sum(_gradients(data.candidate, slots, True, is_part=True), data.candidate.is_hosted)
            assert self.moving.buckets is not None
            enough = 2 * self.moving.buckets.most
        self.slots, self.last, self.left_out = few(slots, enough)
        if is_read:
            self.moving.gather(_gathers(self.kind, self.slots, lambda weight: weight.again or not is_backward), {})
        self.alive = [-math.inf, -math.inf, -math.inf]
        self.freed = self.gone = 0.0

    def run(self, pace: Pace, freed: Sequence[float]) -> None:
        """freed: bytes that each layer lets go of, by section."""
        moving, begin, unit = self.moving, (0.0, 0.0, 0.0, 0.0), -1
        read: Gather[ParameterPlace] | None = None
        for slot in self.slots:
            if unit != slot.unit:
                if self.left_out and unit == self.last:
                    self._leave_out(begin)
                begin, unit, self.gone = self._state, slot.unit, self.freed
            place = slot.place(self.kind)
            if place in moving.gathers:
                self._let_go(read)
                read = moving.gathers[place]
                moving.use(read)
            busy, launched = pace[slot.section]
            moving.streams.compute(slot.share * busy, slot.share * launched)
            if place in moving.sums:
                moving.give(moving.sums[place], moving.sums[place].bytes_)
            self._count(slot.section)
            self.freed += slot.share * freed[slot.section]
        moving.flush()
        if self.slots:
            self._count(self.slots[-1].section)

    def _let_go(self, read: Gather[ParameterPlace] | None) -> None:
        """What moved together goes when the last of it was read."""
        if read is not None and self.moving.ahead is not None:
            members = self.moving.ahead.place[read][1].members
            for member in members if members[-1] is read else ():
                self.moving.let_go(member.of)

    @property
    def _state(self) -> tuple[float, float, float, float]:
        streams = self.moving.streams
        return streams.host, streams.device, streams.moving[SHARDS], self.freed

    def _leave_out(self, begin: Sequence[float]) -> None:
        """Each of the layers that are left out takes as long as the one before them. begin: of that one."""
        host, device, moving, freed = (
            self.left_out * (now - then) for now, then in zip(self._state, begin, strict=True)
        )
        streams, ends = self.moving.streams, self.moving.ends
        streams.skip(host, device, {SHARDS: moving})
        self.freed += freed
        for what in ends:  # what is on its way arrives so much later
            ends[what] += moving

    def _count(self, section: int) -> None:
        alive, at = self.moving.most(), LAYERS if section in EQUAL else section
        self.alive[at] = max(self.alive[at], alive - self.gone * (at == LAYERS))


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
    """The slots of each stage, in the order of the forward pass. shares: of all stages, in a row. layers: of the
    model, equal ones; ranges: those of them that compute more again."""
    slots: list[tuple[WeightSlot, ...]] = []
    begin = Part(0.0, 0.0, 0.0)
    for share in shares:
        end = begin + share.time
        slots.append(tuple(_slots(sections, begin, end, layers, ranges)))
        begin = end
    return tuple(slots)


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


def alike(slots: Sequence[WeightSlot]) -> Iterator[Hashable]:
    """All that a graph of these slots follows from: where they lie in the model counts for nothing."""
    for slot in slots:
        yield slot.section, slot.unit - slots[0].unit, slot.share, slot.weight and slot.weight.name


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
