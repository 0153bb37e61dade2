"""What a rank moves over its data axes beside the calls of a graph: by the decisions of the passes that emit it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache

from autopar.ir.mesh import CONTEXT_AXES, SHARDED, Mesh, group_name
from autopar.ir.modules import unit_of
from autopar.ir.ops.measure import group_of
from autopar.machines import Machine
from autopar.machines.model import RankGroup
from autopar.passes.costs.streams import BACK, OUT, Streams
from autopar.passes.offload.when_copied import BEHIND
from autopar.passes.overlap.bucket import SCATTER, Buckets, Sum, bucket_limit
from autopar.passes.overlap.coalesce import MovesNow, Together
from autopar.passes.overlap.prefetch import Ahead, Gather, small_limit
from autopar.planning.price.activation_copies import Copies
from autopar.planning.price.steady import Before, leave_out
from autopar.planning.shallow.events import OUTSIDE
from autopar.planning.shallow.graph_track import BACKWARD, FORWARD, ParameterPlace, Road
from autopar.planning.space.candidates import Candidate

ALONE = RankGroup(1)
GATHER, SUM = "all_gather", "all_reduce"
SHARDS, COPIES, TENSOR = "shards", "copies", "tp"
PART = "part"
GOING = BEHIND + 1  # layers that begin until a gradient of one has gone to the host's memory
LOSS, LOSS_BYTES = "loss", 4  # what leaves beside the gradients
Known = dict[tuple[str, float, RankGroup], float]
# Of the place of a gradient, its bytes, its dtype and the axes beside those of data over which it is a sum.
Chain = Callable[[ParameterPlace, float, str, Sequence[str]], tuple[Sum[ParameterPlace], ...]]


@dataclass(frozen=True, slots=True)
class Net:
    """Between which ranks a plan moves data, and how long that takes. groups: by name. asked:
    `StepOptions.bucket_bytes`. known: us of collectives, by kind, bytes and group."""

    machine: Machine
    groups: Mapping[str, RankGroup]
    asked: int | None
    known: Known

    def us(self, kind: str, bytes_: float, over: str) -> float:
        """How long a collective takes, as `Machine.collective_us` says it."""
        key = kind, bytes_, self.groups[over]
        us = self.known.get(key)
        if us is None:
            us = self.known[key] = self.machine.collective_us(*key)
        return us

    def small(self, over: str) -> float:
        return small_limit(self.machine, self.groups[over], self.asked)

    def limit(self, total: float, kind: str, over: str) -> float:
        return bucket_limit(total, self.machine, kind, self.groups[over], self.asked)


@dataclass(slots=True)
class Moving:
    """A rank at work. level: bytes of values of micro-batches that are alive; alive: of what moves, and of what it
    leaves behind; peak: of both at most. is_added: True if gradients that have moved are added to some that are there.
    moves: all that was started and awaited, as (True if it starts, kind, bytes). leaves: True if gradients go to the
    host's memory as they come, and parameters come from there for each use; loads: bytes of a rank's part of each.
    lasting: places whose part stays on the device until the backward pass gathers it.
    """

    net: Net
    is_added: bool = False
    streams: Streams = field(init=False)
    ahead: Ahead[ParameterPlace] | None = None
    gathers: Mapping[ParameterPlace, Gather[ParameterPlace]] = field(default_factory=dict)
    made: Mapping[ParameterPlace, float] = field(default_factory=dict)
    buckets: Buckets[ParameterPlace] | None = None
    sums: Mapping[ParameterPlace, Sum[ParameterPlace]] = field(default_factory=dict)
    ends: dict[Hashable, float] = field(default_factory=dict)
    # bytes of what was read, or gathered, and has a use left
    held: dict[ParameterPlace, float] = field(default_factory=dict)
    whole: dict[Hashable, float] = field(default_factory=dict)  # bytes of what is on its way
    lies_in: dict[ParameterPlace, float] = field(default_factory=dict)  # bytes, of gradients that did not move yet
    level: float = 0.0
    alive: float = 0.0
    lent: frozenset[ParameterPlace] = frozenset()
    gone: float = 0.0  # bytes of what was lent
    peak: float = -math.inf
    before: float = -math.inf
    moves: list[tuple[bool, str, float]] = field(default_factory=list)
    leaves: bool = False
    loads: Mapping[ParameterPlace, float] = field(default_factory=dict)
    lasting: Collection[ParameterPlace] = ()
    brought: set[ParameterPlace] = field(default_factory=set)  # that have come from the host's memory
    operands: dict[Hashable, float] = field(default_factory=dict)  # bytes of what gathers on their way read
    awaiting: list[tuple[set[ParameterPlace], float]] = field(default_factory=list)  # sums, and bytes of what they keep
    turned: set[ParameterPlace] = field(default_factory=set)  # gradients that are copied to be scattered
    kind: str = ""  # of the graph that runs
    # of gradients on the way out: how many layers had begun, bytes, and us when they have gone
    going: list[tuple[int, float, float]] = field(default_factory=list)
    begun: set[tuple[str, int, str]] = field(default_factory=set)  # layers, by graph
    copies: Copies | None = None  # of what the layers keep in the host's memory

    def __post_init__(self) -> None:
        self.streams = Streams(self.net.machine)

    def gather(self, gathers: Iterable[Gather[ParameterPlace]], made: Mapping[ParameterPlace, float]) -> None:
        """From here on some parameters are gathered, in the order of their uses. made: us of casts that are made of
        what is stored before they move."""
        self.gathers, self.made = {each.of: each for each in gathers}, made
        self.ahead = Ahead(self.gathers.values(), self.net.small)

    def sum(self, sums: Iterable[Sum[ParameterPlace]], leaves: bool = False, left_out: float = 0.0) -> None:
        """From here on gradients are summed. leaves: as of `Buckets`. left_out: bytes of further sums, of layers that a
        road is without."""
        self.sums = {each.of: each for each in sums}
        limit = self.net.limit
        self.buckets = Buckets(
            self.sums.values(), lambda total, *which: limit(total + left_out, *which), leaves or self.leaves
        )

    def lend(self, values: Iterable[tuple[ParameterPlace, float]]) -> None:
        """Some values are there from before, and count elsewhere. They go with their last use."""
        self.held |= values
        self.lent = frozenset(self.held)

    def compute_once(self, us: float, calls: int) -> None:
        """What is computed once a step, before all else."""
        machine = self.net.machine
        self.streams.compute(us, 0.0 if machine.is_host else machine.launch_us * calls)

    def run(self, road: Road, keeps: Collection[ParameterPlace] = frozenset(), is_whole: bool = False) -> None:
        """A graph, without what it has not started to move when its calls are done. keeps: what a later graph reads
        too. is_whole: True of a step that is one graph: it makes casts where they are read, and its gradients stay.
        Raises UnsteadyError if layers are left out that would not be like the one before them."""
        self.kind = road.kind
        if self.kind == BACKWARD:
            self._bring(self.ahead.begun if self.ahead is not None else 0)
        left_out, layers = [(begin, each) for each in road.left_out for begin in each.begins], list[Before]()
        for at, (step, reads, gives, ends) in enumerate(road.steps):
            if left_out and left_out[0][0] == at:
                each = left_out.pop(0)[1]
                layers.append(Before.of(self))
                if at == each.begins[-1]:
                    leave_out(self, each.layers, layers)
                    layers = []
            if self.copies is not None:
                self._copies(self.copies, road.kind, at)
            for place, read in reads:
                if self.leaves:
                    self.begin(place, read.unit)
                if self.ahead is not None and place in self.gathers:
                    self.use(self.gathers[place])
                elif is_whole and read.is_cast and place._replace(kind=FORWARD) not in self.held:
                    self._hold(place, read.bytes_)
            for place, _ in gives if self.leaves else ():
                self.begin(place, unit_of(place.name.rpartition(".")[0]))
            self._mark(step.most)
            if gives and (is_whole or any(place in self.sums for place, _ in gives)):
                # else the last call adds to a gradient that is there
                self._mark(step.last + sum(each.bytes_ for _, each in gives if not each.holds))
            elif is_whole:
                self._mark(step.last)
            self.level += step.left
            if step.launched or step.busy:
                self.streams.compute(step.busy, step.launched)
                self.streams.device += step.waits
            for place in ends:
                self.let_go(place, keeps)
            for place, gradient in gives:
                if place in self.sums:
                    if gradient.is_turned:
                        self.turned.add(place)
                    self.give(self.sums[place], gradient.alive)
                elif is_whole:
                    self.alive += gradient.alive
                    if self.leaves:
                        self._leave(gradient.alive)
        if self.copies is not None:
            self._copies(self.copies, road.kind, len(road.steps))

    def _copies(self, copies: Copies, kind: str, at: int) -> None:
        """What is copied between a layer and the host's memory before a step."""
        for copy in copies.before.get((kind, at), ()):
            key, is_back = (copy.way, copy.value), copy.way == BACK
            if copy.starts:
                self.level += copy.bytes_ * is_back
                self.ends[key] = self.streams.start(copy.way, self.net.machine.copy_us(copy.bytes_))
                self._mark()
            else:
                self.streams.wait(self.ends.pop(key), copy.way)
                self.level -= copy.bytes_ * (not is_back)

    def begin(self, place: ParameterPlace, unit: str) -> None:
        """A layer reads a parameter, or gives a gradient, perhaps its first one: gradients of those before have
        gone."""
        self.begun.add((place.kind, place.layer, unit if place.layer == OUTSIDE else ""))
        while self.going and self.going[0][0] + GOING <= len(self.begun):
            self._gone()

    def _leave(self, bytes_: float, coming: Set[ParameterPlace] = frozenset()) -> None:
        """A gradient starts to go, or some that moved as one. coming: those of them of which further sums are made: as
        long as one of these has not begun, the memory of all stays."""
        end = self.streams.start(OUT, self.net.machine.copy_us(bytes_))
        self.going.append((len(self.begun), 0.0 if coming else bytes_, end))
        if coming:
            self.awaiting.append((set(coming), bytes_))

    def _gone(self) -> None:
        """Wait for the first gradient that is on the way out."""
        _, bytes_, end = self.going.pop(0)
        self.streams.wait(end, OUT)
        self.alive -= bytes_

    def use(self, gather: Gather[ParameterPlace]) -> None:
        """Wait for a parameter that is gathered."""
        assert self.ahead is not None
        for starts, bundle in self.ahead.use(gather):
            if starts:
                self._gather(bundle)
            else:
                self.streams.wait(self.ends.pop(bundle), bundle.members[0].over)
                for member in bundle.members if self._ranks(bundle) == 1 else ():
                    if self.loads.get(member.of, 0.0) > member.bytes_:  # it is cast, and what came goes
                        self._mark(member.bytes_)
                        self._hold(member.of, member.bytes_)
                if len(bundle.members) > 1:  # each piece is copied out of what came
                    self._mark(bundle.bytes_)
                self.alive -= self.operands.pop(bundle)
                self.moves.append((False, GATHER, bundle.bytes_))

    def give(self, coming: Sum[ParameterPlace], alive: float) -> None:
        """A gradient is there. alive: bytes of what it lies in."""
        assert self.buckets is not None
        self.alive += alive
        self.lies_in[coming.of] = alive
        self._sum(self.buckets.add(coming))

    def flush(self) -> None:
        """Start the sums that are left, and wait for all."""
        if self.buckets is not None:
            self._sum(self.buckets.flush())
        while self.going:
            self._gone()

    def lose(self) -> None:
        """Wait for the sum of the losses."""
        if LOSS in self.net.groups:
            self.streams.wait(self.streams.start(LOSS, self.net.us(SUM, LOSS_BYTES, LOSS)), LOSS)

    def most(self) -> float:
        """Bytes alive at most since this was asked before."""
        self._mark()
        peak, self.peak = self.peak, -math.inf
        return peak

    def _ranks(self, bundle: Together[Gather[ParameterPlace]]) -> int:
        return self.net.groups[str(bundle.members[0].over)].size

    def _gather(self, bundle: Together[Gather[ParameterPlace]]) -> None:
        over, ranks = str(bundle.members[0].over), self._ranks(bundle)
        if ranks == 1:
            self._load(bundle)
            return
        self._operand(bundle, ranks)
        for member in bundle.members:
            self._hold(member.of, member.bytes_)
        self.ends[bundle] = self.streams.start(over, self.net.us(GATHER, bundle.bytes_, over))
        self.moves.append((True, GATHER, bundle.bytes_))
        self._mark()

    def _load(self, bundle: Together[Gather[ParameterPlace]]) -> None:
        """A parameter that no rank splits comes from the host's memory."""
        (member,) = bundle.members
        self._hold(member.of, self.loads[member.of])
        if member.of in self.made:
            self.streams.compute(self.made[member.of], self.net.machine.launch_us)
        self.ends[bundle] = self.streams.start(BACK, self.net.machine.copy_us(self.loads[member.of]))
        self.operands[bundle] = 0.0
        self.moves.append((True, GATHER, bundle.bytes_))
        self._mark()

    def _operand(self, bundle: Together[Gather[ParameterPlace]], ranks: int) -> None:
        """Make what a gather reads: a rank's part as it lies there, has come, or is cast, of several side by side. It
        is there until the gather is awaited."""
        assert self.ahead is not None
        # One function, since the order of what is made and of what goes is the peak: loads of this layer and the next
        # come first, a cast is made beside what came, and what is laid side by side beside all its pieces.
        number, freed = self.ahead.place[bundle.members[0]][0], 0.0
        self._bring(number)
        if bundle.members[0].of.kind == FORWARD or self.kind == BACKWARD:
            self._bring(number + 1)
        for member in bundle.members:
            kind, layer, name = member.of
            part, own, lasts = member.bytes_ / ranks, ParameterPlace(PART, layer, name), member.of in self.lasting
            if self.leaves and isinstance(member.layer, tuple):
                self.begin(member.of._replace(kind=self.kind), member.layer[-1])
            if member.of in self.brought:
                self.streams.wait(self.ends.pop((PART, member.of)), BACK)
            if member.of in self.made:
                self.streams.compute(self.made[member.of], self.net.machine.launch_us)
                # until it is gathered again a rank keeps its part of the cast
                if ParameterPlace(BACKWARD, layer, name) in self.gathers and (lasts or not self.leaves):
                    self._hold(own, part)
            if self.loads.get(member.of, 0.0) > part:  # it is cast, and what came goes
                self.alive += part * (not lasts)
                self._mark()
                self.alive -= self.loads[member.of]
            elif lasts and member.of in self.loads:
                self.held[own] = part
            freed += part * (member.of in self.loads and not lasts)
            if kind == BACKWARD and own in self.held:
                freed += self.held.pop(own)
        operand = freed
        if len(bundle.members) > 1:
            self.alive += (operand := bundle.bytes_ / ranks)
            self._mark()
            self.alive -= freed
            self._copy(operand)
        self.operands[bundle] = operand

    def _bring(self, number: int) -> None:
        """Start to copy the parts that a layer gathers from the host's memory."""
        layers = self.ahead.layers if self.ahead is not None and self.loads else []
        for bundle in layers[number] if number < len(layers) else ():
            for member in bundle.members if self._ranks(bundle) > 1 else ():
                if member.of in self.loads and member.of not in self.brought:
                    load = self.loads[member.of]
                    self.brought.add(member.of)
                    self.alive += load
                    self.ends[PART, member.of] = self.streams.start(BACK, self.net.machine.copy_us(load))

    def _hold(self, place: ParameterPlace, bytes_: float) -> None:
        self.alive += bytes_ - self.held.get(place, 0.0)
        self.held[place] = bytes_

    def let_go(self, place: ParameterPlace, keeps: Collection[ParameterPlace] = ()) -> None:
        """What was read, or gathered, has no further use in this graph. keeps: what a later graph reads."""
        if place not in self.held or place in keeps:
            place = ParameterPlace(FORWARD, place.layer, place.name)  # a graph may read what one before it gathered
            if place not in self.held or place in keeps:
                return
        bytes_ = self.held.pop(place)
        self.alive -= bytes_
        self.gone += bytes_ * (place in self.lent)

    def _sum(self, moves: Iterable[MovesNow[Sum[ParameterPlace]]]) -> None:
        for starts, bucket in moves:
            first = bucket.members[0]
            over, bytes_ = str(first.over), bucket.bytes_
            is_scattered = first.kind == SCATTER  # a sum of whole values is made in their place
            self.moves.append((starts, first.kind, bytes_))
            if not starts:
                self.streams.wait(self.ends.pop(bucket), over)
                if is_scattered:
                    part = bytes_ / self.net.groups[over].size
                    self.alive -= self.whole.pop(bucket) + self.is_added * part
                    if self.leaves:
                        self._leave(part, {each.of for each in bucket.members if each.then})
                continue
            for coming, _ in self.awaiting:
                coming -= {each.of for each in bucket.members} if not is_scattered else set()
            while self.awaiting and not self.awaiting[0][0]:
                self.alive -= self.awaiting.pop(0)[1]
            lies_in = sum(self.lies_in.pop(each.of, each.bytes_) for each in bucket.members)
            part = bytes_ / self.net.groups[over].size if is_scattered else 0.0
            is_copied = len(bucket.members) > 1 or (is_scattered and first.of in self.turned)
            if is_copied:
                self._mark(bytes_ + part * (len(bucket.members) == 1))
                self._copy(bytes_)
                self.alive += bytes_ - lies_in
            self.whole[bucket] = bytes_ if is_copied else lies_in
            self.ends[bucket] = self.streams.start(over, self.net.us(first.kind, bytes_, over))
            self.alive += part
            self._mark()

    def _copy(self, bytes_: float) -> None:
        """A call that reads and writes so many bytes."""
        machine = self.net.machine
        self.streams.compute(machine.call_us(0.0, "", 2 * bytes_), machine.launch_us)

    def _mark(self, more: float = 0.0) -> None:
        now = self.level + self.alive + more
        if now > self.peak:
            self.peak = now
        if now + self.gone > self.before:
            self.before = now + self.gone


def first_of(net: Net, gathers: Sequence[Gather[ParameterPlace]], made: Mapping[ParameterPlace, float]) -> Moving:
    """What is done before the first micro-batch, where no micro-batch gathers. made: as of `Moving.gather`."""
    moving = Moving(net)
    moving.gather(gathers, made)
    for gather in gathers:
        moving.use(gather)
    return moving


def last_of(net: Net, sums: Sequence[Sum[ParameterPlace]]) -> Moving:
    """What is done behind the last micro-batch: the sum of the losses, and sums of gradients."""
    moving = Moving(net)
    moving.lose()
    moving.alive = sum(each.bytes_ for each in sums)
    moving.sum(sums)
    for each in sums:
        moving.alive -= each.bytes_
        moving.give(each, each.bytes_)
    moving.flush()
    return moving


def sums_of(candidate: Candidate, over_data: bool, is_part: bool = False) -> Chain:
    """What says by which sums a gradient leaves, as one chain; none if there are none. over_data: False if it is
    scattered before. is_part: without what is done behind the last micro-batch."""
    shards, is_split = candidate.shards, candidate.zero > 0
    moves = candidate.data > 1 and over_data
    is_copied = is_split and candidate.data > shards and not is_part
    first = (SCATTER, SHARDS) if is_split else (SUM, COPIES)

    def chain(place: ParameterPlace, bytes_: float, dtype: str, over: Sequence[str]) -> tuple[Sum[ParameterPlace], ...]:
        sums: tuple[Sum[ParameterPlace], ...] = ()
        for axis in reversed(over) if not is_part else ():
            sums = (Sum(place, SUM, axis, dtype, bytes_ / shards, sums),)
        if is_copied:
            sums = (Sum(place, SUM, COPIES, dtype, bytes_ / shards, sums),)
        return (Sum(place, *first, dtype, bytes_, sums),) if moves else sums

    return chain


@dataclass(frozen=True, slots=True)
class DataGroups:
    """shards: the ranks over which ZeRO splits states; one without it. copies: those that hold the same part, or all
    of it without ZeRO: their gradients are added. all: both."""

    shards: RankGroup
    copies: RankGroup
    all: RankGroup = field(default=ALONE, compare=False)

    @classmethod
    def of(cls, candidate: Candidate, ranks: int) -> DataGroups:
        """ranks: of a node."""
        axes, all_ = candidate.axes, _joined(candidate.axes, ("dp", SHARDED, *CONTEXT_AXES), ranks)
        if not candidate.zero:
            return cls(ALONE, all_, all_)
        if candidate.fsdp > 1:
            return cls(_joined(axes, (SHARDED, *CONTEXT_AXES), ranks), _joined(axes, ("dp",), ranks), all_)
        return cls(all_, ALONE, all_)


@cache
def _joined(axes: tuple[tuple[str, int], ...], names: tuple[str, ...], ranks: int) -> RankGroup:
    """The group of those of some axes that a mesh has."""
    mesh = Mesh(axes)
    named = [axis for axis in names if axis in mesh]
    return group_of(mesh, group_name(named), ranks) if named else ALONE
