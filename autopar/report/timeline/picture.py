"""What every drawing of a timeline shows: a lane for each rank, with blocks in time and the share of idleness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.pipeline import Pipeline
from autopar.ir.schedule import IN, KINDS, ONCE, Action, Span, Timeline

KIND_NAMES = {kind: name.replace("_", " ") for kind, name in KINDS.items()}

# (deep, light) of each kind: the stages of a rank go from deep to light
COLOURS = {
    "F": ((52, 104, 214), (150, 187, 250)),
    "B": ((222, 110, 36), (250, 190, 132)),
    "I": ((222, 110, 36), (250, 190, 132)),
    "W": ((28, 139, 98), (134, 210, 172)),
}
OTHER = ((120, 126, 138), (176, 182, 192))
Colour = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TimeBlock:
    """An action, or a message, in time. chunk: which of its rank's stages it is of, of `chunks`. slices: into how many
    its micro-batch is cut. length: of its slice, where they differ. row, rows: of a pair, whose blocks lie one above
    the other."""

    action: Action
    start_us: float
    end_us: float
    text: str = ""
    chunk: int = 0
    chunks: int = 1
    slices: int = 1
    length: int = 0
    row: int = 0
    rows: int = 1

    @property
    def label(self) -> str:
        """`F3`: the kind and the micro-batch."""
        return f"{self.action.kind}{self.action.microbatch if self.action.microbatch != ONCE else ''}"

    @property
    def number(self) -> str:
        return str(self.action.microbatch) if self.action.microbatch != ONCE else self.action.kind

    @property
    def colour(self) -> Colour:
        deep, light = COLOURS.get(self.action.kind, OTHER)
        share = self.chunk / max(self.chunks - 1, 1)
        return tuple(round(a + (b - a) * share) for a, b in zip(deep, light, strict=True))  # type: ignore[return-value]

    @property
    def ink(self) -> Colour:
        """What can be read on its colour."""
        red, green, blue = self.colour
        return (255, 255, 255) if 0.299 * red + 0.587 * green + 0.114 * blue < 165 else (16, 24, 40)

    def title(self) -> str:
        """What a pointer over it says."""
        action = self.action
        of = f" of stage {action.stage}" if action.kind in "FBIW" else ""
        number, slice_ = divmod(action.microbatch, self.slices)
        positions = f" ({self.length} positions)" if self.length else ""
        of_sequence = f", slice {slice_}{positions}" if self.slices > 1 else ""
        micro = f", micro-batch {number}{of_sequence}" if action.microbatch != ONCE else ""
        what = self.text or f"{action}: {KIND_NAMES[action.kind]}{of}{micro}"
        times = f"{time_text(self.start_us)} to {time_text(self.end_us)}"
        return f"{what}\n{times} ({time_text(self.end_us - self.start_us)})"


@dataclass(frozen=True, slots=True)
class Lane:
    """What a rank does in a step. idle: the share of the step in which it computes nothing."""

    rank: int
    blocks: tuple[TimeBlock, ...]
    messages: tuple[TimeBlock, ...]
    idle: float
    measured: bool = False

    @property
    def name(self) -> str:
        return "measured" if self.measured else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Picture:
    """`lanes` in the order in which they are drawn; `captions` say what they are."""

    lanes: tuple[Lane, ...]
    end_us: float
    captions: tuple[str, ...]
    microbatches: int

    @property
    def kinds(self) -> tuple[str, ...]:
        found = {block.action.kind for lane in self.lanes for block in lane.blocks}
        return tuple(kind for kind in KINDS if kind in found)


def picture(pipeline: Pipeline, simulated: Timeline, measured: Timeline | None = None) -> Picture:
    """The simulated step; with a measured one, rank by rank, below it."""
    head = (f"schedule '{pipeline.schedule}': {pipeline.flow.size} ranks, {pipeline.flow.stages} stages, "
            f"{pipeline.parts_text}")  # fmt: skip
    lanes = tuple(_lanes(pipeline, simulated, False))
    length = _end(simulated) - _start(simulated)
    if measured is None:
        return Picture(lanes, length, (head, f"simulated: {_summary(simulated)}"), pipeline.microbatches)
    pairs = zip(lanes, _lanes(pipeline, measured, True), strict=True)
    captions = (head, f"simulated with the times that actions took (median): {_summary(simulated)}",
                f"measured: {_summary(measured)}")  # fmt: skip
    length = max(length, _end(measured) - _start(measured))
    return Picture(tuple(lane for pair in pairs for lane in pair), length, captions, pipeline.microbatches)


def bubble_of(timeline: Timeline) -> float:
    """The share of the step in which a rank computes nothing, on average."""
    return sum(map(timeline.bubble, range(len(timeline.ranks)))) / max(len(timeline.ranks), 1)


def _summary(timeline: Timeline) -> str:
    return f"{time_text(timeline.span_us)} a step, idle {bubble_of(timeline):.1%}"


def _lanes(pipeline: Pipeline, timeline: Timeline, measured: bool) -> Iterator[Lane]:
    first = _start(timeline)
    for rank, spans in enumerate(timeline.ranks):
        stages = pipeline.stages_of(rank)
        blocks, messages = [], []
        for span in spans:
            line, start, end = span.instruction, span.start_us - first, span.end_us - first
            for row, run in enumerate(line.runs if end > start else ()):
                action = run.action
                chunk = stages.index(action.stage) if action.kind in "FBIW" else 0
                slices, length = pipeline.flow.slices, pipeline.flow.length_of(action)
                more = (chunk, len(stages), slices, length, row, len(line.runs))
                blocks.append(TimeBlock(action, start, end, "", *more))
            if line.op in ("RECV", IN):
                messages.append(TimeBlock(line.action, start, end, _message(span)))
        yield Lane(rank, tuple(blocks), tuple(messages), timeline.bubble(rank), measured)


def _message(span: Span) -> str:
    line = span.instruction
    count = sum(type_.bytes_ for type_ in line.types)
    origin = "the host's memory" if line.is_copy else f"rank {line.peer}"
    return f"{line.action} from {origin}: {', '.join(f'%{name}' for name in line.values)} ({count:,} bytes)"


def _start(timeline: Timeline) -> float:
    return min((span.start_us for spans in timeline.ranks for span in spans), default=0.0)


def _end(timeline: Timeline) -> float:
    return max((span.end_us for spans in timeline.ranks for span in spans), default=0.0)


def time_text(us: float) -> str:
    """`12.5 us`, `1.2 ms`: a time as a person reads it."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"


def ticks(end_us: float, most: int) -> list[float]:
    """Round times from 0 to the end, at most so many."""
    if end_us <= 0:
        return [0.0]
    step = 1e-3
    while end_us / step > most:
        for factor in (2, 2.5, 2):  # 1, 2, 5, 10
            step *= factor
            if end_us / step <= most:
                break
    return [i * step for i in range(int(end_us / step) + 1)]
