"""All plans for a number of devices: sizes of axes, ZeRO, recomputation, micro-batches, schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from autopar.errors import divisors
from autopar.planning.micro import HIGH, Split

RECOMPUTE = ("none", "selective", "full")
ZERO = (0, 1, 2, 3)
# Of a pipeline, with the stages that each rank has: a few numbers of them where a schedule takes any.
PIPELINES = (
    ("1f1b", 1), *(("interleaved-1f1b", chunks) for chunks in (2, 3, 4)), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2),
)  # fmt: skip
MOST_ROWS = HIGH  # of a micro-batch on one rank
SHORT = {"none": "", "selective": "selective", "full": "recompute"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan. rows: of a micro-batch on one rank. microbatches: of a step. sequence: activations lie split over tp.
    chunks: stages of each rank of a pipeline."""

    dp: int
    tp: int
    pp: int
    zero: int
    recompute: str
    rows: int
    microbatches: int
    schedule: str = "1f1b"
    sequence: bool = False
    chunks: int = 1

    @property
    def split(self) -> Split:
        """What decides, with rows and recomputation, the programs of a micro-batch."""
        return Split(self.tp, self.sequence)

    @property
    def mesh(self) -> str:
        """tp lies within a node: the last axis is numbered fastest."""
        sizes = {"pp": self.pp, "dp": self.dp, "tp": self.tp}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1"

    @property
    def halves(self) -> bool:
        """True if gradients of weights are computed apart from those of inputs."""
        return self.schedule.startswith("zb")

    def options(self) -> dict[str, Any]:
        """The options of `parallelize` beside the mesh."""
        found: dict[str, Any] = {"recompute": self.recompute}
        if self.dp > 1:
            found["zero"] = self.zero
        if self.microbatches > 1:
            found["microbatches"] = self.microbatches
        if self.pp > 1:
            found["schedule"] = self.schedule
        if self.chunks > 1:
            found["chunks"] = self.chunks
        if self.tp > 1:
            found["sequence_parallel"] = self.sequence
        return found

    def __str__(self) -> str:
        words = [self.mesh, f"zero={self.zero}" if self.dp > 1 else "", SHORT[self.recompute]]
        words += ["whole sequences" if self.tp > 1 and not self.sequence else ""]
        words += [f"{self.microbatches} x {self.rows} rows", self.schedule if self.pp > 1 else ""]
        words += [f"{self.chunks} chunks" if self.chunks > 2 else ""]
        return " ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class Space:
    """What there is to choose from. batch: rows of a step. node: devices of one. layers: equal ones of the model, 0 if
    it has none, and no pipeline is planned then. fixed: sizes of axes and options that are decided."""

    gpus: int
    batch: int
    node: int
    layers: int
    fixed: Mapping[str, Any]

    def candidates(self) -> Iterator[Candidate]:
        """All of them, in no order that means anything."""
        for tp in divisors(self.gpus, 2 * self.node):
            for pp in divisors(self.gpus // tp, max(self.layers, 1)):
                dp = self.gpus // tp // pp
                if self.batch % dp == 0:
                    yield from self._with(dp, tp, pp)

    def _with(self, dp: int, tp: int, pp: int) -> Iterator[Candidate]:
        own = self.batch // dp
        schedules = PIPELINES if pp > 1 else PIPELINES[:1]
        of_axes = product(
            divisors(own, MOST_ROWS),
            ZERO if dp > 1 else (0,),
            RECOMPUTE,
            schedules,
            (True, False) if tp > 1 else (False,),
        )
        for rows, zero, recompute, (schedule, chunks), sequence in of_axes:
            found = Candidate(dp, tp, pp, zero, recompute, rows, own // rows, schedule, sequence, chunks)
            if self._fits(found):
                yield found

    def _fits(self, found: Candidate) -> bool:
        if any(getattr(found, name) != value for name, value in self.fixed.items()):
            return False
        if found.pp == 1:
            return True
        if found.chunks > 1 and found.pp * found.chunks > self.layers:
            return False
        if found.schedule == "interleaved-1f1b" and found.microbatches % found.pp:
            return False
        return found.microbatches >= found.pp
