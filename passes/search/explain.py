"""Why a value has its state on each axis: what else it could have had, and what that would have cost.

The search gives a plan, not its reasons. They are found by asking again: the programme of one axis is solved once as
it was, and once for every other state of the value, all else free. What the objective grows by is the state's price.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from autopar.ir.layout import OWNED, Layout, fits
from autopar.ir.plan import Plan
from autopar.ir.program import Program, record, source_of
from autopar.passes.rules.splits import Split, choice_at
from autopar.passes.rules.states import State, Strategy, compose, may_split
from autopar.passes.search.axes import AxisSearch, Solution, axis_searches, classes_of
from autopar.passes.search.items import Classes
from autopar.passes.search.search import Options
from autopar.passes.search.solver.problem import Edge, Problem
from autopar.passes.search.solver.solve import solve

USER, INTENT, RULE, SIZE, COST = "the user", "intent", "the op's rule", "size", "cost"
SEARCH = "the search"  # intent or cost: only the prices tell
CHOSEN, POSSIBLE, FORBIDDEN, IMPOSSIBLE = "chosen", "possible", "forbidden", "impossible"
UNTRIED = "not tried"  # the rule allows it, but no candidate spreads there from what the axis splits
# A move that the intent forbids, where nothing else leads to a state: so dear that there are as few as can be.
BREACH = 1000.0
TOLERANCE = 1e-9  # of the objective: the solver's

Move = tuple[str, str]  # (what moves it, the value's name)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One state that a value could have on an axis.

    cost: how much dearer than the plan, as the solver weighs it: bytes per rank, with the work that is repeated and
    the intent's weights. moved: how many more bytes per rank the collectives move. None: there is no such plan.
    """

    layout: Layout  # of this axis alone
    verdict: str
    cost: float | None = None
    moved: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """The state of a value on one axis. `alike`: the values that share it and its prices, since they are used alike."""

    axis: str
    size: int
    state: str
    by: str
    because: str
    alternatives: tuple[Alternative, ...]
    alike: tuple[str, ...]


Names = Mapping[fx.Node, str]


def explain(program: Program, plan: Plan, node: fx.Node) -> tuple[Decision, ...]:
    """The decisions on one tensor of the program that `propagate` was given, axis by axis."""
    (source, result), names = source_of(node), _names(program)
    decisions = []
    for search, solution in _searches(program, plan):
        question = _Question(search, solution, names, source, result)
        decisions.append(question.idle() if search.is_idle else question.answer())
    return tuple(decisions)


def explain_briefly(program: Program, plan: Plan, nodes: list[fx.Node]) -> dict[fx.Node, dict[str, str]]:
    """What decided each axis of some placeholders, without the prices."""
    found: dict[fx.Node, dict[str, str]] = {node: {} for node in nodes}
    for search, solution in _searches(program, plan):
        for node in nodes:
            options = solution.options[search.classes.of[node]]
            question = _Question(search, solution, {}, node, 0)
            if search.is_idle:
                by = SIZE
            elif question.pinned:
                by = USER
            elif len(options) > 1:
                by = SEARCH
            else:
                by = INTENT if options[0][0].results != (None,) else question.unsplit()[0]
            found[node][search.axis] = by
    return found


def _searches(program: Program, plan: Plan) -> Iterator[tuple[AxisSearch, Solution]]:
    """The searches of `propagate` with what they found, each before its solution is taken."""
    for search in axis_searches(classes_of(program, plan), plan):
        solution = search.solve()
        yield search, solution
        search.take(solution)


def _names(program: Program) -> Names:
    names = {node: f"%{node.name}" for node in program.graph.nodes}
    names.update((node, entry.name) for node, entry in program.entries)
    return names


class _Question:
    """One value on one axis."""

    def __init__(self, axis: AxisSearch, solution: Solution, names: Names, node: fx.Node, result: int) -> None:
        self.axis, self.solution, self.names, self.result = axis, solution, names, result
        self.number = axis.classes.of[node]
        self.item = axis.classes.items[self.number]
        self.shape = self.item.types[result].shape
        self.entry = self.item.role.entry if self.item.role else None
        self.pinned = self.entry is not None and self.entry.name in axis.pins

    def idle(self) -> Decision:
        """The decision on an axis that cannot divide the batch: there was nothing to choose."""
        because = f"'{self.axis.axis}' cannot divide this batch: every rank computes all of it"
        replicated = Alternative(self._layout(None), CHOSEN, 0.0, 0.0)
        return Decision(self.axis.axis, self.axis.size, self._spell(None), SIZE, because, (replicated,), self._alike())

    def answer(self) -> Decision:
        axis, solution = self.axis, self.solution
        plan = _Plan.of(axis, solution.options, solution.chosen, solution.strict)
        self.plan = plan
        self.chosen = solution.strategy(self.number).results[self.result]
        # Without the pin of this value: what else the search would have thought of.
        name = self.entry.name if self.entry else None
        pins = {key: pin for key, pin in axis.pins.items() if key != name}
        self.options = axis.options(pins, solution.whole_weights)
        found = [self._alternative(state) for state in self._states()]
        by, because = self._decider(found)
        return Decision(axis.axis, axis.size, self._spell(self.chosen), by, because, tuple(found), self._alike())

    def _alike(self) -> tuple[str, ...]:
        return tuple(self.names[node] for node, number in self.axis.classes.of.items() if number == self.number)

    def _layout(self, state: State) -> Layout:
        return compose({self.axis.axis: state}, len(self.shape), self.axis.mesh)

    def _states(self) -> list[State]:
        """All states worth a word, the chosen one first."""
        known = [strategy.results[self.result] for strategy, _ in self.options[self.number]]
        splits: list[State] = [(dim, 1) for dim in range(len(self.shape))]
        if self.item.role is not None:
            splits += self.item.role.splits
        rest = sorted(dict.fromkeys([*known, *splits]), key=str)
        return list(dict.fromkeys([self.chosen, None, *rest]))

    def _alternative(self, state: State) -> Alternative:
        layout = self._layout(state)
        if state == self.chosen:
            return Alternative(layout, CHOSEN, 0.0, 0.0)
        is_option = any(one.results[self.result] == state for one, _ in self.options[self.number])
        if self._is_owned() and not is_option:
            return Alternative(layout, FORBIDDEN, why=f"'{self.axis.axis}' {self._intent()}")
        if state is None and not is_option and self.item.rule is not None:
            return Alternative(layout, FORBIDDEN, why=f"each rank of '{self.axis.axis}' would compute all of it")
        fault = self._misfit(state) or self._outside_rule(state)
        if fault:
            return Alternative(layout, IMPOSSIBLE, why=fault)
        allowed = [pair for pair in self.options[self.number] if pair[0].results[self.result] == state]
        if not allowed and self.item.rule is not None:
            return Alternative(layout, UNTRIED, why=f"{self._subject()} does not reach this dim")
        forced = list(self.options)
        forced[self.number] = allowed or [(Strategy((), (state,)), 0.0)]
        found = _Plan.solve(self.axis, forced, self.solution.strict)
        if found is not None and allowed:
            return Alternative(layout, POSSIBLE, *found.more_than(self.plan), found.other_moves(self.plan))
        found = found or _Plan.solve(self.axis, forced, strict=True, breach=True)
        if found is None:
            return Alternative(layout, IMPOSSIBLE, why="no collective gives it")
        why = f"'{self.axis.axis}' {self._intent()}"
        if found.breaches:
            why = f"it would {_spell_moves(found.breaches)}, which '{self.axis.axis}' forbids"
        return Alternative(layout, FORBIDDEN, None, found.more_than(self.plan)[1], why)

    def _misfit(self, state: State) -> str:
        """Why a split does not divide; "" if it does."""
        if not isinstance(state, tuple):
            return ""
        mesh = self.axis.mesh
        earlier = dict(self.item.states[self.result])
        dim, outer = state
        if not _nested(earlier, state, self.axis):
            return f"its pieces of dim {dim} would cut through those of an earlier axis"
        if fits(self.shape, compose({**earlier, self.axis.axis: state}, len(self.shape), mesh), mesh):
            return ""
        taken = [name for name, other in earlier.items() if isinstance(other, tuple) and other[0] == dim]
        after = f" after {', '.join(taken)}" if taken else ""
        parts = f" x {abs(outer)} blocks" if outer != 1 else ""
        return f"dim {dim} (size {self.shape[dim]}) is not divisible by {self.axis.size}{parts}{after}"

    def _outside_rule(self, state: State) -> str:
        """Why the op cannot give a state; "" if it can, or if the value is an input."""
        rule = self.item.rule
        if rule is None or any(strategy.results[self.result] == state for strategy, _ in self.options[self.number]):
            return ""
        op = str(self.item.node.target)
        if not isinstance(state, tuple):
            return f"{op} never gives a sum in parts here"
        choice = choice_at(rule.results[self.result], state, dict(rule.sizes))
        if choice is None or choice[0] in rule.replicated:
            return f"{op} computes dim {state[0]} whole"
        if not may_split(rule, choice, self.axis.size, tuple(self.item.taken)):
            return f"{op} cannot split dim {state[0]} over {self.axis.size} ranks"
        return ""

    def unsplit(self) -> tuple[str, str]:
        """Why an input is whole on this axis though nothing was weighed: the intent, or no op could take a piece."""
        splits = [self._misfit((dim, 1)) for dim in range(len(self.shape))]
        wanted = self.axis.intent.weights_split and self.entry is not None and self.entry.kind == "parameter"
        if not wanted:
            return INTENT, f"'{self.axis.axis}' {self._intent()}"
        if splits and all(splits):
            return SIZE, "; ".join(splits)
        return RULE, "no op that uses it can take a piece of it"

    def _decider(self, alternatives: list[Alternative]) -> tuple[str, str]:
        if self.pinned:
            return USER, "the user's layout"
        possible = [one for one in alternatives if one.verdict == POSSIBLE and one.cost is not None]
        if possible:
            nearest = min(possible, key=lambda one: one.cost or 0.0)
            tie = "" if nearest.cost else " (equally cheap: the first is taken)"
            above = self.solution.above
            cut = f", as far as was searched: a plan may cost up to {100 * above:.2g} % less" if above else ""
            return COST, f"the cheapest of {len(possible) + 1} states within the intent{tie}{cut}"
        only = [strategy.results[self.result] for strategy, _ in self.options[self.number]]
        if self.entry is not None and only == [None]:
            return self.unsplit()
        if self._is_owned():
            return INTENT, f"'{self.axis.axis}' {self._intent()}"
        if any(one.verdict == FORBIDDEN for one in alternatives):
            return INTENT, f"'{self.axis.axis}' {self._intent()}"
        reasons = "; ".join(dict.fromkeys(one.why for one in alternatives if one.why))
        return (SIZE if alternatives[1:] and all("divisible" in one.why for one in alternatives[1:]) else RULE), reasons

    def _is_owned(self) -> bool:
        """True for rows that are where their experts are."""
        state = self.solution.strategy(self.number).results[self.result]
        return isinstance(state, tuple) and state[1] == OWNED

    def _subject(self) -> str:
        if self.axis.intent.context:
            return "a split of the sequence"
        return "a split of the batch" if self.axis.intent.batch_split else "a split of the weights"

    def _intent(self) -> str:
        """What the axis means for this value, after its name."""
        if self.axis.intent.context:
            if self.entry is None:
                return "splits what lies along the sequence; only gradients, scalars and what attention reads move"
            return (
                "splits the sequence: the batch is given whole, and sliced where it is used"
                if self.entry.kind == "batch"
                else "splits the sequence; all other inputs are replicated"
            )
        if self.axis.intent.experts and (self._is_owned() or (self.item.role is not None and self.item.role.experts)):
            return "splits the experts, and a row is computed by the rank that has its expert"
        if self.axis.intent.batch_split:
            if self.entry is None:
                return "splits what is computed from the batch; only gradients and scalars move"
            return (
                "splits the batch"
                if self.entry.kind == "batch"
                else "splits the batch; all other inputs are replicated"
            )
        if self.entry is not None and self.entry.kind == "parameter":
            role = self.item.role
            rows = role is not None and (role.vocabulary or (role.table and role.multiplied))
            return f"splits a weight {'that is looked up by rows' if rows else 'wherever it can'} and never gathers it"
        if self.entry is not None:
            return "splits weights; all other inputs are replicated"
        moves = (
            "scatters and gathers activations on the sequence"
            if self.axis.intent.sequence_split
            else "sums activations"
        )
        return f"{moves}, and keeps a weight's gradient where the weight lies"

    def _spell(self, state: State) -> str:
        if state is None:
            return "replicated"
        if isinstance(state, str):
            return f"partial ({state})"
        dim, outer = state
        if outer == OWNED:
            return f"has each row of dim {dim} where its expert is"
        blocks = f", each of {abs(outer)} blocks of it" if outer != 1 else ""
        return f"splits dim {dim}{blocks}{', every second in reverse' if outer < 0 else ''}"


@dataclass(frozen=True, slots=True)
class _Plan:
    """A solution of one axis: its objective, its moves with their bytes per rank, the moves that the intent forbids."""

    chosen: list[int]
    objective: float
    moves: dict[Move, float]
    breaches: dict[Move, float]

    @classmethod
    def solve(cls, axis: AxisSearch, options: Options, strict: bool, breach: bool = False) -> _Plan | None:
        plain = axis.problem(options, strict=False)
        problem = axis.problem(options, strict=True) if strict else plain
        allowed = [edge.move for edge in problem.edges]
        if breach:
            pairs = zip(plain.edges, problem.edges, strict=True)
            problem = replace(problem, edges=[_breached(free, bound) for free, bound in pairs])
        choice = solve(problem)
        return None if choice is None else cls._priced(axis, plain, problem, allowed, choice.strategies)

    @classmethod
    def of(cls, axis: AxisSearch, options: Options, chosen: list[int], strict: bool) -> _Plan:
        """The plan that was chosen, with its prices."""
        plain = axis.problem(options, strict=False)
        problem = axis.problem(options, strict=True) if strict else plain
        return cls._priced(axis, plain, problem, [edge.move for edge in problem.edges], chosen)

    @classmethod
    def _priced(
        cls, axis: AxisSearch, plain: Problem, problem: Problem, allowed: list[Mapping[Any, float]], chosen: list[int]
    ) -> _Plan:
        moves: dict[Move, float] = {}
        breaches: dict[Move, float] = {}
        prices: dict[object, float] = {}
        for edge, priced, within in zip(plain.edges, problem.edges, allowed, strict=True):
            s, t = edge.source_states[chosen[edge.source]], edge.user_states[chosen[edge.user]]
            prices[edge.value, s, t] = max(priced.move[s, t], prices.get((edge.value, s, t), 0.0))
            name = _collective(s, t)
            if name:
                move = name, _name(axis.classes, edge.source)
                moves[move] = max(edge.move[s, t], moves.get(move, 0.0))
                if (s, t) not in within:
                    breaches[move] = moves[move]
        work = sum(costs[index] for costs, index in zip(problem.costs, chosen, strict=True))
        return cls(chosen, work + sum(prices.values()), moves, breaches)

    def more_than(self, plan: _Plan) -> tuple[float, float]:
        """(cost, bytes moved) beyond those of another plan."""
        cost = self.objective - plan.objective
        near = TOLERANCE * max(abs(self.objective), abs(plan.objective), 1.0)
        return 0.0 if abs(cost) < near else cost, sum(self.moves.values()) - sum(plan.moves.values())

    def other_moves(self, plan: _Plan) -> str:
        """What this plan moves that another does not, and the other way round."""
        more = {move: bytes_ for move, bytes_ in self.moves.items() if move not in plan.moves}
        less = {move: bytes_ for move, bytes_ in plan.moves.items() if move not in self.moves}
        parts = [f"it would {_spell_moves(more)}"] if more else []
        parts += [f"{'and' if more else 'it would'} not {_spell_moves(less)}"] if less else []
        return " ".join(parts)


def _nested(earlier: Mapping[str, State], state: Split, axis: AxisSearch) -> bool:
    """True if a split and those of earlier axes are pieces of each other: else there is no such layout."""
    splits = {**earlier, axis.axis: state}
    same = [(split[1] or 1, axis.mesh[name]) for name, split in splits.items() if isinstance(split, tuple)
            and split[0] == state[0]]  # fmt: skip
    position = run = 1
    for outer, size in sorted(same, key=lambda split: abs(split[0])):
        blocks, left = divmod(abs(outer), position)
        if outer != run and (left or (outer < 0 and blocks % 2)):
            return False
        position = position * size if outer == run else abs(outer) * size
        run = outer
    return True


def _breached(free: Edge, bound: Edge) -> Edge:
    return replace(free, move={pair: bound.move.get(pair, price * BREACH) for pair, price in free.move.items()})


def _collective(source: object, target: object) -> str:
    """What turns one state into another, in words; "" if nothing moves."""
    if source == target or source is None:
        return ""
    if isinstance(source, str):
        return "reduce-scatter" if isinstance(target, tuple) else "all-reduce"
    return "all-to-all" if isinstance(target, tuple) else "all-gather"


def _name(classes: Classes, number: int) -> str:
    item = classes.items[number]
    module = record(item.node).module
    name = f"%{item.node.name}" + (f" of {module}" if module else "")
    if item.role is not None:
        name = f"'{item.role.entry.name}'"
    return f"{name} and {item.count - 1} alike" if item.count > 1 else name


def _spell_moves(moves: Mapping[Move, float], most: int = 2) -> str:
    """`all-gather %a, all-reduce %b and move 3 more`: the largest first."""
    first = sorted(moves, key=lambda move: (-moves[move], move))
    text = ", ".join(f"{name} {value}" for name, value in first[:most])
    return text + (f" and move {len(first) - most} more" if len(first) > most else "")
