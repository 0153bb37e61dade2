"""The searches of a program, one mesh axis after the other: `propagate` takes what they find, `explain` asks why."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autopar.ir.mesh import DATA_AXES, MICROBATCH, Mesh
from autopar.ir.plan import Plan
from autopar.ir.program import Program, captured_name
from autopar.passes.rules import table_of
from autopar.passes.rules.states import State, Strategy, states_of
from autopar.passes.search.intents import INTENTS, Intent, intent_of
from autopar.passes.search.items import Classes, Item, build_classes
from autopar.passes.search.search import Options, candidates, options_of, problem_of, with_whole_weights
from autopar.passes.search.solver.problem import Problem
from autopar.passes.search.solver.solve import Choice, solve

KNOWN = 64  # problems whose answers are kept: those of the programs that a process compiles at a time

Pins = Mapping[str, Mapping[str, State]]  # the user's layouts of parameters, as states by axis


@dataclass(frozen=True, slots=True)
class Solution:
    """What the search of one axis found: of each class its options, with their costs, and the index of the chosen one.

    strict: no prohibition of the intent was broken. whole_weights: no plan splits every weight, so that some stay
    whole. above: by which share of its cost the plan may lie above the cheapest, where the search was cut short.
    """

    options: Options
    chosen: list[int]
    strict: bool = True
    whole_weights: bool = False
    above: float = 0.0

    def strategy(self, number: int) -> Strategy:
        """The chosen strategy of a class."""
        return self.options[number][self.chosen[number]][0]


@dataclass(frozen=True, slots=True)
class AxisSearch:
    """The search of one axis. The states of `classes` hold what the axes before it have chosen.

    is_idle: the axis should split the batch, or its positions, and cannot divide them: every value is replicated on it.
    may_refuse: a model for which the axis is of no use is an error. per_flop: bytes that an operation counts as. whole:
    classes that run whole on it.
    """

    classes: Classes
    axis: str
    intent: Intent
    mesh: Mesh
    pins: Pins
    per_flop: float
    is_idle: bool = False
    may_refuse: bool = False
    whole: frozenset[int] = frozenset()

    @property
    def size(self) -> int:
        return self.mesh[self.axis]

    def options(self, pins: Pins, whole_weights: bool = False) -> Options:
        """The strategies of each class, if the user's layouts were `pins`."""
        options = options_of(
            self.classes, self.axis, self.size, self.intent, pins, dict(self.mesh.axes), self.per_flop, self.whole
        )  # fmt: skip
        return with_whole_weights(self.classes, options, pins) if whole_weights else options

    def problem(self, options: Options, strict: bool) -> Problem:
        """The programme to solve; strict: with the prohibitions of the intent."""
        return problem_of(self.classes, options, self.size, self.intent, dict(self.mesh.axes), strict)

    def solve(self) -> Solution:
        """Find the cheapest plan, or one that is not far from it (see `solve`).

        Where no plan splits every weight that the intent would split, those stay replicated that must; where there is
        none within the intent, its prohibitions are broken.
        """
        if self.is_idle and not self.intent.experts:  # experts stay split, whatever the batch
            return Solution([[(_whole(item), 0.0)] for item in self.classes.items], [0] * len(self.classes.items))
        for whole_weights, strict in ((False, True), (True, True), (True, False)):
            options = self.options(self.pins, whole_weights)
            problem = self.problem(options, strict)
            choice = known_choice(_Asked(problem.content(), problem))
            if choice is not None:
                return Solution(options, [*choice.strategies], strict, whole_weights, choice.above)
        raise AssertionError("every call may run whole, so a plan exists")

    def take(self, solution: Solution) -> None:
        """Give every value its state on this axis, for the axes that follow."""
        for number, item in enumerate(self.classes.items):
            strategy = solution.strategy(number)
            for states, state in zip(item.states, strategy.results, strict=True):
                states[self.axis] = state
            for wanted, state in zip(item.wanted, strategy.operands, strict=True):
                wanted[self.axis] = state
            if strategy.choice is not None:
                item.taken.append((strategy.choice, self.size))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A problem, equal to every other one of the same content."""

    content: Hashable
    problem: Problem = field(compare=False)


@lru_cache(KNOWN)
def known_choice(asked: _Asked) -> Choice | None:
    """The cheapest plan of a problem, searched for once: programs that differ in their schedule, or in what a rank
    keeps and computes again, ask the same, and so do shallow models that a planner compiles."""
    return solve(asked.problem)


def classes_of(program: Program, plan: Plan) -> Classes:
    """The classes of a CAPTURED program, by the rules and under the layouts of a plan."""
    return build_classes(program, table_of(plan), _pins(plan), plan.options.sums_dtype, plan.batch_dims)


def axis_searches(classes: Classes, plan: Plan) -> Iterator[AxisSearch]:
    """The searches of the axes. Each must `take` its solution before the next one is asked for."""
    mesh, lengths = plan.layout_mesh, _lengths(classes)
    for axis, size in mesh.axes:
        if size > 1:
            intent = intent_of(axis, mesh, plan.sequence_parallel, plan.options.attention, lengths)
            intent = replace(intent, scatters=plan.zero >= 2)
            if axis == MICROBATCH:
                intent = replace(intent, cuts_samples=plan.cuts_samples)
            if axis in plan.expert_axes:
                intent = replace(intent, experts=True, joined=axis != plan.expert_axes[0])
            if intent.experts and plan.options.expert_rows is not None:
                intent = replace(intent, padded=True)
            is_idle = plan.batch_replicated and axis in DATA_AXES  # micro-batches divide it all the same
            is_idle |= plan.context_replicated and intent.context
            if is_idle and intent.experts:
                intent = replace(intent, batch_split=False)
            per_flop = plan.weighed_on.bytes_per_flop()
            asked = plan.whole if axis == MICROBATCH else ()
            whole = {number for node, number in classes.of.items() if asked and captured_name(node) in asked}
            yield AxisSearch(
                classes, axis, intent, mesh, _pins(plan), per_flop, is_idle, not plan.fixed.uneven, frozenset(whole)
            )


def cuts_samples(program: Program, plan: Plan) -> bool:
    """Whether micro-batches may divide samples that a CAPTURED program cuts out of its batch before the model."""
    classes, intent = classes_of(program, plan), INTENTS[MICROBATCH]
    return candidates(classes, intent) != candidates(classes, replace(intent, cuts_samples=False))


def _lengths(classes: Classes) -> set[int]:
    """The sizes of the batch's dims but that of the samples."""
    given = [item for item in classes.items if item.role is not None and item.role.entry.kind == "batch"]
    return {
        size
        for item in given
        for dim, size in enumerate(item.types[0].shape)
        if item.role is not None and dim != (item.role.batch_dim or 0)
    }


def _whole(item: Item) -> Strategy:
    return Strategy((None,) * len(item.sources), (None,) * len(item.types))


def _pins(plan: Plan) -> Pins:
    return {name: states_of(layout, plan.layout_mesh) for name, layout in plan.layouts.items()}
