"""What a simulated step says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.schedule import Timeline
from autopar.machines import Machine


@dataclass(frozen=True, slots=True)
class StepTime:
    """A training step of the slowest rank, in us. computed: of its calls. exposed: its waits for collectives, by axis.
    hosted: its waits for the host. bubble: its idle time in the pipeline. optimizer: of AdamW. calls: its launches.

    flops: of the step on all ranks, as the model asks for them; recomputed: those that are computed again, beside them.
    dtype: of most products. tokens: of the batch, its rows where it has no integers. timeline: when each stage does
    what; None of a step that is one graph.
    """

    machine: Machine
    mesh: str
    ranks: int
    total: float
    computed: float
    exposed: Mapping[str, float]
    hosted: float
    bubble: float
    optimizer: float
    calls: int
    flops: float
    recomputed: float
    dtype: str
    tokens: int
    timeline: Timeline | None = None

    @property
    def mfu(self) -> float:
        """The share of the peak that the model's own FLOPs take (arXiv 2205.05198, section 6)."""
        return self.mfu_of(self.total)

    def mfu_of(self, us: float) -> float:
        """The share of the peak that they take in a step of so many us."""
        return self.flops / (self._peak * us)

    @property
    def hfu(self) -> float:
        """The share of the peak with what is computed again."""
        return (self.flops + self.recomputed) / (self._peak * self.total)

    @property
    def tokens_per_second(self) -> float:
        """The tokens a second of all ranks together."""
        return self.tokens / self.total * 1e6

    @property
    def _peak(self) -> float:
        """FLOPs of all ranks in a us."""
        flops = self.machine.device.flops
        return self.ranks * flops.get(self.dtype, flops["float32"]) / 1e6

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"a step on {self.mesh or 'one device'} of {self.machine.name}: {time_text(self.total)}, "
            f"{self.tokens_per_second:,.0f} tokens a second, MFU {self.mfu:.1%}, HFU {self.hfu:.1%} of {self.dtype}"
        )
        waits = [(f"waits for {axis}", us) for axis, us in self.exposed.items()]
        rows = [("computing", self.computed), *waits, ("waits for the host", self.hosted)]
        rows += [("idle in the pipeline", self.bubble)] if self.timeline is not None else []
        for name, us in (*rows, ("optimizer (AdamW)", self.optimizer)):
            yield f"  {name:<22} {time_text(us):>10}  {us / self.total:6.1%}"


def time_text(us: float) -> str:
    """`3.76 s`: a time as a person reads it."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.0f} us"
