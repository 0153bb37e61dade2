"""A rank's programs of one micro-batch, from few captures and few searches: those of other rows and of other
recomputation are made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.capture import Captured
from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.compiler.make_plan import make_plan
from autopar.compiler.sequence import through_passes
from autopar.custom_ops.registry import check_calls
from autopar.ir.mesh import Mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.machines import Machine
from autopar.passes.search.step_cost import step_cost
from autopar.planning.between import between
from autopar.planning.depth import Shallow, shallow
from autopar.planning.stage import Micro, cut_at

KEPT = 3  # equal layers that programs are made of: one of them has one of its like on both sides
PARTS = 2  # micro-batches of such a program: all of them are alike
GOOD = 1.01  # of the cost of the best layouts: these are as good
LOW, HIGH = 1, 64  # rows of a micro-batch on one rank for which programs are made; others lie between them


@dataclass(frozen=True, slots=True)
class Split:
    """How a micro-batch is divided. sequence: activations lie split over tp where no weight needs them whole."""

    tp: int = 1
    sequence: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh((("tp", self.tp),) if self.tp > 1 else (("dp", 1),))


class Micros:
    """Makes programs of micro-batches, and keeps what several of them have in common.

    capture: the step of a batch of so many rows.
    """

    def __init__(self, capture: Callable[[int], Captured], options: StepOptions, machine: Machine) -> None:
        self.capture, self.options, self.machine = capture, options, machine
        self._captured: dict[int, Captured] = {}
        self._shallow: dict[int, Shallow] = {}
        self._local: dict[tuple[Split, int], Lowered] = {}
        self._low: dict[Split, Lowered | None] = {}
        self._ends: dict[tuple[Split, str, bool], Micro] = {}
        self._known: dict[tuple[Split, int, str, bool], Micro] = {}

    def captured(self, rows: int) -> Captured:
        """The step of micro-batches of so many rows, whole."""
        if rows not in self._captured:
            self._captured[rows] = self.capture(PARTS * rows)
        return self._captured[rows]

    def shallow(self, rows: int) -> Shallow:
        """The same with few of its equal layers; whole if it has none."""
        if rows not in self._shallow:
            whole = self.captured(rows).program
            self._shallow[rows] = shallow(whole, KEPT) or Shallow(whole, 0, 0)
        return self._shallow[rows]

    def local(self, split: Split, rows: int) -> Lowered:
        """The LOCAL program that recomputes nothing. Raises AutoparError for a mesh that the model cannot take."""
        if (split, rows) not in self._local:
            self._local[split, rows] = self.lowered(split, rows)
        return self._local[split, rows]

    @uncollected()
    def lowered(self, split: Split, rows: int, like: Lowered | None = None) -> Lowered:
        """like: a program whose layouts it takes over."""
        options = replace(self.options, microbatches=PARTS, sequence_parallel=split.sequence)
        captured = replace(self.captured(rows), program=self.shallow(rows).program)
        fixed = Fixed(machine=self.machine, decided=dict([like.decided]) if like else {})
        return through_passes(check_calls(captured.program), make_plan(captured, split.mesh, options, fixed))

    def micro(self, split: Split, rows: int, recomputed: str, halves: bool = False) -> Micro:
        """The programs of a micro-batch of `rows` on one rank of tp. halves: gradients of weights apart from those of
        inputs. Raises AutoparError as `local`."""
        key = split, rows, recomputed, halves
        if key not in self._known:
            found = self._between(*key) if LOW <= rows < HIGH else None
            self._known[key] = found or cut_at(self.local(split, rows), recomputed, self.shallow(rows).border, halves)
        return self._known[key]

    def _between(self, split: Split, rows: int, recomputed: str, halves: bool) -> Micro | None:
        local = self._alike(split)
        if local is None:
            return None
        key = split, recomputed, halves
        if key not in self._ends:
            self._ends[key] = cut_at(local, recomputed, self.shallow(LOW).border, halves)
        low, share = self._ends[key], Fraction(rows - LOW, HIGH - LOW)
        if rows == LOW:
            return low
        high = self.micro(split, HIGH, recomputed, halves)
        if low.graphs.keys() != high.graphs.keys():
            return None
        graphs = {kind: between(graph, high.graphs[kind], share) for kind, graph in low.graphs.items()}
        found = {kind: graph for kind, graph in graphs.items() if graph is not None}
        message = low.message + (high.message - low.message) * float(share)
        return Micro(low.plan, low.program, found, message) if len(found) == len(graphs) else None

    def is_alike(self, split: Split) -> bool:
        """True if the layouts of HIGH rows are as good for fewer: programs of other rows then lie between two."""
        return self._alike(split) is not None

    def _alike(self, split: Split) -> Lowered | None:
        """The program of LOW rows in the layouts of that of HIGH; None if others are better there.

        What is good at both ends is good in between: the costs of layouts are linear in the rows, so the least of all
        of them lies above the chord of its ends, and these layouts lie on a chord that is hardly above that one.
        """
        if split not in self._low:
            found, best = self.lowered(split, LOW, like=self.local(split, HIGH)), self.local(split, LOW)
            is_good = step_cost(found.program).total <= GOOD * step_cost(best.program).total
            self._low[split] = found if is_good else None
        return self._low[split]
