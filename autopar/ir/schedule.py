"""What the ranks of a pipeline do, in order: actions, instructions, and what a simulation says of their times.

An *action* is one graph of one stage on one micro-batch, written as in torch.distributed.pipelining: `2F5` is the
forward graph of stage 2 on micro-batch 5. A *turn* of a rank is an action, or a pair of them that run side by side:
`(2F5;1B3)OVERLAP_F_B`. An *instruction* of a rank runs a turn, sends values or receives them,
or copies them into the host's memory (OUT) or back (IN).
`rank` in this file is a coordinate on the axis "pp"; ranks that differ on other axes do the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autopar.ir.program import TensorType

ONCE = -1  # the micro-batch of what is done once a step

# kind -> what is run. The first four are of a stage, once for each micro-batch.
KINDS: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",  # of inputs and weights in one: I and W together
    "I": "input_grad",
    "W": "weight_grad",
    # of a rank, and not of a stage: once a step
    "C": "count",  # no action of its own: P begins with it, for all micro-batches side by side
    "P": "prologue",
    "M": "middle",  # between the passes: of what all forwards add up to, for the backwards. On the last rank alone
    "E": "epilogue",
}
ONCE_KINDS = "PME"  # once a step
BESIDE = " beside "  # between the actions of a pair, in texts of instructions
OUT, IN = "OUT", "IN"  # copies into the host's memory, and back


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One graph on one micro-batch. `stage` is the rank itself for the kinds P and E."""

    stage: int
    kind: str
    microbatch: int = ONCE

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch != ONCE else ''}"

    @property
    def actions(self) -> tuple[Action, ...]:
        return (self,)


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """Two actions that a rank runs side by side: each goes on while the other waits for what other ranks send. Neither
    reads what the other makes."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first};{self.second})OVERLAP_F_B"

    @property
    def actions(self) -> tuple[Action, ...]:
        return self.first, self.second


Turn = Action | Pair
Orders = tuple[tuple[Turn, ...], ...]  # the turns of each rank


def turns_of(actions: Iterable[Action]) -> tuple[Turn, ...]:
    """The turn that runs up to two actions; nothing where there are none."""
    found = tuple(actions)
    return (Pair(*found),) if len(found) > 1 else found


def actions_of(order: Iterable[Turn]) -> Iterator[Action]:
    """The actions of a rank, those of a pair one behind the other."""
    return (action for turn in order for action in turn.actions)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a rank's list.

    op: RUN, SEND, RECV, OUT or IN. action: what is run, or after which the values exist; of an IN, for which they come
    back. peer: the other rank. values, types: what is sent or received, with one rank's shapes; of an OUT or an IN what
    the copies make. frees: the values that nothing needs afterwards. beside: of a pair the RUN of its second action,
    which begins and ends with this one.
    """

    op: str
    action: Action
    peer: int = -1
    values: tuple[str, ...] = ()
    types: tuple[TensorType, ...] = ()
    frees: tuple[str, ...] = ()
    beside: Instruction | None = None

    @property
    def runs(self) -> tuple[Instruction, ...]:
        """The RUN of each action of a turn; nothing of a message."""
        if self.op != "RUN":
            return ()
        return (self,) if self.beside is None else (replace(self, beside=None), self.beside)

    @property
    def is_copy(self) -> bool:
        """True for what goes on beside the turns of its own rank: into the host's memory, or back."""
        return self.op in (OUT, IN)

    @property
    def turn(self) -> Turn:
        """What is run."""
        return self.action if self.beside is None else Pair(self.action, self.beside.action)

    def __str__(self) -> str:
        if self.op == "RUN":
            return str(self.action) if self.beside is None else f"{self.action}{BESIDE}{self.beside.action}"
        other = "" if self.is_copy else f" {'to' if self.op == 'SEND' else 'from'} rank {self.peer}"
        return f"{self.op} {self.action}{other}: {', '.join(f'%{name}' for name in self.values)}"


@dataclass(frozen=True, slots=True)
class Work:
    """What an action reads and writes, by name.

    Values of its micro-batch: `reads` and `writes`. Values of the step, one for all micro-batches: `step_reads`,
    `step_writes`, and `sums`, to which each micro-batch adds its part once. carries: what a slice of a sequence takes
    over from the one before it, on the same stage; a backward action from the one after it.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    step_reads: tuple[str, ...] = ()
    step_writes: tuple[str, ...] = ()
    carries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """How values flow between the actions of a pipeline. A name is a value of the micro-batch or of the step, not both.

    ranks: the rank of each stage. microbatches: how often each of its graphs runs; with `slices` of a sequence each
    micro-batch is so many of them in a row. works: by (stage, kind). types: of all values, with one rank's shapes.
    owners: the values of the step that are there before it (parameters), with the ranks that have them.
    lengths: the positions of each slice, if they differ; sized: of those, the types of the values that differ too.
    stores: by (stage, kind), what goes into the host's memory behind an action: by its name there, that on the device.
    loads: what comes back for an action: by the name that it has then, that in the host's memory.
    """

    ranks: tuple[int, ...]
    microbatches: int
    works: Mapping[tuple[int, str], Work]
    types: Mapping[str, TensorType] = field(default_factory=dict)
    owners: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    slices: int = 1
    lengths: tuple[int, ...] = ()
    sized: Mapping[int, Mapping[str, TensorType]] = field(default_factory=dict)
    stores: Mapping[tuple[int, str], Mapping[str, str]] = field(default_factory=dict)
    loads: Mapping[tuple[int, str], Mapping[str, str]] = field(default_factory=dict)

    def copies(self, line: Instruction) -> Mapping[str, str]:
        """What an OUT or an IN may make, each with what it is a copy of."""
        return (self.stores if line.op == OUT else self.loads).get((line.action.stage, line.action.kind), {})

    def length_of(self, action: Action) -> int:
        """The positions that an action computes, if slices differ; 0 for what is done once a step, and if they are
        alike."""
        is_sliced = self.lengths and action.microbatch != ONCE
        return self.lengths[action.microbatch % self.slices] if is_sliced else 0

    def types_of(self, action: Action, names: Iterable[str]) -> tuple[TensorType, ...]:
        """The types of values that are there after an action."""
        sized = self.sized.get(self.length_of(action), {})
        return tuple(sized.get(name) or self.types[name] for name in names)

    def carrier(self, action: Action) -> Action | None:
        """The action that must have run before this one, since it leaves what this one takes over."""
        before = action.microbatch + (-1 if action.kind == "F" else 1)
        work = self.works.get((action.stage, action.kind))
        is_alike = before // self.slices == action.microbatch // self.slices
        return replace(action, microbatch=before) if work is not None and work.carries and is_alike else None

    @property
    def stages(self) -> int:
        return len(self.ranks)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return max(self.ranks) + 1

    def waits_for_all(self) -> bool:
        """True if what all forward actions add up to is read before the last backward action."""
        sums = {name for (_, kind), work in self.works.items() if kind == "F" for name in work.sums}
        reads = (name for (_, kind), work in self.works.items() if kind in "BIWM" for name in work.step_reads)
        return not sums.isdisjoint(reads)

    def step_values(self) -> frozenset[str]:
        """The values of which there is one for all micro-batches."""
        works = self.works.values()
        return frozenset(self.owners).union(*((*work.sums, *work.step_reads, *work.step_writes) for work in works))

    def reads_of(self, action: Action) -> list[tuple[str, int]]:
        """What an action reads: values, each with its micro-batch or ONCE."""
        work = self.works[action.stage, action.kind]
        return [(name, action.microbatch) for name in work.reads] + [(name, ONCE) for name in work.step_reads]

    def needs_of(self, action: Action) -> list[tuple[str, int]]:
        """What must have been made for an action, as `reads_of`: of what comes back the value that went out, or that a
        graph left in the host's memory."""
        loads = self.loads.get((action.stage, action.kind), {})
        stores = self.stores.get((action.stage, "F"), {})
        stored = ((loads.get(name, name), number) for name, number in self.reads_of(action))
        return [(stores.get(name, name), number) for name, number in stored]

    def rank_of(self, action: Action) -> int:
        """Who runs an action."""
        return self.ranks[action.stage] if action.kind in "FBIW" else action.stage


def copies_ended(lines: Sequence[Instruction], flow: Flow) -> dict[int, int]:
    """The place of each OUT -> the place of the instruction behind which its copies have ended: the next turn, or the
    IN that stands before it and brings one of them back."""
    found, open_ = dict[int, int](), list[int]()
    for place, line in enumerate(lines):
        if line.op == OUT:
            open_.append(place)
            continue
        ended = open_ if line.op == "RUN" else []
        if line.op == IN:
            wanted, number = set(flow.copies(line).values()), line.action.microbatch
            outs = ((out, lines[out]) for out in open_)
            ended = [out for out, one in outs if one.action.microbatch == number and wanted & set(one.values)]
        found.update(dict.fromkeys(ended, place))
        open_ = [out for out in open_ if out not in ended]
    return found


class Times(Protocol):
    """What a turn, a transfer and a copy take: all that a simulation asks. link_us: for how long the copies that stand
    in the graphs of a turn take the link out, and back."""

    def time_us(self, turn: Turn) -> float: ...

    def transfer_us(self, types: tuple[TensorType, ...]) -> float: ...

    def copy_us(self, types: tuple[TensorType, ...]) -> float: ...

    def link_us(self, turn: Turn) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class Costs:
    """times_us: of a graph on one micro-batch, by (stage, kind); B is I + W where it is not given, anything else 0.
    pairs_us: of a pair, by the (stage, kind) of both; as long as both alone where it is not given.
    A transfer takes latency_us and its bytes at bytes_per_us. growing_us: the part of a time, on average over the
    `slices` of a sequence, that grows with the place of the slice: attention to what lies before it. lengths: of the
    slices, if they differ; the times are then those of a slice of mean length. Copies to the host's memory and back
    take their bytes at host_bytes_per_us; those that stand in a graph are part of its time, and take links_us of the
    link out, and back, by (stage, kind)."""

    times_us: Mapping[tuple[int, str], float] = field(default_factory=dict)
    latency_us: float = 0.0
    bytes_per_us: float = float("inf")
    growing_us: Mapping[tuple[int, str], float] = field(default_factory=dict)
    slices: int = 1
    lengths: tuple[int, ...] = ()
    pairs_us: Mapping[tuple[tuple[int, str], tuple[int, str]], float] = field(default_factory=dict)
    host_bytes_per_us: float = float("inf")
    links_us: Mapping[tuple[int, str], tuple[float, float]] = field(default_factory=dict)

    def time_us(self, turn: Turn) -> float:
        if isinstance(turn, Action):
            return self._action_us(turn)
        first, second = ((one.stage, one.kind) for one in turn.actions)
        known = self.pairs_us.get((first, second))
        return known if known is not None else sum(map(self._action_us, turn.actions))

    def _action_us(self, action: Action) -> float:
        known = self.times_us.get((action.stage, action.kind))
        if known is None and action.kind == "B":
            return self.times_us.get((action.stage, "I"), 0.0) + self.times_us.get((action.stage, "W"), 0.0)
        growing, slice_ = self.growing_us.get((action.stage, action.kind), 0.0), action.microbatch % self.slices
        if not self.lengths or action.microbatch == ONCE:
            return (known or 0.0) + ((2 * slice_ + 1) / self.slices - 1) * growing  # the pairs are i + 1/2 squares
        before, length, total = sum(self.lengths[:slice_]), self.lengths[slice_], sum(self.lengths)
        return slice_us((known or 0.0) - growing, growing, before / total, length / total) * self.slices

    def with_lengths(self, lengths: tuple[int, ...]) -> Costs:
        """The costs of as many slices of these lengths."""
        return replace(self, lengths=lengths)

    def transfer_us(self, types: tuple[TensorType, ...]) -> float:
        return self.latency_us + sum(type_.bytes_ for type_ in types) / self.bytes_per_us

    def copy_us(self, types: tuple[TensorType, ...]) -> float:
        return sum(type_.bytes_ for type_ in types) / self.host_bytes_per_us

    def link_us(self, turn: Turn) -> tuple[float, float]:
        links = [self.links_us.get((action.stage, action.kind), (0.0, 0.0)) for action in turn.actions]
        return sum(out for out, _ in links), sum(back for _, back in links)


def slice_us(linear_us: float, growing_us: float, start: float, length: float) -> float:
    """The time of a slice, of that of the whole sequence: of one part its length, of the other the pairs of a query and
    a key that causal attention has in it. start, length: as parts of the sequence."""
    return linear_us * length + growing_us * length * (2 * start + length)


@dataclass(frozen=True, slots=True)
class Span:
    """When an instruction ran. Of a transfer: from its start to its arrival."""

    instruction: Instruction
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each rank did what, simulated or measured: `ranks[r]` in order of start. copied_us: of each rank, what it
    waited for copies out and back that are instructions."""

    ranks: tuple[tuple[Span, ...], ...]
    copied_us: tuple[tuple[float, float], ...] = ()

    def runs(self, rank: int) -> tuple[Span, ...]:
        """The spans of the actions, without transfers."""
        return tuple(span for span in self.ranks[rank] if span.instruction.op == "RUN")

    @property
    def span_us(self) -> float:
        """The longest time from a rank's first action to its last (the measure of arXiv 2401.10241, Table 5)."""
        runs = [found for rank in range(len(self.ranks)) if (found := self.runs(rank))]
        return max((found[-1].end_us - found[0].start_us for found in runs), default=0.0)

    def bubble(self, rank: int) -> float:
        """The share of the longest span in which a rank computes nothing."""
        busy = sum(span.end_us - span.start_us for span in self.runs(rank))
        return 1 - busy / self.span_us if self.span_us else 0.0
