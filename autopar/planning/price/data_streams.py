"""What the graphs of a stage take, with what they move over the data axes beside their calls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.measure import group_of
from autopar.machines import Machine
from autopar.machines.model import RankGroup
from autopar.passes.overlap.bucket import SCATTER, bucket_limit
from autopar.passes.overlap.prefetch import small_limit
from autopar.planning.price.cost import Cost, Pace
from autopar.planning.price.data_time import DataGroups
from autopar.planning.price.moving import COPIES, GATHER, LOSS, LOSS_BYTES, SHARDS, SUM, TENSOR, Net
from autopar.planning.price.stage_calls import EQUAL, LAYERS, WeightSlot, few, merged
from autopar.planning.shallow.parameter_use import Weight
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.deal import Rates, Sections, Share

Moved = tuple[float, float, float]  # bytes, by section
Known = dict[tuple[str, float, RankGroup], float]


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

    def rates(self, sections: Sections, cost: Cost, few: Cost) -> Rates:
        """By which the compiler cuts the sections of a model: what it moves for each micro-batch counts as what it
        computes. cost: of the rows of the candidate; few: of those of the sections."""
        link = group_of(Mesh(self.candidate.axes), PIPELINE, self.machine.ranks)
        longer = (now / before if before else 1.0 for now, before in zip(_busy(cost), _busy(few), strict=True))
        sent = self.machine.message_us(cost.message, link) / self.machine.message_us(few.message, link)
        return Rates(tuple(longer), sent, tuple(tuple(map(self._moved_us, part.weights)) for part in sections.all))

    def _moved_us(self, weight: Weight) -> float:
        group, reads = self.groups.shards, (1 + weight.again) * self.candidate.gathers_again
        gathered = reads * self.collective_us(GATHER, weight.read, group) if reads else 0.0
        return gathered + (self.collective_us(SCATTER, weight.gradient, group) if weight.gradient else 0.0)

    def collective_us(self, kind: str, bytes_: float, group: RankGroup) -> float:
        """As of `Machine`."""
        key = kind, bytes_, group
        if key not in self.known:
            self.known[key] = self.machine.collective_us(*key)
        return self.known[key]

    def graphs(self, share: Share, slots: Sequence[WeightSlot], cost: Cost) -> tuple[dict[str, float], Moved]:
        """us of the graphs of a stage by kind, F and B or its halves I and W, and the bytes of what the backward pass
        moves. A graph waits for all that it moves before it ends. cost: of the whole model.

        A parameter of ZeRO-3 is gathered while the layer before it computes (`passes/overlap/prefetch.py`), and with
        ZeRO-2 and ZeRO-3 gradients are scattered in buckets (`passes/overlap/bucket.py`).
        """
        took: dict[str, float] = {}
        moved = -math.inf, -math.inf, -math.inf
        freed = cost.freed(self.candidate.halves)
        for kind, pace in cost.paces(self.candidate.halves).items():
            is_read, is_left = self.candidate.gathers_again and kind != "W", self.is_each and kind in "BW"
            order = slots if is_read or is_left else merged(share)
            graph = _Graph(self, order if kind == "F" else order[::-1], is_read, is_left, kind != "F")
            took[kind] = graph.us(pace, freed[kind])
            if kind != "F":
                before, inner, behind = map(max, moved, graph.alive)
                moved = before, inner, behind
        return took, moved

    def before_us(self, slots: Sequence[WeightSlot], once: float) -> float:
        """us of what a rank does before its first micro-batch. once: of what it computes then, of whole parameters."""
        candidate, groups = self.candidate, self.groups
        once /= groups.shards.size
        if not candidate.zero or candidate.gathers_again or candidate.data == 1:
            return once
        streams = _Streams(self)
        own = [(slot.unit, slot.weight) for slot in slots if slot.weight]
        weights = [pair for pair in own if pair[1].gradient or candidate.zero == 3]  # what is frozen is whole before
        read = sum(weight.read for _, weight in weights)
        gathers = _Gathers(streams, groups.shards, weights, self.asked, once / read if read else 0.0)
        for _ in weights:
            gathers.use()
        return streams.device

    def after_us(self, slots: Sequence[WeightSlot]) -> float:
        """us of the sums of gradients behind the last micro-batch, with that of the loss."""
        candidate, groups = self.candidate, self.groups
        if candidate.data == 1:
            return 0.0
        kept = [slot for slot in slots[::-1] if slot.weight and not slot.weight.lent]
        gradients, streams = gradients_of(kept), _Streams(self)
        if not candidate.zero:
            _Sums(streams, SUM, groups.copies, gradients, self.asked).all()
        else:
            if candidate.zero == 1:
                _Sums(streams, SCATTER, groups.shards, gradients, self.asked).all()
            if groups.copies.size > 1:
                own = [each / groups.shards.size for each in gradients]
                _Sums(streams, SUM, groups.copies, own, self.asked).all()
        streams.wait(streams.move(SUM, LOSS_BYTES, groups.shards if candidate.zero else groups.copies))
        return streams.device


def gradients_of(slots: Iterable[WeightSlot]) -> list[float]:
    """Bytes of each."""
    return [slot.weight.gradient for slot in slots if slot.weight and slot.weight.gradient]


def _busy(cost: Cost) -> tuple[float, ...]:
    """us of a micro-batch in each section."""
    forward, backward = cost.paces(halves=False).values()
    return tuple(there + back for (there, _), (back, _) in zip(forward, backward, strict=True))


@dataclass(slots=True)
class _Streams:
    """As `passes/costs/streams.py`, with many calls at once, and one stream beside them. host, device, moving: us when
    each has done what it was given so far."""

    data: Data
    host: float = 0.0
    device: float = 0.0
    moving: float = 0.0

    def compute(self, us: float, launched: float) -> None:
        """Calls that take so long on the device, and the host as long to launch."""
        if self.data.machine.is_host:
            self.device += us + launched
            return
        begin, left = max(self.device, self.host), 1 - self.data.machine.device.communicating
        slowed = min(max(0.0, self.moving - begin), us / left)
        self.host += launched
        self.device = max(begin + slowed + (us - left * slowed), self.host)

    def copy(self, bytes_: float) -> None:
        """A call that reads and writes so many bytes."""
        machine = self.data.machine
        self.compute(machine.call_us(0.0, "", 2 * bytes_), machine.launch_us)

    def move(self, kind: str, bytes_: float, group: RankGroup) -> float:
        """Start a collective; us when it ends."""
        us, launched = self.data.collective_us(kind, bytes_, group), self.data.machine.launch_us
        if self.data.machine.is_host:
            self.device += us + launched
            return self.device
        self.host += launched
        self.moving = max(self.moving, self.device, self.host) + us
        return self.moving

    def wait(self, end: float) -> None:
        self.device = max(self.device, end)


class _Graph:
    """A graph of a stage. is_read: it gathers what it reads. is_left: it scatters gradients. is_backward: it reads what
    the backward pass reads. alive: bytes of both at most, by section, in the equal layers less those of what the layers
    before have let go of: as `Peaks` counts what is kept."""

    def __init__(
        self, data: Data, slots: Sequence[WeightSlot], is_read: bool, is_left: bool, is_backward: bool
    ) -> None:
        self.is_left, shards = is_left, data.groups.shards
        self.streams = _Streams(data)
        self.sums = _Sums(self.streams, SCATTER, shards, gradients_of(slots) if is_left else [], data.asked)
        self.slots, self.last, self.left_out = few(slots, 2 * self.sums.most if is_left else 0.0)
        slots = self.slots
        reading = [slot for slot in slots if slot.weight and (slot.weight.again or not is_backward)] if is_read else []
        self.reading = set(map(id, reading))
        weights = [(slot.unit, slot.weight) for slot in reading if slot.weight]
        self.gathers = _Gathers(self.streams, shards, weights, data.asked)
        self.alive = [-math.inf, -math.inf, -math.inf]
        self.freed = self.gone = 0.0

    def us(self, pace: Pace, freed: Sequence[float]) -> float:
        """freed: bytes that each layer lets go of, by section."""
        begin, unit = (0.0, 0.0, 0.0, 0.0), -1
        for slot in self.slots:
            if unit != slot.unit:
                if self.left_out and unit == self.last:
                    self._leave_out(begin)
                begin, unit, self.gone = self._state, slot.unit, self.freed
            if id(slot) in self.reading:
                self.gathers.use()
            busy, launched = pace[slot.section]
            self.streams.compute(slot.share * busy, slot.share * launched)
            if slot.weight is not None and slot.weight.gradient and self.is_left:
                self.sums.add(slot.weight.gradient)
            self._count(slot.section)
            self.freed += slot.share * freed[slot.section]
        self.sums.flush()
        if self.slots:
            self._count(self.slots[-1].section)
        return self.streams.device

    @property
    def _state(self) -> tuple[float, float, float, float]:
        return self.streams.host, self.streams.device, self.streams.moving, self.freed

    def _leave_out(self, begin: Sequence[float]) -> None:
        """Each of the layers that are left out takes as long as the one before them. begin: of that one."""
        host, device, moving, freed = (
            self.left_out * (now - then) for now, then in zip(self._state, begin, strict=True)
        )
        self.streams.host += host
        self.streams.device += device
        self.streams.moving += moving
        self.freed += freed
        self.gathers.later(moving)
        self.sums.later(moving)

    def _count(self, section: int) -> None:
        alive, at = self.gathers.alive + self.sums.most_alive, LAYERS if section in EQUAL else section
        self.alive[at] = max(self.alive[at], alive - self.gone * (at == LAYERS))
        self.sums.most_alive = self.sums.alive


@dataclass(slots=True)
class _Bundle:
    """Parameters that are gathered together. end: us, when they are there."""

    bytes_: float
    count: int = 1
    end: float = 0.0
    last: int = 0  # the number of its last use


class _Gathers:
    """The gathers of a graph: those of a layer start when the one before it begins."""

    def __init__(
        self, streams: _Streams, group: RankGroup, weights: Sequence[tuple[int, Weight]], asked: int | None,
        made: float = 0.0,
    ) -> None:  # fmt: skip
        """weights: in the order of their use, with the layers that they belong to. made: us to make a byte of one from
        the parameter that is stored."""
        self.streams, self.group, self.made = streams, group, made
        small = small_limit(streams.data.machine, group, asked)
        self.layers: list[list[_Bundle]] = []
        self.uses: list[tuple[int, _Bundle | None]] = []  # of each weight its layer, and what it waits for
        for number, (_, own) in enumerate(groupby(weights, key=lambda pair: (pair[0], pair[1].unit))):
            bundles, open_ = list[_Bundle](), dict[str, _Bundle]()
            for _, weight in own:
                found = open_.get(weight.dtype) if weight.read < small else None
                if found is not None:
                    found.bytes_, found.count, found.last = found.bytes_ + weight.read, found.count + 1, len(self.uses)
                    self.uses.append((number, None))
                    continue
                found = _Bundle(weight.read, last=len(self.uses))
                bundles.append(found)
                self.uses.append((number, found))
                if weight.read < small:
                    open_[weight.dtype] = found
            self.layers.append(bundles)
        self.at = self.begun = 0
        self.there: list[_Bundle] = []  # those that were started and have a use left

    def later(self, us: float) -> None:
        """What is on its way arrives so much later."""
        for bundle in self.there:
            bundle.end += us

    @property
    def alive(self) -> float:
        return sum(bundle.bytes_ for bundle in self.there)

    def use(self) -> None:
        """Wait for the next weight."""
        number, bundle = self.uses[self.at]
        self.there = [each for each in self.there if each.last >= self.at]
        self.at += 1
        self._begin(number + 1)
        if bundle is not None:
            self.streams.wait(bundle.end)
        self._begin(number + 2)

    def _begin(self, end: int) -> None:
        for bundles in self.layers[self.begun : end]:
            for bundle in bundles:
                if self.made:
                    self.streams.compute(self.made * bundle.bytes_, self.streams.data.machine.launch_us)
                if bundle.count > 1:
                    self.streams.copy(bundle.bytes_ / self.group.size)
                bundle.end = self.streams.move(GATHER, bundle.bytes_, self.group)
                self.there.append(bundle)
        self.begun = max(self.begun, min(end, len(self.layers)))


@dataclass(slots=True)
class _Sums:
    """Sums of gradients in buckets. gradients: bytes of all. most_alive: bytes, with their results, at most so far."""

    streams: _Streams
    kind: str
    group: RankGroup
    gradients: Sequence[float]
    asked: int | None
    limit: float = 0.0
    most: float = 0.0
    open: float = 0.0
    count: int = 0
    most_alive: float = 0.0
    started: list[tuple[float, float]] = field(default_factory=list)  # bytes, and us of their ends

    def __post_init__(self) -> None:
        self.limit = bucket_limit(
            sum(self.gradients), self.streams.data.machine, self.kind, self.group, self.asked
        )  # fmt: skip
        self.most = max([self.limit, *self.gradients])

    def later(self, us: float) -> None:
        """What is on its way arrives so much later."""
        self.started = [(size, end + us) for size, end in self.started]

    def all(self) -> None:
        for gradient in self.gradients:
            self.add(gradient)
        self.flush()

    def add(self, gradient: float) -> None:
        """The next gradient is there."""
        if gradient >= self.limit:
            self._start(gradient, 1)
            return
        self.open, self.count = self.open + gradient, self.count + 1
        if self.open >= self.limit:
            self._start_open()

    def flush(self) -> None:
        """Start what is left, and wait for all."""
        if self.open:
            self._start_open()
        for _, end in self.started:
            self.streams.wait(end)

    @property
    def alive(self) -> float:
        """Bytes of what waits for its bucket, and of what is on its way, before and after."""
        return self.open + (1 + 1 / self.group.size) * sum(size for size, _ in self.started)

    def _start_open(self) -> None:
        self._start(self.open, self.count)

    def _start(self, bytes_: float, count: int) -> None:
        if self.kind == SCATTER:
            while len(self.started) > 1 and sum(size for size, _ in self.started) + bytes_ > 2 * self.most:
                self.streams.wait(self.started.pop(0)[1])
        if count > 1:
            self.streams.copy(bytes_)
            self.most_alive = max(self.most_alive, self.alive + bytes_)
        self.started.append((bytes_, self.streams.move(self.kind, bytes_, self.group)))
        if self.open and bytes_ == self.open and count == self.count:
            self.open, self.count = 0.0, 0
        self.most_alive = max(self.most_alive, self.alive)
