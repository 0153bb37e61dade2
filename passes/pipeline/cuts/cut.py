"""Cut the forward pass into stages: by an exact dynamic program, or as the user says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autopar.errors import LayoutError
from autopar.ir.mesh import PIPELINE, Mesh
from autopar.ir.ops.measure import group_of, local_bytes
from autopar.ir.program import Program, is_getitem, record
from autopar.machines import DEVICES, Machine, named
from autopar.passes.costs.node_costs import by_origin, node_times
from autopar.passes.pipeline.cuts.terms import paths_to_terms, start_of, sums_of
from autopar.passes.pipeline.cuts.when import NodeTimes, When

Stages = dict[fx.Node, int]
AWAY_US = 1e6  # for a parameter that is used on another stage than the one that keeps it: only if nothing else is left
STATE = 4  # a parameter, its gradient and Adam's two moments


@dataclass(frozen=True, slots=True)
class StageLimits:
    """memory: bytes that a stage may hold, None if it does not matter. in_flight: of each stage, the micro-batches
    whose activations it holds at once. owners: the stages of parameters that have one already, by name. machine, mesh:
    whose times count, and where its ranks lie."""

    in_flight: Sequence[int]
    memory: int | None = None
    owners: Mapping[str, int] | None = None
    machine: Machine = field(default_factory=lambda: named(DEVICES))
    mesh: Mesh = Mesh(())


def forward_nodes(program: Program, times: NodeTimes) -> list[fx.Node]:
    """What stages are made of, in the order of the program."""
    return [node for node in program.calls() if times.is_forward(node)]


def is_at_owners(node: fx.Node) -> bool:
    """True for rows that lie where their experts are. How many these are only the data say, and a message has one size:
    they stay on their stage."""
    return any(layout is not None and layout.owned for layout in record(node).layouts)


def cut(program: Program, times: NodeTimes, stages: int, limits: StageLimits) -> Stages:
    """The stage of every forward node: pieces of the program's order, such that the slowest stage, with the transfers
    over its two borders, is as fast as can be; among those, with the others as even as can be.

    A stage costs its forward calls, the backward calls of the same source lines, and what crosses its borders both
    ways. Raises LayoutError if there are more stages than places to cut, or if no cut keeps to the memory.
    """
    line = ForwardLine(program, times, limits)
    if len(line.places) - 1 < stages:
        raise LayoutError(
            f"{stages} stages need {stages - 1} cuts, but the forward pass has only {len(line.places) - 2} places to "
            f"cut: fewer stages (a smaller pp, or fewer chunks a rank) would do."
        )
    slowest = line.best(stages, math.inf)
    if math.isinf(slowest[0]):
        raise LayoutError(
            f"no cut into {stages} stages keeps each within {limits.memory} bytes: all parameters with gradients and "
            f"Adam's state take {line.held[-1]:.0f}, all activations of a micro-batch {line.saved[-1]:.0f}. "
            f"Use more stages or micro-batches, or a larger stage_memory."
        )
    borders = line.best(stages, slowest[0] * (1 + 1e-9))[1]
    return line.stages(borders)


class ForwardLine:
    """The forward pass as a line, with prefix sums at each place where it may be cut. firsts: of each parameter its
    name and the number of the forward node that needs it first."""

    def __init__(self, program: Program, times: NodeTimes, limits: StageLimits) -> None:
        self.nodes = forward_nodes(program, times)
        self.limits = limits
        machine = limits.machine
        self.ranks = group_of(limits.mesh, PIPELINE, machine.ranks)
        cost = node_times(program, machine)
        position = {node: i for i, node in enumerate(self.nodes)}
        own = np.array([cost[node] for node in self.nodes])
        each = {node: time for node, time in cost.items() if times.of[node] is When.BODY}
        total = own + self._backward(program, each, own) + self._far_ends(program, times, cost, position)
        crossing, saved = self._values(program, position, machine, times.renewed)
        train = any(out.kind == "gradient" for out in program.outputs)
        transfer = (1 + train) * crossing
        # a place is the number of nodes before it; views stay with what they are views of
        within = self._within_routes(position)
        inner = [i for i in range(1, len(self.nodes)) if own[i - 1] > 0 and own[i:].any() and not within[i]]
        self.places = [0, *inner, len(self.nodes)]
        self.times = _prefix(total)[self.places]
        self.saved = _prefix(saved)[self.places]
        self.transfer = np.array([0.0, *transfer[inner], 0.0]) if inner else np.zeros(2)
        self.firsts = self._first_uses(program, position)
        uses = self._parameters(program)
        self.held = _prefix(uses)[self.places]
        self.uses = self._away()

    def _backward(self, program: Program, cost: Mapping[fx.Node, float], own: np.ndarray) -> np.ndarray:
        """The time of the backward calls of each forward call's line, shared out by the forward times."""
        backward = by_origin(program, cost)
        keys = [_line(node) for node in self.nodes]
        shares: dict[tuple[str, str], float] = {}
        for key, time in zip(keys, own, strict=True):
            shares[key] = shares.get(key, 0.0) + time
        lines = zip(keys, own, strict=True)
        return np.array([time / shares[key] * backward.get(key, 0.0) if shares[key] else 0.0 for key, time in lines])

    def _far_ends(
        self, program: Program, times: NodeTimes, cost: Mapping[fx.Node, float], position: Mapping[fx.Node, int]
    ) -> np.ndarray:
        """The time of what the last of several uses of a weight has done for itself, on a stage of its own: a gather,
        and what happens to its gradient before that is added to the others."""
        far_ends = np.zeros(len(self.nodes))
        lines = {_line(node): i for i, node in enumerate(self.nodes)}
        order = {node: i for i, node in enumerate(program.nodes)}
        for node in times.renewed:
            uses = [position[user] for user in node.users if user in position]
            if uses and node in position and _line(self.nodes[max(uses)]) != _line(self.nodes[min(uses)]):
                far_ends[max(uses)] += cost[node]
        for part in (join.args[0] for join in times.reductions):
            if isinstance(part, fx.Node) and (late := sums_of(part)):
                term, steps = min(paths_to_terms(part, late), key=lambda path: order[start_of(path[0])])
                if _line(term) in lines:
                    far_ends[lines[_line(term)]] += sum(cost[step] for step in steps if _line(step) != _line(term))
        return far_ends

    def _values(
        self, program: Program, position: Mapping[fx.Node, int], machine: Machine, renewed: AbstractSet[fx.Node]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The time that it takes to send what is needed on both sides of each place, and the bytes that each node
        for the backward pass. Each value is a message: two small ones cost more than one."""
        count = len(self.nodes)
        steps, saved = np.zeros(count + 1), np.zeros(count)
        for i, node in enumerate(self.nodes):
            if record(node).several:
                continue
            last = max((position[user] for user in node.users if user in position), default=i)
            bytes_ = local_bytes(node, program.mesh)
            source = node.args[0] if is_getitem(node) else None
            first = position.get(source, i) if isinstance(source, fx.Node) else i  # results stay with their call
            if last > first and node not in renewed:  # every stage that uses it gathers it
                time = machine.message_us(bytes_, self.ranks)
                steps[first + 1] += time
                steps[last + 1] -= time
            if any(user.op != "output" and record(user).is_backward for user in node.users):
                saved[i] = bytes_
        return np.cumsum(steps), saved

    def _within_routes(self, position: Mapping[fx.Node, int]) -> np.ndarray:
        """True of each place that lies between rows at their owners and what reads them."""
        steps = np.zeros(len(self.nodes) + 2)
        for i, node in enumerate(self.nodes):
            if is_at_owners(node):
                last = max((position[user] for user in node.users if user in position), default=i)
                steps[i + 1] += 1
                steps[last + 1] -= 1
        within: np.ndarray = np.cumsum(steps) > 0
        return within

    def _first_uses(self, program: Program, position: Mapping[fx.Node, int]) -> dict[fx.Node, tuple[str, int]]:
        """The first forward node that needs each parameter, maybe by way of what is computed before."""
        first_uses: dict[fx.Node, tuple[str, int]] = {}
        for node, entry in program.entries:
            if entry.kind != "parameter":
                continue
            known, pending, first = {node}, [node], len(position)
            while pending:
                for user in pending.pop().users:
                    if user in position:
                        first = min(first, position[user])
                    elif user not in known and user.op != "output" and record(user).phase == "forward":
                        known.add(user)
                        pending.append(user)
            if first < len(position):
                first_uses[node] = entry.name, first
        return first_uses

    def _parameters(self, program: Program) -> np.ndarray:
        held = np.zeros(len(self.nodes))
        for node, (_, first) in self.firsts.items():
            held[first] += STATE * local_bytes(node, program.mesh)
        return held

    def _away(self) -> dict[int, np.ndarray]:
        """Count for each stage the parameters up to a place that another stage keeps."""
        owners = self.limits.owners
        if not owners:
            return {}
        firsts = [(owners[name], first) for name, first in self.firsts.values() if name in owners]
        found = {}
        for stage in range(max(owners.values()) + 1):
            away = np.zeros(len(self.nodes))
            for owner, first in firsts:
                away[first] += owner != stage
            found[stage] = _prefix(away)[self.places]
        return found

    def best(self, stages: int, limit: float) -> tuple[float, list[int]]:
        """Without a limit the least time of the slowest stage; with one the least sum of squares of times within it.
        And where that cut is, as indices of places."""
        count = len(self.places)
        evens = math.isfinite(limit)
        before = np.full(count, math.inf)
        before[0] = 0.0
        choice = np.zeros((stages, count), dtype=int)
        for stage in range(stages):
            now = np.full(count, math.inf)
            for end in range(1, count):
                cost = self._cost(stage, end)
                if evens:
                    value = np.where(cost <= limit, before[:end] + cost**2, math.inf)
                else:
                    value = np.maximum(before[:end], cost)
                choice[stage, end] = at = int(value.argmin())
                now[end] = value[at]
            before = now
        borders, end = [], count - 1
        for stage in reversed(range(stages)):
            borders.append(end)
            end = int(choice[stage, end])
        return float(before[-1]), borders[::-1]

    def _cost(self, stage: int, end: int) -> np.ndarray:
        """The time of a stage that ends at a place, for all places where it may begin."""
        cost = self.times[end] - self.times[:end] + self.transfer[:end] + self.transfer[end]
        away = self.uses.get(stage)
        if away is not None:
            cost = cost + AWAY_US * (away[end] - away[:end])
        if self.limits.memory is not None:
            flying = self.limits.in_flight[stage]
            held = self.held[end] - self.held[:end] + flying * (self.saved[end] - self.saved[:end])
            cost = np.where(held <= self.limits.memory, cost, math.inf)
        return cost

    def stages(self, borders: list[int]) -> Stages:
        """The stage of each node; the results of a call stay with it."""
        stages: Stages = {}
        stage = 0
        for i, node in enumerate(self.nodes):
            while i >= self.places[borders[stage]]:
                stage += 1
            source = node.args[0] if is_getitem(node) else None
            stages[node] = stages[source] if isinstance(source, fx.Node) and source in stages else stage
        return stages


def _line(node: fx.Node) -> tuple[str, str]:
    return record(node).module, record(node).source


def _prefix(values: np.ndarray) -> np.ndarray:
    """The sum of what stands before each place."""
    return np.concatenate([[0.0], np.cumsum(values)])
