"""What a rank holds: by category at the peak, where the peak is, and after every node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.ops.measure import human
from autopar.ir.text.text_tables import table_text

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
ACTIVATIONS, COLLECTIVES, TEMPORARIES, INPUTS = "saved activations", "collectives", "temporaries", "inputs"
# inputs: the batch, buffers of the module, constants. collectives: what they fill or read, and what was received.
CATEGORIES = (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS, COLLECTIVES, TEMPORARIES, INPUTS)


@dataclass(frozen=True, slots=True)
class HeldValue:
    """Memory that is alive at the peak. place: the node that made it, or the name of what was there before."""

    bytes: int
    category: str
    place: str
    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return "  ".join(part for part in (self.place, self.module, self.source) if part)


@dataclass(frozen=True, slots=True)
class Moment:
    """A node, with the most bytes while it ran and those that are alive after it. graph: `step`, `forward_0` or
    `optimizer`. action: of a pipeline, e.g. `0F2`. phase: forward, backward or optimizer."""

    graph: str
    action: str
    node: str
    module: str
    source: str
    phase: str
    peak: int
    after: int

    def __str__(self) -> str:
        node = f"%{self.node}" if self.node else ""
        graph = self.graph if not self.action else f"{self.graph} ({self.action})"
        return "  ".join(part for part in (graph, node, self.module, self.source) if part)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes of one rank in a training step and in its optimizer's, from the second step on.

    states: what is there between steps, by category. categories: what is alive at the peak; they sum to it. place:
    where the peak is. worst: the peak if all rows of its group come to this rank's experts, and not as many as on
    average; None where no rows move to experts. step, optimizer: the peaks of the two parts. largest: at the peak.
    timeline: node by node. host, disk: the bytes of the host's memory, and of its disk, in which values wait; the
    device's are all others.
    """

    rank: int
    coord: Mapping[str, int]
    stages: tuple[int, ...]
    device: str
    optimizer_name: str
    peak: int
    place: Moment
    categories: Mapping[str, int]
    states: Mapping[str, int]
    step: int
    optimizer: int
    largest: tuple[HeldValue, ...]
    timeline: tuple[Moment, ...]
    worst: int | None = None
    host: int = 0
    disk: int = 0

    @property
    def title(self) -> str:
        where = ",".join(f"{axis}={place}" for axis, place in self.coord.items())
        stages = f", stage{'s' * (len(self.stages) > 1)} {', '.join(map(str, self.stages))}" if self.stages else ""
        return f"rank {self.rank} ({where}{stages}) on {self.device}, {self.optimizer_name}"

    def __str__(self) -> str:
        rows = [(name, exact(self.categories[name]), human(self.categories[name])) for name in CATEGORIES]
        rows.append(("peak", exact(self.peak), human(self.peak)))
        width = max(len(row[1]) for row in rows)
        lines = [f"memory of {self.title}: {human(self.peak)} at the peak"]
        lines += [f"  {name:20}{bytes_:>{width + 2}}  {short:>9}" for name, bytes_, short in rows]
        lines.append(f"peak at {self.place}")
        if self.worst is not None:
            lines.append(f"  with as many rows of experts as on average; {human(self.worst)} at worst, with all rows")
        if self.host:
            lines.append(f"in the host's memory {exact(self.host)} ({human(self.host)})")
        if self.disk:
            lines.append(f"on the disk {exact(self.disk)} ({human(self.disk)})")
        lines.append(f"peak of the step {human(self.step)}, of the optimizer's step {human(self.optimizer)}")
        lines.append("largest at the peak:")
        found = [(human(value.bytes), value.category, str(value)) for value in self.largest]
        lines += [f"  {line}" for line in table_text(("bytes", "category", "value"), found).splitlines()]
        return "\n".join(lines)


def exact(bytes_: int) -> str:
    """`1,234,567`"""
    return f"{bytes_:,}"


def ranks_text(reports: list[MemoryReport]) -> str:
    """A line a rank: of a pipeline one of each place on pp."""
    heads = ("rank", "stages", *CATEGORIES, "peak", "at")
    rows = [
        (
            str(report.rank), ",".join(map(str, report.stages)),
            *(human(report.categories[name]) for name in CATEGORIES),
            human(report.peak), str(report.place),
        )
        for report in reports
    ]  # fmt: skip
    return table_text(heads, rows)
