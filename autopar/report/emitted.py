"""Compile the plans that are shown, and say what the emitted programs take in place of what was predicted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.capture import Captured
from autopar.compiler.check_options import options_of
from autopar.compiler.garbage import uncollected
from autopar.compiler.meshes import mesh_of
from autopar.errors import AutoparError, PlanError, divisors, first_sentence
from autopar.ir.mesh import CONTEXT, DATA_AXES, EXPERT, axes_of_group, group_name
from autopar.ir.ops.measure import human
from autopar.ir.ops.ops import op
from autopar.ir.plan import Fixed
from autopar.ir.program import Program, operand_nodes, record
from autopar.passes.costs.streams import BACK, OUT
from autopar.planning.find_plan import DISK_LARGER, HOST_LARGER
from autopar.planning.others import best_with
from autopar.planning.planner import Planned, Tell
from autopar.planning.price.predict import Prediction
from autopar.planning.price.step_time import step_time
from autopar.planning.space.candidates import PAIRED, Candidate
from autopar.report.memory.estimate import memory_report
from autopar.report.memory.known_results import KnownResults
from autopar.report.memory.within_memory import lower_within

NEAR_LIMIT = 0.03  # of the memory: the model of a plan is not surer
NEAR_FIRST = 0.01  # of the time of the fastest: such plans are compiled
AS_FAST = 0.02  # of it: nobody can tell such plans apart before they run
MUCH_LESS = 0.1  # of the memory of the fastest
LIGHTER = 2  # of them, at most, are looked for
MUCH_WAITING = 0.05  # of a step: what a pair could hide
FOLDED = 2  # of the fastest plans, and sizes of ep, that are tried with experts over ranks of data
_EXPERT_MM = op("expert_mm")
LARGER = "larger than the memory as emitted"
AS_OTHERS = "larger than the memory, if by as much as others as emitted"
SURE_AFTER = 3  # emitted programs of a kind say by how much what was predicted of the others is too little


@uncollected()
def checked(planned: Planned, tell: Tell = lambda done, all_: None, of_time: bool = True) -> Planned:
    """The plans of a search, with what their emitted programs take: of the first one, and of those that are near the
    limit of memory or near the first. What does not fit then, or is refused, is dropped, and the next is looked at.

    tell: of progress, (done, all). of_time: False if nobody asks but whether plans fit. Raises PlanError if none does.
    """
    return _Check(planned, tell, of_time).run()


@dataclass(slots=True)
class _Check:
    planned: Planned
    tell: Tell
    of_time: bool
    known: dict[Prediction, Prediction | None] = field(default_factory=dict)  # as emitted; None of what is dropped
    dropped: Counter[str] = field(default_factory=Counter)
    larger: list[tuple[int, str]] = field(default_factory=list)  # bytes of what does not fit
    excess: dict[bool, list[float]] = field(default_factory=dict)  # memory as emitted over predicted, by "a pipeline"
    captured: Captured | None = None  # the step that all plans are compiled of, once one is
    results: KnownResults = field(default_factory=KnownResults)  # of ops, for the reports of all plans

    def run(self) -> Planned:
        shown = self._shown()
        while (wanted := self._next(shown)) is not None:
            self.tell(len(self.known), len(self.known) + 1)
            self.known[wanted] = None if self._is_larger(wanted) else self._emitted(wanted)
            shown = self._shown()
        shown, experts = self._with_experts(self._with_lighter(shown))
        shown, pairs = self._with_pairs(shown)
        found = self.planned.found
        counts = found.counts + self.dropped
        counts["simulated"] -= sum(self.dropped.values())
        if not shown:
            raise self._none_fits()
        shown, choice = light_first(shown) if self.of_time else (shown, "")
        more = "; ".join(filter(None, (choice, experts, pairs)))
        best = shown[: self.planned.asked.top]
        return replace(self.planned, found=replace(found, best=best, counts=+counts), experts=more)

    def _with_lighter(self, shown: list[Prediction]) -> list[Prediction]:
        """Add the fastest plans that hold much less, however many are between them, where the fastest one takes nearly
        all of the memory and these are as fast as can be told."""
        limit, fastest = self.planned.asked.limit, min((each.total for each in self.planned.found.best), default=0.0)
        for _ in range(LIGHTER if self.of_time else 0):
            near = _near(shown)
            least = min((each.memory for each in near), default=0.0)
            if least <= (1 - MUCH_LESS) * limit:
                break
            self.tell(len(self.known), len(self.known) + 1)
            light = best_with(self.planned, {}, (1 - MUCH_LESS) * least).best
            made = self._emitted(light[0]) if light and light[0].total < (1 + AS_FAST) * fastest else None
            if made is None:
                break
            shown = sorted([*shown, made], key=lambda each: each.total)
        return shown

    def _with_experts(self, shown: list[Prediction]) -> tuple[list[Prediction], str]:
        """The plans, among them those with experts split over ranks of data if the model has some: of the fastest plans
        with such ranks, compiled, since where rows go is in no formula. And what that brings."""
        asked = self.planned.asked
        counts = _experts(self.planned.programs.whole) if "dp" not in asked.fixed else set()
        made: list[tuple[Prediction, Prediction]] = []
        for plain in self._without_experts(shown) if counts else ():
            for each in _splits_of_experts(plain.candidate, math.gcd(*counts), asked.gpus):
                self.tell(len(self.known), len(self.known) + 1)
                found = self._emitted(replace(plain, candidate=each, is_emitted=False))
                made += [(plain, found)] if found is not None else []
        if not made:
            return shown, ""
        plain, split = min(made, key=lambda pair: pair[1].total)
        best = sorted([*shown, *(each for _, each in made)], key=lambda each: each.total)[: asked.top]
        change, plan = split.total / plain.total - 1, split.candidate
        over = f"{EXPERT}={plan.ep} in place of dp" if plan.ep > 1 else f"the ranks of {plan.experts}"
        return best, f"experts over {over}: {change:+.1%} ({plan})"

    def _with_pairs(self, shown: list[Prediction]) -> tuple[list[Prediction], str]:
        """The plans, among them the fastest pipeline, and the fastest plan without one that splits experts, with
        forwards and backwards side by side (PAIRED), if they wait much in their graphs: compiled, since what hides what
        is in no formula. And what that brings."""
        asked, said = self.planned.asked, list[str]()
        if self.planned.model.waits or not asked.fixed.keys().isdisjoint(("schedule", "chunks")):
            return shown, ""
        for is_meant in (lambda one: one.pp > 1), (lambda one: one.pp == 1 and _splits(one)):
            plain = next((each for each in shown if is_meant(each.candidate)), None)
            pair = None if plain is None else _paired(plain, self.planned.model.layers)
            if plain is None or pair is None:
                continue
            self.tell(len(self.known), len(self.known) + 1)
            paired = self._emitted(replace(plain, candidate=pair, is_emitted=False))
            if paired is not None:
                shown = sorted([*shown, paired], key=lambda each: each.total)[: asked.top]
                before = plain.candidate.schedule if plain.candidate.pp > 1 else "one graph after the other"
                said.append(f"{PAIRED} in place of {before}: {paired.total / plain.total - 1:+.1%} ({pair})")
        return shown, "; ".join(said)

    def _shown(self) -> list[Prediction]:
        """The plans of the table as far as is known, the fastest first."""
        order = [each for each in self._order() if self.known.get(each, each) is not None]
        made = [self.known.get(each) or each for each in order[: self.planned.asked.top]]
        return sorted(made, key=lambda each: each.total)

    def _order(self) -> Iterator[Prediction]:
        """The plans of the search, and behind them the others that fit by what was predicted."""
        found, limit = self.planned.found, self.planned.asked.limit
        yield from found.best
        seen = {each.candidate for each in found.best}
        for each in sorted(found.tried, key=lambda each: each.total):
            if each.candidate not in seen and each.memory <= limit:
                seen.add(each.candidate)
                yield each

    def _next(self, shown: Sequence[Prediction]) -> Prediction | None:
        """One whose emitted programs are to be looked at."""
        if not shown:
            return None
        limit, first = self.planned.asked.limit, shown[0]
        for each in shown:
            within = each.candidate.memory > 0  # the compiler keeps to it, or says that it cannot
            is_near = each is first if within else each.memory > (1 - NEAR_LIMIT) * limit
            is_fast = self.of_time and (each is first or each.total < (1 + NEAR_FIRST) * first.total)
            if not each.is_emitted and (is_near or is_fast):
                return each
        return None

    def _is_larger(self, plan: Prediction) -> bool:
        """True for a plan that is close to the limit and would not fit if its program took more than was predicted by
        as much as the best predicted of its kind: compiling each such plan takes minutes, to learn that of it."""
        excess = self.excess.get(plan.candidate.pp > 1, [])
        within = plan.candidate.memory > 0  # the compiler keeps to it
        if within or len(excess) < SURE_AFTER or plan.memory * min(excess) <= self.planned.asked.limit:
            return False
        self.dropped[AS_OTHERS] += 1
        return True

    def _without_experts(self, shown: Sequence[Prediction]) -> list[Prediction]:
        """The fastest plans with ranks of data, among them one without tp, whether it fits or not: with ep it may."""
        fixed, best = self.planned.asked.fixed, shown[0].candidate
        changes = {name: value for name, value in {"tp": 1, "pp": best.pp}.items() if name not in fixed}
        found = best_with(self.planned, changes, math.inf).best
        every = {each.candidate: each for each in [*found, *shown] if _row_axes(each.candidate)}
        return list(every.values())[:FOLDED]

    def _emitted(self, plan: Prediction) -> Prediction | None:
        """A plan with the time and the memory of its programs; None if it does not fit, or is refused."""
        planned, candidate = self.planned, plan.candidate
        micros, asked = planned.programs.micros, planned.asked
        decided = options_of(**candidate.options())
        options = replace(micros.options, **{name: getattr(decided, name) for name in candidate.options()})
        try:
            self.captured = self.captured or micros.captures.capture(asked.batch)
            compiled = lower_within(self.captured, mesh_of(candidate.mesh), options, Fixed(machine=asked.machine))
        except AutoparError as error:
            self.dropped[f"refused ({first_sentence(str(error))})"] += 1
            return None
        time = step_time(compiled, asked.machine)
        reports = [memory_report(compiled, ranks[0], known=self.results) for ranks in compiled.alike]
        memory = max(one.peak for one in reports)
        if not candidate.memory:  # else the compiler keeps to that
            self.excess.setdefault(candidate.pp > 1, []).append(memory / plan.memory)
        host = max(one.disk if candidate.folder else one.host for one in reports)
        data = sum(us for axis, us in time.exposed.items() if _is_of_data(axis))
        exposed = sum(time.exposed.values()) - data
        if host and host > (asked.machine.disk_share if candidate.folder else asked.machine.host_share)(asked.gpus):
            self.dropped[DISK_LARGER if candidate.folder else HOST_LARGER] += 1
            return None
        if memory > asked.limit:
            self.dropped[LARGER] += 1
            self.larger.append((memory, str(candidate)))
            return None
        return Prediction(
            candidate, time.total, memory, time.bubble, exposed, data, time.optimizer, is_emitted=True, host=host
        )

    def _none_fits(self) -> PlanError:
        asked = self.planned.asked
        if not self.larger:
            return PlanError(f"no plan for {asked.gpus} devices: {'; '.join(self.dropped)}")
        memory, plan = min(self.larger)
        return PlanError(
            f"no plan fits in {human(asked.limit)} a device on {asked.gpus} devices: {len(self.larger)} that should "
            f"were compiled, and the least that one takes is {human(memory)}, with {plan}. Ask for a smaller batch, "
            f"more devices, or devices with more memory."
        )


def light_first(plans: list[Prediction]) -> tuple[list[Prediction], str]:
    """Plans, the fastest first, with another one in front if it is as fast as can be told and holds much less, or as
    much with fewer options. And what was chosen, in words."""
    fastest, near = plans[0], _near(plans)
    least = min((each.memory for each in near), default=fastest.memory)
    alike = [each for each in near if (1 - MUCH_LESS) * each.memory <= least]
    light = min(alike, key=lambda each: (each.candidate.choices, each.total), default=fastest)
    if light is fastest:
        return plans, ""
    less, fewer = fastest.memory - light.memory, fastest.candidate.choices - light.candidate.choices
    gains = [f"{human(less)} less"] * (fastest not in alike)
    gains += [f"{fewer} option{'s' * (fewer > 1)} fewer"] * (fewer > 0)
    text = (
        f"first stands {light.candidate}: {light.total / fastest.total - 1:.1%} slower than {fastest.candidate}, which "
        f"is within what a prediction can tell, with {' and '.join(gains)}"
    )
    return [light, *(each for each in plans if each is not light)], text


def _near(plans: Sequence[Prediction]) -> list[Prediction]:
    """Find the emitted plans that are as fast as the first one, the fastest, as far as can be told."""
    return [each for each in plans if each.is_emitted and each.total < (1 + AS_FAST) * plans[0].total]


def _is_of_data(axis: str) -> bool:
    """True for what moves parameters and gradients: over the data axes, or between a device and its host."""
    return axis in (OUT, BACK) or not set(DATA_AXES).isdisjoint(axes_of_group(axis))


def _paired(plain: Prediction, layers: int) -> Candidate | None:
    """A plan with forwards and backwards side by side; None if it waits little, or has too few layers or micro-batches:
    more of these than it has cost more than pairs bring."""
    one = plain.candidate
    waits = plain.exposed + (plain.data if _splits(one) or one.zero > 1 else 0.0)
    if waits < MUCH_WAITING * plain.total or one.microbatches < 2 * one.pp or (one.pp > 1 and 2 * one.pp > layers):
        return None
    return one._replace(schedule=PAIRED, chunks=2)


# -- experts --------------------------------------------------------------------------------------------------------


def _splits_of_experts(plan: Candidate, experts: int, most: int) -> Iterator[Candidate]:
    """A plan with so many experts over some of its ranks of dp, and over each other axis of rows and all of them, as
    far as they divide these."""
    for ep in [size for size in divisors(math.gcd(plan.dp, experts), most) if size > 1][-FOLDED:]:
        yield plan._replace(ep=ep)
    axes = _row_axes(plan)
    for group in dict.fromkeys((*(axis for axis in axes if axis != "dp"), group_name(axes))):
        split = plan._replace(experts=group)
        if group != "dp" and experts % _expert_ranks(split) == 0:
            yield split


def _splits(plan: Candidate) -> bool:
    """True for a plan that splits experts, to which rows go."""
    return plan.ep > 1 or bool(plan.experts)


def _row_axes(plan: Candidate) -> list[str]:
    """The axes of a plan that split rows, and may split experts."""
    return [axis for axis, _ in plan.axes if axis in (*DATA_AXES, CONTEXT)]


def _expert_ranks(plan: Candidate) -> int:
    """Over how many ranks a plan splits experts."""
    sizes = dict(plan.axes)
    return math.prod(sizes[axis] for axis in axes_of_group(plan.experts)) if plan.experts else plan.ep


def _experts(program: Program) -> set[int]:
    """How many experts there are in the products by expert of a program."""
    return {record(operand_nodes(node)[1]).type.shape[0] for node in program.calls() if node.target is _EXPERT_MM}
