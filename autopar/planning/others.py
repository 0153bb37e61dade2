"""What other plans cost: the best ones with a part decided otherwise, those that hold less, those for more devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import AutoparError, PlanError
from autopar.ir.mesh import CONTEXT, CONTEXT_AXES, ULYSSES
from autopar.ir.ops.measure import human
from autopar.planning.find_plan import FoundPlans, search
from autopar.planning.planner import Asked, Planned, Tell, is_divided, planned, space_of
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import Prediction
from autopar.planning.price.step_report import time_text
from autopar.planning.space.axis_orders import ORDER
from autopar.planning.space.batch_sizes import batches_of
from autopar.planning.space.candidates import ALONE, NOTHING, OFFLOAD, STATES, Candidate

LESS = 0.98  # of what a plan holds: the next one of a frontier holds at most that
MOST = 12  # plans of a frontier
SAME = 0.001  # of a step: not worth a reason


def best_with(planned: Planned, changes: Mapping[str, Any], limit: float | None = None) -> FoundPlans:
    """The fastest plan of those with some fields decided; `best` is empty where none fits in `limit` bytes."""
    asked = replace(planned.asked, fixed={**planned.asked.fixed, **changes})
    most = asked.limit if limit is None else limit
    space = space_of(replace(asked, memory=most), planned.model)
    return search(space, planned.programs, planned.work, asked.machine, most, 1)


def frontier(planned: Planned) -> list[Prediction]:
    """Plans of which each is the fastest of those that hold as little: from the best one down."""
    made = [planned.found.best[0]]
    while len(made) < MOST:
        less = best_with(planned, {}, made[-1].memory * LESS).best
        if not less:
            break
        made += less
    return made


# -- why the others lost --------------------------------------------------------------------------------------------


def reasons(planned: Planned) -> Iterator[str]:
    """Why each of the obvious other plans is not the best, a line each: `no pipeline: 612 GB > 80 GB`."""
    best = planned.found.best[0]
    for words, changes in _changes(best.candidate._replace(ep=1), planned):
        if not changes.keys() & planned.asked.fixed.keys():
            yield f"{words}: {_reason(best, best_with(planned, changes), planned)}"


def _changes(best: Candidate, planned: Planned) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a person would ask about first."""
    if best.pp > 1:
        yield "no pipeline", {"pp": 1}
    elif planned.model.layers > 1 and not planned.model.coupled and planned.asked.gpus % 2 == 0:
        yield "pp=2", {"pp": 2}
    if best.tp > 1:
        yield "no tensor parallelism", {"tp": 1}
    for tp in sorted({2 * best.tp, best.tp // 2, *_odd(planned.asked.gpus)} - {0, 1, best.tp}):
        if planned.asked.gpus % tp == 0:
            yield f"tp={tp}", {"tp": tp}
    if best.context > 1:
        yield "no context parallelism", {CONTEXT: 1, ULYSSES: 1}
    if best.ulysses > 1:
        yield "ranks of ulysses on cp", {CONTEXT: best.context, ULYSSES: 1}
    if best.data > 1 and best.reshard_after_forward:
        other = 0 if best.zero else 3
        yield f"zero={other}", {"zero": other}
    if best.gathers_again:
        yield "parameters gathered once a step (zero=2)", {"zero": 2}
    yield from _placings(best, planned)
    if best.pp > 1 and not planned.model.waits:
        schedule = "zb-h1" if best.schedule == "1f1b" else "1f1b"
        yield f"{schedule} instead of {best.schedule}", {"schedule": schedule}
    if best.recompute != "none":
        yield "no recomputation", {"recompute": "none"}
    if planned.asked.machine.host_memory:
        others = (what for what in (NOTHING, *ALONE) if what != best.waits and _may(what, best))
        yield from ((f"offload={what}", {OFFLOAD: what}) for what in others)
    if best.again:
        yield "all layers computed again", {"recompute": "full"}


def _may(what: str, best: Candidate) -> bool:
    """True for what a person would ask of a plan that may put parameters, or activations, in the host's memory."""
    return what in (NOTHING, STATES) or best.waits != NOTHING


def _placings(best: Candidate, planned: Planned) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same axes elsewhere, and states that a node holds by itself."""
    node = planned.asked.machine.ranks
    if best.fsdp > 1:
        yield "states split over all of the data axes", {"fsdp": 1}
    elif best.zero and best.dp > node:
        yield f"fsdp={node} beside dp", {"fsdp": node}
    if planned.asked.gpus <= node or len(best.axes) < 2:
        return
    names, sizes = [axis for axis, _ in best.axes], dict(best.axes)
    for axis in names[:-1]:
        inner = (*CONTEXT_AXES, "tp")  # each splits what those before it have split
        if axis not in inner or not any(name in sizes for name in inner[inner.index(axis) + 1 :]):
            order = (*(name for name in names if name != axis), axis)
            yield f"{axis} inside the node", {**{name: sizes.get(name, 1) for name in ORDER}, "order": order}


def _odd(gpus: int) -> Iterator[int]:
    """Sizes of tp that divide the devices of a node but seldom what they are to split."""
    return (size for size in (3, 6) if gpus % size == 0)


def _reason(best: Prediction, other: FoundPlans, planned: Planned) -> str:
    if not other.best:
        return _refused(other, planned)
    made = other.best[0]
    more = made.total / best.total - 1
    if more < SAME:
        return f"as fast ({made.candidate})"
    name, us = max(_differences(best, made), key=lambda pair: pair[1])
    return f"+{more:.1%} ({made.candidate}), {name} +{time_text(us)}{_why(name, made.candidate, planned)}"


def _refused(other: FoundPlans, planned: Planned) -> str:
    asked = planned.asked
    if other.least is not None and other.least.memory > asked.limit:
        return f"{human(other.least.memory)} > {human(asked.limit)} at least ({other.least.candidate})"
    if other.counts:
        return other.counts.most_common(1)[0][0].replace(":)", ")")
    return f"no such plan for {asked.gpus} devices, {asked.batch} rows and {planned.model.layers} equal layers"


def _differences(best: Prediction, made: Prediction) -> Iterator[tuple[str, float]]:
    """How much longer each part of a step takes."""
    for name, part in PARTS_OF_A_STEP.items():
        yield name, part(made) - part(best)


WAITS = "waits for tp, cp"
PARTS_OF_A_STEP: Mapping[str, Callable[[Prediction], float]] = {
    "computing": lambda each: each.total - each.bubble - each.exposed - each.data - each.optimizer,
    WAITS: lambda each: each.exposed,
    "data axes": lambda each: each.data,
    "idle in the pipeline": lambda each: each.bubble,
    "optimizer": lambda each: each.optimizer,
}


def _why(name: str, candidate: Candidate, planned: Planned) -> str:
    if name == WAITS and candidate.tp > planned.asked.machine.ranks:
        return f": crosses nodes of {planned.asked.machine.ranks}"
    if name == "computing":
        notes = planned.programs.notes(candidate.split, candidate.rows)
        return "".join(f": {note.partition(': %')[0]}" for note in notes if note.startswith("axis 'tp'"))
    return ""


# -- other devices, other batches -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BestPlan:
    """The best plan for what is asked; or why there is none."""

    asked: Asked
    found: Planned | None
    fault: str = ""


def with_batches(asked: Asked, layers: Layers, rows: Sequence[int], is_range: bool) -> list[Asked]:
    """What is asked, for each of several batches. rows: of these; is_range: without those that no plan divides. If
    there are none, the batches that a fixed number of micro-batches of fixed rows make; else the one that is asked."""
    found = [replace(asked, batch=each) for each in rows or batches_of(asked.fixed, asked.gpus) or [asked.batch]]
    if rows and not is_range:
        return found
    return [each for each in found if is_divided(each, layers)] or found[:1]


def scales(layers: Layers, asked: Sequence[Asked], tell: Tell = lambda done, all_: None) -> list[BestPlan]:
    """The best plan for each of what is asked: numbers of devices, or batches."""
    made = []
    for i, each in enumerate(asked):
        tell(i, len(asked))
        try:
            made.append(BestPlan(each, planned(layers, replace(each, top=1))))
        except AutoparError as error:
            made.append(BestPlan(each, None, str(error).splitlines()[0]))
    return made


def fastest(made: Sequence[BestPlan]) -> Asked:
    """Choose of what was asked that with the most tokens a second. Raises PlanError where there is no plan for any."""
    rates = {scale.asked.batch: scale.found.rate for scale in made if scale.found is not None}
    if not rates:
        rows = [scale.asked.batch for scale in made]
        raise PlanError(f"none of {len(rows)} batches from {min(rows)} to {max(rows)} rows has a plan: {made[0].fault}")
    return next(scale.asked for scale in made if scale.asked.batch == max(rates, key=lambda rows: rates[rows]))
