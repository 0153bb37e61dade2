"""Simulate a graph of one rank on a machine: calls in order, collectives beside them, launches by the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.mesh import is_in_time
from autopar.ir.ops import is_collective, op
from autopar.ir.program import Program, is_getitem, is_view
from autopar.machines import Machine
from autopar.passes.node_costs import node_times

WAIT = op("wait")


@dataclass(frozen=True, slots=True)
class Ran:
    """A graph on one rank, in us. total: from the first launch to the last end. computed: of its calls. exposed: what
    the device waited for collectives, by axis. hosted: what it waited for the host, to launch calls. calls: how many it
    launches."""

    total: float
    computed: float
    exposed: Mapping[str, float]
    hosted: float
    calls: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A call as streams see it. axis: of a collective, "" of any other call. starts: it is awaited later. awaits: the
    place of the collective, among the calls of its graph, that this one waits for; -1 if it waits for none."""

    axis: str = ""
    starts: bool = False
    awaits: int = -1


_CALL = Launch()


def run(program: Program, machine: Machine) -> Ran:
    """Run a LOCAL graph. The host launches one call after another, `machine.launch_us` each. The device computes them
    in that order, and every axis has a stream of its own, in which a collective begins when its operand is there.

    Collectives run on the device too: while one is under way, calls have what it leaves (`Device.communicating`).

    Where cores are the devices (`machine.is_host`) they launch calls and move data too: nothing hides a launch, nor a
    collective.
    """
    return run_launches(launches_of(program), list(node_times(program, machine, adds=True).values()), machine)


def launches_of(program: Program) -> list[Launch | None]:
    """What each call of a LOCAL graph is for the streams; None of those that launch nothing."""
    place = {node: i for i, node in enumerate(program.calls())}
    return [_launch(node, place) for node in place]


def run_launches(launches: Iterable[Launch | None], times: Iterable[float], machine: Machine) -> Ran:
    """As `run`, of calls whose times are known; None in place of those that are left out."""
    streams = _Streams(machine)
    for place, (launch, time) in enumerate(zip(launches, times, strict=True)):
        if launch is not None:
            streams.launch(place, launch, time)
    return streams.ran()


def _launch(node: fx.Node, place: Mapping[fx.Node, int]) -> Launch | None:
    if node.target is WAIT:
        return Launch(awaits=place[node.all_input_nodes[0]])
    if is_getitem(node) or is_view(node):
        return None
    if not is_collective(node.target):
        return _CALL
    axis = str(node.args[1])
    return None if is_in_time(axis) else Launch(axis, "_start" in str(node.target))


@dataclass(slots=True)
class _Streams:
    machine: Machine
    host: float = 0.0  # when each has done what it was given so far
    device: float = 0.0
    moving: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)  # of collectives that nobody waited for
    computed: float = 0.0
    hosted: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: int = 0

    def launch(self, place: int, launch: Launch, time: float) -> None:
        """The call at a place of its graph, which would take `time` us alone."""
        if launch.awaits >= 0:
            self._await(*self.ends.pop(launch.awaits))
            return
        self.calls += 1
        self._begin()
        axis = launch.axis
        if not axis:
            self._compute(time)
            return
        if self.machine.is_host:
            self.device += time
            self.exposed[axis] += time
            self.ends[place] = self.device, axis
            return
        begin = max(self.moving[axis], self.device, self.host)
        self.moving[axis] = begin + time
        if launch.starts:
            self.ends[place] = begin + time, axis
        else:
            self._await(begin + time, axis)

    def _begin(self) -> None:
        """The host launches a call."""
        self.host += self.machine.launch_us
        if self.machine.is_host:
            self.device += self.machine.launch_us
            self.hosted += self.machine.launch_us

    def _compute(self, time: float) -> None:
        begin = max(self.device, self.host)
        time = self._beside(time, max(self.moving.values(), default=0.0) - begin)
        self.hosted += begin - self.device
        self.device = begin + time
        self.computed += time

    def _beside(self, time: float, moving: float) -> float:
        """The time of a call that would take `time` alone. moving: until the end of the last collective, of all that
        were launched before it: each stream is busy until then, since a collective begins at once or when another
        one ends."""
        left = 1 - self.machine.device.communicating
        slowed = min(max(0.0, moving), time / left)
        return slowed + (time - left * slowed)

    def _await(self, end: float, axis: str) -> None:
        self.exposed[axis] += max(0.0, end - self.device)
        self.device = max(self.device, end)

    def ran(self) -> Ran:
        for end, axis in self.ends.values():
            self._await(end, axis)
        return Ran(self.device, self.computed, dict(self.exposed), self.hosted, self.calls)
