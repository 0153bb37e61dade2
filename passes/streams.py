"""Simulate a graph of one rank on a machine: calls in order, collectives beside them, launches by the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
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
    the device waited for collectives, by axis. hosted: what it waited for the host. calls: how many it launches."""

    total: float
    computed: float
    exposed: Mapping[str, float]
    hosted: float
    calls: int


def run(
    program: Program, machine: Machine, counts: Callable[[fx.Node], bool] = lambda node: True,
    times: Mapping[fx.Node, float] | None = None,
) -> Ran:  # fmt: skip
    """Run the nodes of a LOCAL graph that count. The host launches one call after another, `machine.launch_us` each.
    The device computes them in that order, and every axis has a stream of its own, in which a collective begins when
    its operand is there. times: of the nodes, if they are known.

    Where cores are the devices (`machine.is_host`) they move data too: nothing hides a collective.
    """
    streams = _Streams(machine, node_times(program, machine) if times is None else times)
    for node in program.calls():
        if (node.target is WAIT or not (is_getitem(node) or is_view(node))) and counts(node):
            streams.launch(node)
    return streams.ran()


@dataclass(slots=True)
class _Streams:
    machine: Machine
    times: Mapping[fx.Node, float]
    host: float = 0.0  # when each has done what it was given so far
    device: float = 0.0
    moving: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ends: dict[fx.Node, tuple[float, str]] = field(default_factory=dict)  # of collectives that nobody waited for
    computed: float = 0.0
    hosted: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: int = 0

    def launch(self, node: fx.Node) -> None:
        if node.target is WAIT:
            self._await(*self.ends.pop(node.all_input_nodes[0]))
            return
        if is_collective(node.target) and is_in_time(str(node.args[1])):
            return
        self.calls += 1
        self.host += self.machine.launch_us
        if not is_collective(node.target):
            self._compute(self.times[node])
            return
        axis, time = str(node.args[1]), self.times[node]
        if self.machine.is_host:
            self.device += time
            self.exposed[axis] += time
            self.ends[node] = self.device, axis
            return
        begin = max(self.moving[axis], self.device, self.host)
        self.moving[axis] = begin + time
        if "_start" in str(node.target):
            self.ends[node] = begin + time, axis
        else:
            self._await(begin + time, axis)

    def _compute(self, time: float) -> None:
        begin = max(self.device, self.host)
        self.hosted += begin - self.device
        self.device = begin + time
        self.computed += time

    def _await(self, end: float, axis: str) -> None:
        self.exposed[axis] += max(0.0, end - self.device)
        self.device = max(self.device, end)

    def ran(self) -> Ran:
        for end, axis in self.ends.values():
            self._await(end, axis)
        return Ran(self.device, self.computed, dict(self.exposed), self.hosted, self.calls)
