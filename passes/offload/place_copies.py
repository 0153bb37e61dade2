"""Write copies out and back into a graph: what the forward pass keeps is on the device only around its uses.

Where each copy starts and is awaited is decided before the graph is written, by places: numbers of its nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import fx

from autopar.ir.modules import unit_of
from autopar.ir.ops.measure import local_bytes
from autopar.ir.ops.ops import AWAITED, TO_DEVICE, TO_HOST
from autopar.ir.ops.storage import root_of
from autopar.ir.options import Horizon
from autopar.ir.program import HOST, Builder, Input, Output, Program, Record, record, set_record
from autopar.machines import Machine
from autopar.passes.costs.node_costs import LazyTimes
from autopar.passes.costs.streams import BACK, OUT, Streams, launches_of
from autopar.passes.offload.when_copied import AHEAD, BEHIND, Coming, Going, ends_out, starts_back

MADE_BY = "offload"
KEPT, WAITED = "kept for the backward pass", "kept in the host's memory"  # why values go, and come back
_START, _WAIT = 0, 1  # at one place what starts there comes first


@dataclass(frozen=True, slots=True)
class Ways:
    """How copies are placed. horizon: layers that a value is back before the layer that reads it, or "auto": as late as
    hides the copy. stays: whether a value is left out whose copy back would start where its copy out ends."""

    horizon: Horizon
    machine: Machine
    stays: bool = True


class CallLine:
    """The calls of a graph in order, with the layers that have begun up to each. begins_back: where the backward pass
    begins, or the graph ends."""

    def __init__(self, program: Program, ways: Ways) -> None:
        self.program, self.ways = program, ways
        self.nodes = program.nodes
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.end = len(self.nodes) - 1  # of the output
        is_back = (i for i, node in enumerate(self.nodes) if node.op == "call_function" and record(node).is_backward)
        self.begins_back = next(is_back, self.end)
        self.begun = self._begun()
        self.times = LazyTimes(program, ways.machine)

    def _begun(self) -> list[int]:
        """How many layers have begun at each place, those of the backward pass counted anew."""
        seen: set[tuple[bool, str]] = set()
        found = []
        for i, node in enumerate(self.nodes):
            if i == self.begins_back:
                seen.clear()
            if node.op == "call_function":
                seen.add((i >= self.begins_back, unit_of(record(node).module)))
            found.append(len(seen))
        return found

    def first(self, begin: int, end: int, count: int) -> int:
        """The first place from `begin` on where so many layers have begun; `end` if there is none."""
        return bisect_left(self.begun, count, begin, end)

    def copy_us(self, node: fx.Node) -> float:
        return self.ways.machine.copy_us(local_bytes(node, self.program.mesh))

    def ends_out(self, values: Iterable[fx.Node], end: int) -> dict[fx.Node, int]:
        """Where copies out are awaited: when they are done, at most a layer later, and behind the forward pass's last
        use."""
        waiting = sorted(values, key=self.position.__getitem__)
        going = [self._going(value, end) for value in waiting]
        return dict(zip(waiting, ends_out(going, self._timed, end), strict=True))

    def _going(self, value: fx.Node, end: int) -> Going:
        made = self.position[value]
        latest = self.first(made, end, self.begun[made] + BEHIND + 1)
        return Going(made, latest, self._last_use(value, end) + 1, self.copy_us(value))

    @property
    def _timed(self) -> list[float]:
        """The clock, where copies end and start by the time that they take."""
        return self.clock if self.ways.horizon == "auto" else []

    def waits_us(self, values: Iterable[fx.Node], uses: Mapping[fx.Node, int]) -> float:
        """us by which the passes end later for copies of values, placed as they would be, as the simulator sees them
        (`Streams`). uses: the first uses on the way back."""
        ends = self.ends_out(values, self.begins_back)
        starts = self.starts_back({value: uses[value] for value in ends if value in uses}, self.begins_back)
        events = [(self.position[value] + 1, _START, OUT, value) for value in ends]
        events += [(place, _WAIT, OUT, value) for value, place in ends.items()]
        events += [(starts[value], _START, BACK, value) for value in sorted(starts, key=uses.__getitem__)]
        events += [(uses[value], _WAIT, BACK, value) for value in starts]
        return self._simulated(sorted(events, key=lambda event: event[:2])) - self._simulated([])

    def _simulated(self, events: Sequence[tuple[int, int, str, fx.Node]]) -> float:
        """us of all calls, with copies that start, or are awaited, before those at some places."""
        streams, at, under_way = Streams(self.ways.machine), 0, dict[tuple[str, fx.Node], float]()
        for place, what, way, value in (*events, (self.end, _START, "", None)):
            calls = self.calls[place] - self.calls[at]
            if calls:
                streams.compute(self.clock[place] - self.clock[at], calls * self.ways.machine.launch_us)
            at = place
            if value is not None and what == _START:
                under_way[way, value] = streams.start(way, self.copy_us(value))
            elif value is not None:
                streams.wait(under_way.pop((way, value)), way)
        return streams.device

    @cached_property
    def clock(self) -> list[float]:
        """us of all calls before each place, one behind the other."""
        return list(accumulate((self.times[n] if n.op == "call_function" else 0.0 for n in self.nodes), initial=0.0))

    @cached_property
    def calls(self) -> list[int]:
        """How many calls before each place the host launches."""
        launched = iter(launches_of(self.program))
        found = (n.op == "call_function" and next(launched) is not None for n in self.nodes)
        return list(accumulate(found, initial=0))

    def _last_use(self, value: fx.Node, end: int) -> int:
        """The last place before `end` that reads a value, or a view of it."""
        last, pending = self.position[value], [value]
        while pending:
            for user in pending.pop().users:
                if self.position[user] < end:
                    last = max(last, self.position[user])
                    if root_of(user) is root_of(value):
                        pending.append(user)
        return last

    def starts_back(self, first_uses: Mapping[fx.Node, int], begin: int) -> dict[fx.Node, int]:
        """Where copies back start, by the first use of each value: `horizon` layers ahead, or as late as hides them."""
        horizon = self.ways.horizon
        ahead = AHEAD if horizon == "auto" else horizon
        coming = [
            Coming(use, self.first(begin, self.end, self.begun[use] - ahead), self.copy_us(value))
            for value, use in first_uses.items()
        ]
        return dict(zip(first_uses, starts_back(coming, self._timed), strict=True))


class Moves:
    """Rewrites a graph with copies, of a stage if it is given. ends: the values that go out, with the places where
    their copies are awaited. starts: those that come back, with the places of their starts: values of this graph, or
    placeholders that lie in the host's memory from now on."""

    def __init__(
        self, line: CallLine, ends: Mapping[fx.Node, int], starts: Mapping[fx.Node, int], stage: int | None = None
    ) -> None:
        self.line, self.leaving, self.coming, self.stage = line, ends, starts, stage
        self.reads_from = line.begins_back if ends and starts else 0 if starts else line.end + 1
        self.build = Builder(MADE_BY)
        self.under_way: dict[fx.Node, fx.Node] = {}
        self.stored: dict[fx.Node, fx.Node] = {}  # a value -> itself in the host's memory
        self.back: dict[fx.Node, fx.Node] = {}  # a value or a view of one -> itself on the device again
        self.at: dict[int, list[tuple[Callable[[fx.Node], None], fx.Node]]] = defaultdict(list)
        for value in sorted(ends, key=line.position.__getitem__):
            self.at[ends[value]].append((self._end, value))
        uses = first_uses(line, starts, self.reads_from)
        for value in sorted(starts, key=uses.__getitem__):
            self.at[starts[value]].append((self._load, value))

    def run(self, leaves: Mapping[str, fx.Node] | None = None, gone: Iterable[str] = ()) -> Program:
        """The rewritten graph. leaves: the values that leave it in the host's memory, by the names under which they do.
        gone: the saved values that leave it no more."""
        program, leaves, gone = self.line.program, leaves or {}, set(gone)
        kept = [(node, out) for node, out in program.leaving if not (out.kind == "saved" and out.name in gone)]
        for node in program.graph.nodes:
            place = self.line.position[node]
            for act, value in self.at.get(place, ()):
                act(value)
            if node.op == "output":
                self._output(node, [result for result, _ in kept], list(leaves.values()))
            elif node in self.coming and node not in self.leaving:
                self._place(node)
            elif place < self.reads_from:
                self.build.copy(node)
            elif not self._is_view(node):  # views of what comes back are made where they are read
                self.build.copy(node, self._read)
            if node in self.leaving:
                self._start(node)
        outputs = (*(out for _, out in kept), *(Output("saved", name) for name in leaves))
        return program.with_(graph=self.build.graph, inputs=tuple(self._inputs()), outputs=outputs)

    def _inputs(self) -> Iterator[Input]:
        for node, entry in self.line.program.entries:
            is_stored = node in self.coming and node not in self.leaving
            yield Input("saved", (host_name(entry.name, self.stage),)) if is_stored else entry

    def _place(self, node: fx.Node) -> None:
        made = self.build.graph.placeholder(host_name(node.name, self.stage))
        set_record(made, record(node).with_(tier=HOST))
        self.stored[node] = self.build.value[node] = made

    def _start(self, value: fx.Node) -> None:
        like = _like(value, KEPT, "forward", HOST)
        made = self.build.value[value]
        self.under_way[value] = self.build.call(TO_HOST, made, like=like, name=f"{value.name}_out")

    def _end(self, value: fx.Node) -> None:
        like, name = _like(value, "", "forward", HOST), host_name(value.name, self.stage)
        self.stored[value] = self.build.call(AWAITED, self.under_way.pop(value), like=like, name=name)

    def _load(self, value: fx.Node) -> None:
        like = _like(value, WAITED, "backward")
        self.under_way[value] = self.build.call(TO_DEVICE, self.stored[value], like=like, name=f"{value.name}_load")

    def _is_view(self, node: fx.Node) -> bool:
        """True for a view of the forward pass of a value that comes back."""
        return is_view_of(node, self.coming)

    def _read(self, node: fx.Node) -> fx.Node:
        """What a node of the backward pass reads in place of another: what came back, or the view of that."""
        if node not in self.coming and not self._is_view(node):
            return self.build.value[node]
        if node not in self.back:
            name = f"{node.name}_back"
            if node in self.coming:
                like = _like(node, "", "backward")
                self.back[node] = self.build.call(AWAITED, self.under_way.pop(node), like=like, name=name)
            else:
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self._read)
                like = record(node).with_(phase="backward")
                self.back[node] = self.build.call(node.target, *args, like=like, name=name, **kwargs)  # type: ignore[arg-type]
        return self.back[node]

    def _output(self, node: fx.Node, results: Sequence[fx.Node | None], leaving: Sequence[fx.Node]) -> None:
        read = self.build.value.__getitem__ if self.leaving else self._read
        nodes = [result and read(result) for result in results] + [self.stored[value] for value in leaving]
        operands = tuple(record(one).layout for one in nodes if one is not None and record(one).is_tensor)
        known = record(node)
        made = self.build.graph.output(tuple(nodes))
        set_record(
            made, known if len(operands) == len(known.operands) and not leaving else known.with_(operands=operands)
        )


def _like(value: fx.Node, reason: str, phase: str, tier: str = "") -> Record:
    known = record(value)
    return known.with_(origin="", operands=(known.layout,), flops=0, reason=reason, phase=phase, tier=tier)


def is_view_of(node: fx.Node, values: Container[fx.Node]) -> bool:
    """True for a view of the forward pass, of one of some values."""
    is_forward = node.op == "call_function" and not record(node).is_backward
    return is_forward and node not in values and root_of(node) in values


def first_uses(line: CallLine, values: Collection[fx.Node], begin: int = -1) -> dict[fx.Node, int]:
    """The first place, from that on where a graph goes back, that reads each value or a view of it. begin: that place;
    by default that of the graph."""
    begin = line.begins_back if begin < 0 else begin
    found: dict[fx.Node, int] = {}
    for value in values:
        pending, uses = [value], []
        while pending:
            for user in pending.pop().users:
                if is_view_of(user, values):
                    pending.append(user)
                elif line.position[user] >= begin:
                    uses.append(line.position[user])
        if uses:
            found[value] = min(uses)
    return found


def host_name(name: str, stage: int | None = None) -> str:
    """The name of a value where it lies in the host's memory: of a stage, since several may keep what one has made."""
    return f"{name}_host" if stage is None else f"{name}_host{stage}"
