"""What a micro-batch costs on a stage, as a number outside of the equal layers and one for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.capture import Captured
from autopar.compiler.compile import lower
from autopar.compiler.lowered import Lowered
from autopar.ir.measure import local_bytes
from autopar.ir.mesh import Mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.machines import Machine
from autopar.passes.streams import run
from autopar.planning.depth import Shallow, crossing, shallow
from autopar.planning.states import Held, held

KEPT = (2, 3)  # depths at which programs are made
PARTS = 2  # micro-batches of such a program: all of them are alike


@dataclass(frozen=True, slots=True)
class Linear:
    """outside + layers * each."""

    outside: float
    each: float

    def __call__(self, layers: float) -> float:
        return self.outside + layers * self.each

    @classmethod
    def through(cls, depths: tuple[int, ...], values: list[float]) -> Linear:
        if len(values) == 1:
            return cls(values[0], 0.0)
        each = (values[1] - values[0]) / (depths[1] - depths[0])
        return cls(values[0] - depths[0] * each, each)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a rank, by its layers. forward, backward: us of a micro-batch; exposed: the part of both that waits for tp.
    once: us of what is computed once a step. The rest are bytes: parameters, their gradients, AdamW's states, what
    a micro-batch saves for its backward pass, what beside that is alive at the peak, and what one layer hands to the
    next."""

    forward: Linear
    backward: Linear
    exposed: Linear
    once: Linear
    parameters: Linear
    gradients: Linear
    states: Linear
    saved: Linear
    others: Linear
    message: float = 0.0


class Layers:
    """A step at two depths; makes programs of a micro-batch for an axis tp, and knows what they cost.

    capture: the step of a batch of so many rows.
    """

    def __init__(self, capture: Callable[[int], Captured], options: StepOptions, machine: Machine) -> None:
        self.capture, self.options, self.machine = capture, options, machine
        self._depths: dict[int, tuple[Shallow, ...]] = {}
        self._captured: dict[int, Captured] = {}
        self._known: dict[tuple[int, int, str], Cost] = {}

    def depths(self, rows: int) -> tuple[Shallow, ...]:
        """The step of so many rows at two depths; only whole if it has no equal layers."""
        if rows not in self._depths:
            captured = self._captured[rows] = self.capture(rows)
            made = [shallow(captured.program, kept) for kept in KEPT]
            found = tuple(each for each in made if each is not None)
            self._depths[rows] = found if len(found) == len(KEPT) else (Shallow(captured.program, 0, 0),)
        return self._depths[rows]

    def captured(self, rows: int) -> Captured:
        """The step of so many rows, whole."""
        self.depths(rows)
        return self._captured[rows]

    def lowered(self, rows: int, mesh: Mesh, changes: Mapping[str, object]) -> list[Lowered]:
        """The programs of a batch at all depths. Raises AutoparError for a mesh that the model cannot take."""
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        depths, fixed = self.depths(rows), Fixed(machine=self.machine)
        captured = self._captured[rows]
        return [lower(replace(captured, program=each.program), mesh, options, fixed) for each in depths]

    def cost(self, tp: int, rows: int, recompute: str) -> Cost:
        """Of a micro-batch of `rows` on one rank of `tp`. Raises AutoparError as `lowered`."""
        key = tp, rows, recompute
        if key not in self._known:
            self._known[key] = self._cost(*key)
        return self._known[key]

    def _cost(self, tp: int, rows: int, recompute: str) -> Cost:
        changes: dict[str, object] = {"recompute": recompute, "microbatches": PARTS}
        if tp > 1:
            changes["sequence_parallel"] = "auto"
        found = self.lowered(PARTS * rows, Mesh((("tp", tp),) if tp > 1 else (("dp", 1),)), changes)
        rows_ = [self._row(each) for each in found]
        depths = tuple(each.kept for each in self.depths(PARTS * rows))
        lines = {name: Linear.through(depths, [row[name] for row in rows_]) for name in rows_[0]}
        border = self.depths(PARTS * rows)[0].border
        sent = crossing(found[0].program, border) if border[0] else ()
        return Cost(**lines, message=float(sum(local_bytes(node, found[0].program.mesh) for node in sent)))

    def _row(self, compiled: Lowered) -> dict[str, float]:
        kept = held(compiled)
        assert compiled.pipeline is not None
        spent = {kind: run(graph, self.machine) for (_, kind), graph in compiled.pipeline.graphs.items()}
        once = sum(ran.total for kind, ran in spent.items() if kind in "CPE")
        exposed = sum(sum(ran.exposed.values()) for kind, ran in spent.items() if kind in "FBIW")
        backward = sum(ran.total for kind, ran in spent.items() if kind in "BIW")
        return {"forward": spent["F"].total, "backward": backward, "once": once, "exposed": exposed, **_bytes(kept)}


def _bytes(kept: Held) -> dict[str, float]:
    return {name: float(getattr(kept, name)) for name in Held.__slots__}
