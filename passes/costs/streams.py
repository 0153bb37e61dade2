"""Simulate a graph of one rank on a machine: calls in order, collectives beside them, launches by the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.ir.in_turns import in_turns
from autopar.ir.mesh import is_in_time
from autopar.ir.ops.ops import COPIES, TO_DEVICE, TO_HOST, is_collective, op
from autopar.ir.ops.storage import is_view
from autopar.ir.program import Program, is_getitem
from autopar.machines import Machine
from autopar.passes.costs.node_costs import node_times

WAIT = op("wait")
OUT, BACK = "copies out", "copies back"  # each with a stream, as an axis has
_WAYS = {TO_HOST: OUT, TO_DEVICE: BACK}


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """A graph on one rank, in us. total: from the first launch to the last end. computed: of its calls. exposed: what
    the device waited for collectives, by axis. hosted: what it waited for the host, to launch calls. calls: how many it
    launches."""

    total: float
    computed: float
    exposed: Mapping[str, float]
    hosted: float
    calls: int


@dataclass(frozen=True, slots=True)
class StreamCall:
    """A call as streams see it. axis: of a collective, "" of any other call. starts: it is awaited later. awaits: the
    place of the collective, among the calls of its graph, that this one waits for; -1 if it waits for none."""

    axis: str = ""
    starts: bool = False
    awaits: int = -1


_CALL = StreamCall()


def run(program: Program, machine: Machine, rows: float = 1.0) -> StreamTimes:
    """Run a LOCAL graph. rows: as of `node_times`. The host launches one call after another, `machine.launch_us` each.
    The device computes them in that order, and every axis has a stream of its own, in which a collective begins when
    its operand is there.

    Collectives run on the device too: while one is under way, calls have what it leaves (`Device.communicating`).

    Where cores are the devices (`machine.is_host`) they launch calls and move data too: nothing hides a launch, nor a
    collective.
    """
    return run_launches(
        launches_of(program), list(node_times(program, machine, adds=True, rows=rows).values()), machine
    )


def run_pair(first: Program, second: Program, machine: Machine, rows: float = 1.0) -> StreamTimes:
    """Run two LOCAL graphs side by side, as `in_turns` lets them change places at each wait."""
    streams = Streams(machine)
    calls = _calls(first, machine, rows, 0), _calls(second, machine, rows, len(first.nodes))
    for place, launch, time in in_turns(calls, lambda call: call[1].awaits >= 0):
        streams.launch(place, launch, time)
    return streams.ran()


def _calls(
    program: Program, machine: Machine, rows: float, start: int
) -> Generator[tuple[int, StreamCall, float], Any, None]:
    """What a graph launches, its calls numbered from `start` on."""
    times = node_times(program, machine, adds=True, rows=rows).values()
    for place, (launch, time) in enumerate(zip(launches_of(program), times, strict=True), start):
        if launch is not None:
            yield place, replace(launch, awaits=launch.awaits + start if launch.awaits >= 0 else -1), time


def launches_of(program: Program) -> list[StreamCall | None]:
    """What each call of a LOCAL graph is for the streams; None of those that launch nothing."""
    place = {node: i for i, node in enumerate(program.calls())}
    return [_launch(node, place) for node in place]


def run_launches(launches: Iterable[StreamCall | None], times: Iterable[float], machine: Machine) -> StreamTimes:
    """Simulate calls whose times are known, as `run` does; None in place of those that are left out."""
    streams = Streams(machine)
    for place, (launch, time) in enumerate(zip(launches, times, strict=True)):
        if launch is not None:
            streams.launch(place, launch, time)
    return streams.ran()


def _launch(node: fx.Node, place: Mapping[fx.Node, int]) -> StreamCall | None:
    if node.target is WAIT:
        return StreamCall(awaits=place[node.all_input_nodes[0]])
    if is_getitem(node) or is_view(node):
        return None
    if node.target in COPIES:
        return StreamCall(_WAYS[node.target], starts=True)
    if not is_collective(node.target):
        return _CALL
    axis = str(node.args[1])
    return None if is_in_time(axis) else StreamCall(axis, "_start" in str(node.target))


@dataclass(slots=True)
class Streams:
    """The host, the device and the collectives of each axis. host, device, moving: us when each has done what it was
    given so far, and the last of those that take a part of the device; hosted: of these what the device waited for the
    host."""

    machine: Machine
    host: float = 0.0
    device: float = 0.0
    moving: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))
    taking: float = 0.0
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)  # of collectives that nobody waited for
    computed: float = 0.0
    hosted: float = 0.0
    exposed: dict[Hashable, float] = field(default_factory=lambda: defaultdict(float))
    calls: int = 0

    def launch(self, place: int, launch: StreamCall, time: float) -> None:
        """The call at a place of its graph, which would take `time` us alone."""
        if launch.awaits >= 0:
            self.wait(*self.ends.pop(launch.awaits))
        elif not launch.axis:
            self.calls += 1
            self.compute(time, self.machine.launch_us)
        else:
            end = self.start(launch.axis, time)
            if launch.starts or self.machine.is_host:
                self.ends[place] = end, launch.axis
            else:
                self.wait(end, launch.axis)

    def compute(self, us: float, launched: float) -> None:
        """Calls, one after the other, that the device would take so long for, and the host to launch them."""
        machine, begin = self.machine, self.device  # a search of plans is here a million times: no `min`, no `max`
        one = machine.launch_us
        if machine.is_host:
            self._begin(launched)
            begin = self.device
        else:
            self.host += one if one < launched else launched
        if self.host > begin:
            self.hosted += self.host - begin
            begin = self.host
        took = self._beside(us, self.taking - begin) if self.taking > begin else us
        self.device = begin + took
        self.computed += took
        if launched > one and not machine.is_host:
            self.host += launched - one
            late = self.host - self.device
            if late > 0:
                self.hosted += late
                self.device += late

    def start(self, axis: Hashable, us: float) -> float:
        """Start a collective over an axis that takes so long; us when it ends."""
        self.calls += 1
        self._begin(self.machine.launch_us)
        if self.machine.is_host:
            self.device += us
            self.exposed[axis] += us
            return self.device
        end = self.moving[axis] = max(self.moving[axis], self.device, self.host) + us
        if axis not in (OUT, BACK):  # copies take no part of the device
            self.taking = max(self.taking, end)
        return end

    def wait(self, end: float, axis: Hashable) -> None:
        """The device waits until then for a collective."""
        exposed = self.exposed[axis]  # (what was never exposed was so for 0 us)
        if end > self.device:
            self.exposed[axis] = exposed + (end - self.device)
            self.device = end

    def skip(self, host: float, device: float, moving: Mapping[Hashable, float]) -> None:
        """Go on as if so many us more had passed: of the host, the device and the collectives of axes."""
        self.host += host
        self.device += device
        for axis, us in moving.items():
            self.moving[axis] += us
        self.taking = max((end for axis, end in self.moving.items() if axis not in (OUT, BACK)), default=0.0)

    def _begin(self, launched: float) -> None:
        """The host launches calls."""
        self.host += launched
        if self.machine.is_host:
            self.device += launched
            self.hosted += launched

    def _beside(self, time: float, moving: float) -> float:
        """The time of calls that would take `time` alone. moving: until the end of the last collective, of all that
        were launched before them: each stream is busy until then, since a collective begins at once or when another
        one ends."""
        left = 1 - self.machine.device.communicating
        slowed = min(moving, time / left)
        return slowed + (time - left * slowed)

    def ran(self) -> StreamTimes:
        for end, axis in self.ends.values():
            self.wait(end, axis)
        return StreamTimes(self.device, self.computed, dict(self.exposed), self.hosted, self.calls)  # type: ignore[arg-type]
