"""A rank's programs of one micro-batch, from few captures and few searches: those of other rows and of other
recomputation are made of them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cached_property

from autopar.compiler.compile import decoupled, make_plan
from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.compiler.sequence import through_passes
from autopar.custom_ops.registry import check_calls
from autopar.errors import AutoparError, CoupledError, divisors
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed, Plan
from autopar.machines import Machine
from autopar.passes.costs.streams import run
from autopar.passes.pipeline.cuts.assign import timed
from autopar.passes.pipeline.cuts.coupling import check_middle
from autopar.planning.shallow.between import between
from autopar.planning.shallow.captures import LEAST_ROWS, Captures
from autopar.planning.shallow.stage_graphs import Micro, Uncut
from autopar.planning.space.split import Split

PARTS = 2  # micro-batches of a program: all of them are alike
GOOD = 1.01  # of the time in the best layouts: these are as good
LOW, HIGH = 1, 64  # rows of a micro-batch on one rank for which programs are made; others lie between them


class Micros:
    """Makes programs of micro-batches, and keeps what several of them have in common."""

    def __init__(self, captures: Captures, options: StepOptions, machine: Machine) -> None:
        self.captures, self.options, self.machine = captures, options, machine
        self._local: dict[tuple[Split, int], Lowered | AutoparError] = {}
        self._low: dict[Split, Lowered | None] = {}
        self._ends: dict[tuple[Split, str, bool], Micro] = {}
        self._known: dict[tuple[Split, int, str, bool], Micro] = {}
        self._uncut: dict[tuple[Split, int, str, bool], Uncut] = {}

    @cached_property
    def coupled(self) -> str:
        """Why the rows of a batch cannot be computed some at a time; empty if they can."""
        return self._coupling[0]

    @property
    def waits(self) -> bool:
        """True if no micro-batch can go back before all have come forward: the backward passes read what they add up
        to."""
        return self._coupling[1]

    @property
    def is_summed(self) -> bool:
        """True if ranks that divide the rows send each other something before the backward passes."""
        return bool(self.coupled) or self.waits

    @property
    def has_pairs(self) -> bool:
        """True if what is computed between the passes meets the whole batch more often than once, as similarities of
        all pairs do: it grows faster than the rows of a rank."""
        return self._coupling[2]

    @cached_property
    def _coupling(self) -> tuple[str, bool, bool]:
        """`coupled`, `waits` and `has_pairs`."""
        try:
            lowered = self._lowered(Split(), LOW, PARTS, waits=True)
            made = Uncut.of(lowered, "none", self._border).cut(halves=False)
            coupling = timed(made.program, made.plan)[1].coupling
            if coupling is not None:
                check_middle(made.graphs.get("M"), coupling)
        except CoupledError as error:
            return str(error), False, False
        self._local[Split(), LOW] = lowered
        return "", coupling is not None, bool(lowered.plan.whole)

    @property
    def parts(self) -> int:
        """Micro-batches of a program."""
        return 1 if self.coupled else PARTS

    @property
    def low(self) -> int:
        """The fewest rows of a micro-batch for which programs are made."""
        return LEAST_ROWS // self.parts

    @property
    def _border(self) -> tuple[str, str]:
        return self.captures.shallow().border

    def local(self, split: Split, rows: int) -> Lowered:
        """The LOCAL program that recomputes nothing. Raises AutoparError for a mesh that the model cannot take."""
        if (split, rows) not in self._local:
            try:
                self._local[split, rows] = self.lowered(split, rows)
            except AutoparError as error:  # a candidate of many asks for such a split
                self._local[split, rows] = error
        local = self._local[split, rows]
        if isinstance(local, AutoparError):
            raise local.with_traceback(None)
        return local

    def lowered(self, split: Split, rows: int, like: Lowered | None = None) -> Lowered:
        """like: a program whose layouts it takes over."""
        parts = split.batch // (rows * split.data) if split.batch else self.parts
        return self._lowered(split, rows, parts, like, waits=self.waits)

    @uncollected()
    def _lowered(
        self, split: Split, rows: int, parts: int, like: Lowered | None = None, waits: bool = False
    ) -> Lowered:  # fmt: skip
        """waits: some values may have to be computed of the whole batch."""
        options = replace(self.options, microbatches=parts, sequence_parallel=split.sequence)
        batch = parts * rows * split.mesh.size // (split.tp * split.context)
        captured = replace(self.captures.captured(batch), program=self.captures.shallow(batch).program)
        fixed = Fixed(machine=self.machine, decided=dict([like.decided]) if like else {})
        program, plan = check_calls(captured.program), make_plan(captured, split.mesh, options, fixed)
        if not waits:
            return through_passes(program, plan, is_verified=False)

        def made(plan: Plan) -> Lowered:
            lowered = through_passes(program, plan, is_verified=False)
            timed(lowered.program, lowered.plan)  # raises CoupledError
            return lowered

        return decoupled(program, plan, made)

    def between_passes(self, split: Split, recomputed: str) -> Micro:
        """The programs of micro-batches of a step with `split.batch` rows: what runs once in it is then of all rows of
        a rank, however many micro-batches they are. Raises AutoparError as `local`."""
        own = max(PARTS, split.batch // split.data)
        return self.micro(split, own // divisors(own, own)[1], recomputed)

    def micro(self, split: Split, rows: int, recomputed: str, halves: bool = False) -> Micro:
        """The programs of a micro-batch of `rows` on the ranks of tp and cp. halves: gradients of weights apart from
        those of inputs. Raises AutoparError as `local`."""
        key = split, rows, recomputed, halves
        if key not in self._known:
            is_between = self.low <= rows < HIGH and (split.cp == 1 or rows > self.low)  # of cp few take more rows
            is_between &= not split.batch
            found = self._between(*key) if is_between else None
            self._known[key] = found or self._cut(self.local(split, rows), *key)
        return self._known[key]

    def _cut(self, local: Lowered, split: Split, rows: int, recomputed: str, halves: bool) -> Micro:
        """local: of so many rows on these ranks."""
        key = split, rows, recomputed, local is self._low.get(split)
        if key not in self._uncut:
            self._uncut[key] = Uncut.of(local, recomputed, self._border)
        return self._uncut[key].cut(halves)

    def _between(self, split: Split, rows: int, recomputed: str, halves: bool) -> Micro | None:
        local = self._alike(split)
        if local is None:
            return None
        key = split, recomputed, halves
        if key not in self._ends:
            self._ends[key] = self._cut(local, split, self.low, recomputed, halves)
        low, share = self._ends[key], Fraction(rows - self.low, HIGH - self.low)
        if rows == self.low:
            return low
        high = self.micro(split, HIGH, recomputed, halves)
        if low.graphs.keys() != high.graphs.keys():
            return None
        graphs = {kind: between(graph, high.graphs[kind], share) for kind, graph in low.graphs.items()}
        program = between(low.program, high.program, share)
        found = {kind: graph for kind, graph in graphs.items() if graph is not None}
        message = low.message.between(high.message, float(share))
        if program is None or len(found) < len(graphs):
            return None
        return Micro(low.plan, program, found, message)

    def is_alike(self, split: Split) -> bool:
        """True if the layouts of HIGH rows are as good for fewer: programs of other rows then lie between two."""
        return self._alike(split) is not None

    def _alike(self, split: Split) -> Lowered | None:
        """The program of self.low rows in the layouts of that of HIGH; None if others are better there.

        What is good at both ends is good in between: what calls ask for is linear in the rows, so that the least of all
        layouts lies above the chord of its ends, nearly, and these lie on a chord that is hardly above that one.
        """
        if split not in self._low:
            lowered, best = self.lowered(split, self.low, like=self.local(split, HIGH)), self.local(split, self.low)
            took = [run(each.program, self.machine).total for each in (lowered, best)]
            is_good = took[0] <= GOOD * took[1]
            self._low[split] = lowered if is_good else None
        return self._low[split]
