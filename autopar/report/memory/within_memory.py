"""`memory=`: the fastest step that keeps to so many bytes of a device, of those that compute again, move and gather."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Unpack

from torch import nn

from autopar.capture import Captured, LossFn
from autopar.compiler.compile import CaptureKeywords, Dealing, capture_step, dumped, lower, varied
from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.modules import unit_of
from autopar.ir.ops.measure import human
from autopar.ir.options import StepOptions, read_bytes
from autopar.ir.plan import Fixed, Plan
from autopar.ir.program import given_of, is_gathered_input, record
from autopar.passes.recompute.policies import policies_of
from autopar.planning import step_time
from autopar.report.memory.estimate import memory_report
from autopar.report.memory.known_results import KnownResults
from autopar.report.memory.report import ACTIVATIONS, MemoryReport

ROUNDS = 3  # steps that are tried along one way, and so many more where layers stay gathered
CLOSE = 0.015  # of the limit: a step that leaves less of it unused is near enough
GATHERED = (1.0, 0.5, 0.25)  # parts of the layers that may stay gathered, beside the best of the other ways
RESHARD = "reshard_after_forward"
Changes = dict[str, Any]


def compile_step(
    model: nn.Module, loss_fn: LossFn | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh,
    options: StepOptions, *, fixed: Fixed | None = None, **known: Unpack[CaptureKeywords],
) -> tuple[Captured, Lowered]:  # fmt: skip
    """Check a model, capture its step and take that through the passes: the one way from a module to its programs.

    fixed: as of `lower`. known: what `capture` may be told.
    """
    dealing = Dealing(mesh, options, fixed or Fixed())
    captured = capture_step(model, loss_fn, args, kwargs, options, dealing, **known)
    return captured, lower_within(captured, mesh, options, fixed)


@uncollected()
def lower_within(
    captured: Captured, mesh: Mesh, options: StepOptions | None = None, fixed: Fixed | None = None
) -> Lowered:
    """Take a captured program through the passes (`lower`), with what `memory=` needs of recomputation, offload and
    gathered layers. Raises PlanError, with the least that a rank can hold, if that is more than the limit.

    Each step that is tried is emitted: its peak is the estimator's, its time the simulator's. So what is taken is no
    slower, and holds no more, than any that was tried, and among these is the best of each way alone.
    """
    wanted = options or StepOptions()
    if wanted.memory is None:
        return lower(captured, mesh, wanted, fixed)
    check_alone(Plan(mesh, options=wanted))
    plain = lower(captured, mesh, replace(wanted, memory=None), fixed)
    if not any(out.kind == "gradient" for out in captured.program.outputs):
        return plain  # it keeps nothing
    limit = read_bytes(wanted.memory) if isinstance(wanted.memory, str) else wanted.memory
    assert limit is not None, "it is checked where it is written"
    return dumped(_Search(plain, limit).run())


def check_alone(plan: Plan) -> None:
    """Raise PlanError for options that `memory=` decides itself."""
    options = plan.options
    said = {
        "recompute": options.recompute != "none",
        "reshard_after_forward": options.reshard_after_forward is not True,
        "offload": plan.offloads("activations"),
    }
    for name in (name for name, is_said in said.items() if is_said):
        raise PlanError(
            f"memory={options.memory!r} with {name}={getattr(options, name)!r}: memory= decides recompute, "
            f"reshard_after_forward and the offload of activations itself. Leave {name} or memory out."
        )


@dataclass(frozen=True, slots=True)
class _Way:
    """Steps along one line: from 0.0 to 1.0 a rank holds less and the step takes longer. begin: where it would fit if
    all it saves were activations that are kept at the peak; slope: the bytes of these."""

    changes: Callable[[float], Changes]
    begin: float
    slope: float


@dataclass(frozen=True, slots=True)
class _Tried:
    """An emitted step. report: of the rank that holds most. us: its simulated time. changes: of its options. way,
    place: where it was found."""

    lowered: Lowered
    report: MemoryReport
    us: float
    changes: Changes
    way: _Way | None = None
    place: float = 0.0

    @property
    def peak(self) -> int:
        return self.report.peak


class _Search:
    """Looks for the fastest step within a limit, along each way, and then with layers that stay gathered."""

    def __init__(self, plain: Lowered, memory: int | float) -> None:
        self.memory, plan = memory, plain.plan
        self.known: dict[str, _Tried | None] = {}
        self.results = KnownResults()
        self.plain = self._emitted(plain, {})
        self.limit = int(memory * self.plain.peak) if isinstance(memory, float) else memory
        units = _units(plain)
        layers = policies_of(plain.program, "full").layers
        self.layers = [name for name in units if name and name in layers]  # no pattern names the model itself
        self.gathered = _gathered(plain, units) if plan.gathers_again and not plan.offloads("parameters") else []
        self.may_move = plan.options.compile != "inductor"

    def run(self) -> Lowered:
        best = self._best([self.plain])
        for way in self._ways() if best is None else ():
            best = self._best([best, *self._along(way, {}, best, way.begin)])
        if best is None:
            best = self._best([self.tried(way.changes(1.0)) for way in self._ways()])
        if best is None and self.may_move:  # nothing of another micro-batch comes or goes beside the one at work
            best = self._best([self.tried({**way.changes(1.0), "horizon": 1}) for way in self._ways()])
        if best is None:
            raise self._impossible()
        for part in GATHERED if self.gathered else ():
            found = self._best([best, *self._beside(best, part)]) or best
            best, is_better = found, found is not best
            if is_better:  # fewer would be gathered again, for no less that is computed again
                break
        return best.lowered.with_note(self._note(best))

    def tried(self, changes: Changes) -> _Tried | None:
        """A step with these options; None if no step can have them, as a budget that is too small."""
        key = repr(sorted(changes.items()))
        if not changes:
            return self.plain
        if key not in self.known:
            try:
                self.known[key] = self._emitted(varied(self.plain.lowered, **changes), changes)
            except PlanError:
                self.known[key] = None
        return self.known[key]

    def _emitted(self, lowered: Lowered, changes: Changes) -> _Tried:
        reports = (memory_report(lowered, ranks[0], known=self.results) for ranks in lowered.alike)
        return _Tried(lowered, max(reports, key=lambda one: one.peak), step_time(lowered).total, changes)

    def _best(self, steps: Iterable[_Tried | None]) -> _Tried | None:
        fitting = [one for one in steps if one is not None and one.peak <= self.limit]
        return min(fitting, key=lambda one: (one.us, one.peak), default=None)

    def _ways(self) -> Iterator[_Way]:
        """Values that move or are computed again, in one budget, which takes none of the two where the other is better;
        layers that are computed again as a whole, from the first one on; and where all of them are too large, what
        enters them moves."""
        yield self._way(lambda part: {"recompute": 1.0 - part, **self._moved(1.0)} if part else {}, self.plain)
        if not self.layers:
            return
        yield self._way(self._full, self.plain)
        full = self.tried(self._full(1.0)) if self.may_move else None
        if full is not None and full.peak > self.limit:
            yield self._way(lambda part: {**self._full(1.0), **self._moved(part)}, full)

    def _way(self, changes: Callable[[float], Changes], start: _Tried) -> _Way:
        """A way from a step that is too large."""
        kept = max(1, start.report.categories[ACTIVATIONS])
        return _Way(changes, min(1.0, max(0.02, (start.peak - self.limit) / kept)), kept)

    def _moved(self, part: float) -> Changes:
        """That part of what is kept moves."""
        return {"offload": {**self.plain.lowered.plan.options.offloaded, "activations": part}} if self.may_move else {}

    def _full(self, part: float) -> Changes:
        names = self.layers[: math.ceil(part * len(self.layers))]
        return {"recompute": dict.fromkeys(names, "full")} if names else {}

    def _along(self, way: _Way, also: Changes, best: _Tried | None, place: float) -> Iterator[_Tried]:
        """Steps of a way towards the first one that fits, from a place on. also: what is changed with each.

        From one that is too large, or has room, the next one is as far as the activations that are kept would bring it;
        where that was tried, halfway. Farther on a step takes longer: so of one that is slower than the best known one
        the bytes are not asked for, and where one is slower and too large the way has nothing better.
        """
        low, high, before = 0.0, 1.0, (0, 0.0)
        for _ in range(ROUNDS):
            made = self.tried({**way.changes(place), **also})
            step = 0.0
            if made is not None and (made.peak, made.us) != before:
                yield replace(made, way=way, place=place)
                is_large, is_slow = made.peak > self.limit, best is not None and made.us >= best.us
                if (is_large and (is_slow or place >= 1.0)) or 0 <= self.limit - made.peak < CLOSE * self.limit:
                    return
                step, before = (made.peak - self.limit) / way.slope, (made.peak, made.us)
                low, high = (place, high) if is_large else (low, place)
                best = self._best([best, made])
            else:
                low, high = (place, high) if made is not None and made.peak > self.limit else (low, place)
            ahead = place + 1.02 * step
            is_open = low < ahead < high or (ahead >= high == 1.0 and step > 0)
            place = min(ahead, 1.0) if is_open else (low + high) / 2

    def _beside(self, best: _Tried, part: float) -> Iterable[_Tried | None]:
        """The best step, with a part of the layers that stay gathered: the last ones, which are read again first."""
        count = math.ceil(part * len(self.gathered))
        also = {RESHARD: dict.fromkeys(self.gathered[-count:], False)}
        changes = {name: value for name, value in best.changes.items() if name != RESHARD}
        if best.way is None:
            return [self.tried({**changes, **also})]
        return self._along(best.way, also, best, best.place)

    def _note(self, found: _Tried) -> str:
        stay = found.changes.get(RESHARD, {})
        said = [f"{name}={value!r}" for name, value in found.changes.items() if name != RESHARD]
        said += [f"{len(stay)} of {len(self.gathered)} modules stay gathered"] if stay else []
        return (
            f"memory={self.memory!r}: {human(found.peak)} of {human(self.limit)} at the peak of a rank by "
            f"{', '.join(said) or 'nothing'}; simulated {found.us / 1e3:.4g} ms a step, and with "
            f"{human(self.plain.peak)} {self.plain.us / 1e3:.4g} ms"
        )

    def _impossible(self) -> PlanError:
        steps = [self.plain, *(one for one in self.known.values() if one is not None)]
        least = min(steps, key=lambda one: one.peak)
        said = ", ".join(f"{name}={value!r}" for name, value in least.changes.items()) or "nothing changed"
        states = sum(least.report.states.values())
        return PlanError(
            f"memory={self.memory!r}: a rank's device may hold {self.limit} bytes at its peak, and holds {least.peak} "
            f"at least (with {said}), {states} of them parameters, gradients, states and inputs. Write {least.peak} or "
            f'more, zero=3 over more ranks, offload="optimizer" or "parameters", a smaller batch or more micro-batches.'
        )


def _units(lowered: Lowered) -> list[str]:
    return list(dict.fromkeys(unit_of(record(node).module) for node in lowered.history[0][1].calls()))


def _gathered(plain: Lowered, units: Iterable[str]) -> list[str]:
    """The modules whose parameters the backward pass gathers again, in the order of the forward pass."""
    program = dict(plain.history)["partition"]
    names = {node: entry.name for node, entry in program.entries}
    again = [node for node in program.calls() if is_gathered_input(node) and record(node).is_backward]
    found = {unit_of(names[given_of(node)].rpartition(".")[0]) for node in again}
    return [unit for unit in units if unit and unit in found]
