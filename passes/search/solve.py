"""The cheapest choice of one strategy per item, exactly: branch and bound over linear relaxations (Land and Doig 1960).

Most choices follow from a few: once the matrix products have theirs, the linear relaxation of the rest is mostly whole
by itself.

A weight that many products share (the steps of a recurrent layer) is where that ends: the relaxation splits half of it
by rows and half by columns, and each step takes the half that suits it. So strategies are taken for such `shared`
items, all at once, until nothing is divided. That is a plan, and its prices bound every other: the items nearest to
each weight are cut out, and are relaxed alone with that weight's strategy forbidden. Where none of these parts gets
cheaper the plan is the optimum, however many weights there are.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

import numpy as np

from autopar.passes.search.parts import Part, parts_of
from autopar.passes.search.problem import Edge, Problem, connected, within
from autopar.passes.search.programme import WHOLE, Found, programme_of

__all__ = ["Edge", "Problem", "solve"]

REACHES = 2, 8  # how far around a misfit
EQUAL = 1e-6  # costs that differ by no more are the same: HiGHS's absolute gap

Closed = frozenset[int]  # the variables that a node of the search forbids


def solve(problem: Problem) -> list[int] | None:
    """The index of the chosen strategy of each item, or None if no choice is possible."""
    search = _Search(problem)
    best = search.run()
    return None if best is None else search.programme.choice(best)


@dataclass(frozen=True, slots=True)
class _Step:
    """A strategy that was taken for an item: `variable`, where `closed` was closed and nothing costs less than
    `bound`."""

    item: int
    variable: int
    closed: Closed
    bound: float


class _Search:
    """best: the cheapest plan that was found. nodes: what may hold a cheaper one, the lowest bound first."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.programme, self.owner = programme_of(problem)
        self.neighbours = problem.neighbours()
        self.best: Found | None = None
        self.order = itertools.count()
        self.nodes: list[tuple[float, int, Closed, Found | None]] = []

    def run(self) -> Found | None:
        """The optimum. The node with the lowest bound is relaxed; if that is still the lowest, it is dived into."""
        self._push(-np.inf, frozenset())
        while self.nodes:
            bound, _, closed, relaxed = heapq.heappop(self.nodes)
            if self._is_worse(bound):
                break
            if relaxed is not None:
                self._dive(closed, relaxed)
                continue
            relaxed = self.programme.relax(closed)
            if relaxed is not None:
                self._push(max(bound, relaxed.cost), closed, relaxed)
        return self.best

    def _push(self, bound: float, closed: Closed, relaxed: Found | None = None) -> None:
        if not self._is_worse(bound):
            heapq.heappush(self.nodes, (bound, next(self.order), closed, relaxed))

    def _is_worse(self, cost: float) -> bool:
        return self.best is not None and cost >= self.best.cost - EQUAL

    def _dive(self, start: Closed, relaxed: Found) -> None:
        """Take strategies for what is divided until nothing is, or no plan is possible or good enough."""
        closed, steps = start, list[_Step]()
        while not self._is_worse(relaxed.cost):
            divided = self.programme.divided(relaxed)
            if not divided:
                self.best = relaxed
                break
            items = self._next(divided)
            if not items:
                break
            taken, after = self._take(items, closed, relaxed)
            found = self.programme.relax(after)
            if found is None:
                self._branch(items[0], closed, relaxed)
                break
            closed, relaxed = after, found
            steps += taken
        self._leave(start, closed, steps, relaxed)

    def _next(self, divided: set[int]) -> list[int]:
        """Of the items that a relaxation divides, those to take a strategy for."""
        shared = [item for item in self.problem.shared if item in divided]
        return [item for item in shared if item in self.problem.deciding] or shared[:1]

    def _take(self, items: list[int], closed: Closed, relaxed: Found) -> tuple[list[_Step], Closed]:
        """Take the strategy of each item that has the largest share. Also gives what is closed then."""
        steps = []
        for item in items:
            variables = self.programme.chosen[item]
            shares = relaxed.shares[variables].round(6)  # of equal shares the first, whatever the last digits
            variable = int(variables[np.argmax(shares)])
            steps.append(_Step(item, variable, closed, relaxed.cost))
            closed = closed.union(variables.tolist()) - {variable}
        return steps, closed

    def _branch(self, item: int, closed: Closed, relaxed: Found) -> None:
        """A node for each strategy of an item."""
        variables = set(self.programme.chosen[item].tolist())
        for variable in sorted(variables - closed):
            self._push(relaxed.cost, closed.union(variables) - {variable})

    def _leave(self, start: Closed, closed: Closed, steps: list[_Step], relaxed: Found) -> None:
        """What a dive ends in, by parts: its plan, and the nodes that it left aside (with the steps before one of them,
        and without its strategy).

        What comes out divided without any shared item is made whole group by group.
        """
        divided = set() if self._is_worse(relaxed.cost) else self.programme.divided(relaxed)
        groups = connected(self.neighbours, divided)
        if not steps and not groups:
            return
        seeds = [[step.item] for step in steps] + groups
        parts = parts_of(self.programme, self.owner, self.neighbours, relaxed, seeds)
        bound = relaxed.cost
        if groups:
            bound = self._make_whole(closed, relaxed, parts[len(steps) :])
        growth = [parts[k].growth(start | {step.variable}) for k, step in enumerate(steps)]
        for k, step in enumerate(steps):
            undone = sum(min(less, 0.0) for less in growth[k + 1 :])
            self._push(max(step.bound, bound + growth[k] + undone), step.closed | {step.variable})

    def _make_whole(self, closed: Closed, relaxed: Found, parts: list[Part]) -> float:
        """Solve what a relaxation divides, each part alone, and join what comes out. Gives the sum of the parts."""
        bound, shares = relaxed.cost, relaxed.shares.copy()
        for part in parts:
            found = part.solve(closed)
            if found is None:
                return np.inf
            bound += found.cost - part.cost
            shares[part.columns] = found.shares
        found = self._join(closed, shares, bound) or self.programme.solve(closed)
        if found is not None and not self._is_worse(found.cost):
            self.best = found
        return bound

    def _join(self, closed: Closed, shares: np.ndarray, bound: float) -> Found | None:
        """Parts that were solved alone as one plan that costs no more, if there is one: with other strategies near the
        rows alone that do not fit."""
        items = set(self.owner[self.programme.misfits(shares)].tolist())
        for reach in REACHES:
            items = within(self.neighbours, items, reach)
            kept = [own for i, own in enumerate(self.programme.chosen) if i not in items]
            found = self.programme.solve(closed.union(*(own[shares[own] < WHOLE].tolist() for own in kept)))
            if found is not None and found.cost <= bound + EQUAL:
                return found
        return None
