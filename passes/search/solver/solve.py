"""The cheapest choice of one strategy per item: branch and bound over linear relaxations (Land and Doig 1960).

Most choices follow from a few: once the matrix products have theirs, the linear relaxation of the rest is mostly whole
by itself. What is not is solved as a 0-1 programme, group by group.

A weight that many products share (the steps of a recurrent layer) is where that ends: the relaxation splits half of it
by rows and half by columns, each step takes the half that suits it, and cuts close the gap step by step. So a strategy
is guessed for each such `shared` item. With these the relaxation is a plan, and its prices bound all others: the items
nearest to each weight are cut out, and relaxed alone with that weight's strategy forbidden. Where no part gets cheaper,
the plan is the optimum, however many weights there are. Where one does, its other strategies are tried, those that
promise most first; what a relaxation divides is made whole only where nothing else promises more.

No search is endless: after ENOUGH relaxations the best plan is taken, and of a programme that has more than MOST
variables to be made whole, some are at a time (relax and fix). By how much such a plan may be too dear is known.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.passes.search.solver.parts import ProgrammePart, parts_of
from autopar.passes.search.solver.problem import Problem, connected, within
from autopar.passes.search.solver.programme import WHOLE, ProgrammeSolution, programme_of

EQUAL = 1e-6  # costs that differ by no more are the same: HiGHS's absolute gap
REACHES = 2, 8  # how far around a misfit strategies are chosen again
# Variables of all relaxations of the whole, after which no cheaper plan is looked for: some 20 s. Counted, not timed: a
# plan must not depend on the machine.
ENOUGH = 400_000

Closed = frozenset[int]  # variables that may not be taken
Taken = Mapping[int, int]  # by shared item, the variable of the strategy that is taken


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan. strategies: of each item, the index of the one that is taken. above: the share of its cost by which it
    may be dearer than the cheapest, where the search was cut short, or 0. visited: the nodes of the search."""

    strategies: list[int]
    above: float = 0.0
    visited: int = 0


def solve(problem: Problem) -> Choice | None:
    """The cheapest plan, or the best one found once enough was tried; None if no choice is possible, or none was found
    in twice that."""
    search = _Search(problem)
    best = search.run()
    return None if best is None else Choice(search.programme.choice(best), search.above(best), search.visited)


@dataclass(frozen=True, slots=True)
class _Node:
    """Plans without what is `closed`, none of which costs less than `bound`. guess: what to take first."""

    bound: float
    closed: Closed
    guess: Taken


@dataclass(frozen=True, slots=True)
class _Other:
    """A shared item without the strategy that was taken for it: by how much the plan gets dearer at least, and the
    strategy that it has then."""

    item: int
    growth: float
    variable: int  # -1 if there is none


class _Search:
    """best: the cheapest plan that was found. nodes: what may hold a cheaper one, the lowest bound first; so many were
    visited. missed: the least cost of a plan that programmes of a few variables at a time may not have found."""

    def __init__(self, problem: Problem) -> None:
        self.shared = problem.shared
        self.programme, self.owner = programme_of(problem)
        self.neighbours = problem.neighbours()
        self.best: ProgrammeSolution | None = None
        self.missed, self.visited = np.inf, 0
        self.order = itertools.count()
        self.nodes: list[tuple[float, int, _Node]] = []

    def run(self) -> ProgrammeSolution | None:
        """The optimum, or the best plan once the search has seen enough."""
        self._push(_Node(-np.inf, frozenset(), self._first_guess()))
        while self.nodes and not self._is_worse(self.nodes[0][0]) and not self._has_seen(2 - (self.best is not None)):
            _, _, node = heapq.heappop(self.nodes)
            self.visited += 1
            self._dive(node)
        return self.best

    def above(self, best: ProgrammeSolution) -> float:
        """By which share of its cost a plan may lie above what was not looked at."""
        least = min([self.missed, *(bound for bound, _, _ in self.nodes[:1])])
        return max(best.cost - EQUAL - least, 0.0) / best.cost if best.cost else 0.0

    def _has_seen(self, times: int) -> bool:
        return self.visited * len(self.programme.costs) > times * ENOUGH

    def _push(self, node: _Node) -> None:
        if not self._is_worse(node.bound):
            heapq.heappush(self.nodes, (node.bound, next(self.order), node))

    def _is_worse(self, cost: float) -> bool:
        return self.best is not None and cost >= self.best.cost - EQUAL

    def _with(self, closed: Closed, taken: Taken) -> Closed:
        """What is closed when strategies are taken: all others of their items too."""
        own = (self.programme.chosen[item].tolist() for item in taken)
        return closed.union(*own).difference(set(taken.values()) - closed)

    def _parts(self, found: ProgrammeSolution | None, seeds: Sequence[Collection[int]]) -> list[ProgrammePart]:
        return parts_of(self.programme, self.owner, self.neighbours, found, seeds) if seeds else []

    def _first_guess(self) -> Taken:
        """For each shared item the strategy that suits the items around it, as if there were no others."""
        parts = self._parts(None, [[item] for item in self.shared])
        others = [_other(item, part, ()) for item, part in zip(self.shared, parts, strict=True)]
        return {other.item: other.variable for other in others if other.variable >= 0}

    def _dive(self, node: _Node) -> None:
        """Take strategies for the shared items, find the best plan that has them, and push what is left aside."""
        taken, relaxed = self._take(node)
        if relaxed is None:
            return
        closed = self._with(node.closed, taken)
        divided = set() if self._is_worse(relaxed.cost) else self.programme.divided(relaxed)
        seeds = [*([item] for item in taken), *connected(self.neighbours, divided)]
        parts = self._parts(relaxed, seeds)
        others = [
            _other(item, part, node.closed | {variable})
            for (item, variable), part in zip(taken.items(), parts, strict=False)
        ]
        others.sort(key=lambda other: other.growth)
        if others and others[0].growth < -EQUAL and not self._has_seen(1):  # what was not taken comes first
            bound = relaxed.cost
            self._push(_Node(bound, closed, taken))
        else:
            bound = self._finish(closed, relaxed, parts[len(taken) :])
        self._leave(node, taken, bound, others)

    def _take(self, node: _Node) -> tuple[Taken, ProgrammeSolution | None]:
        """Take what was guessed, and while a relaxation divides a shared item, what it prefers."""
        taken = dict(node.guess)
        relaxed = self.programme.relax(self._with(node.closed, taken))
        if relaxed is None and taken:
            taken = {}
            relaxed = self.programme.relax(node.closed)
        while relaxed is not None and not self._is_worse(relaxed.cost):
            divided = self.programme.divided(relaxed)
            item = next((item for item in self.shared if item in divided), None)
            if item is None:
                break
            more = taken | {item: self.programme.preferred(item, relaxed)}
            found = self.programme.relax(self._with(node.closed, more))
            if found is None:
                break
            taken, relaxed = more, found
        return taken, relaxed

    def _finish(self, closed: Closed, relaxed: ProgrammeSolution, groups: list[ProgrammePart]) -> float:
        """Make a relaxation whole where it is divided, each group alone. Gives the sum of the parts."""
        if self._is_worse(relaxed.cost):
            return relaxed.cost
        if not groups:
            self.best = relaxed
            return relaxed.cost
        bound = sum_ = relaxed.cost
        shares = relaxed.shares.copy()
        for group in groups:
            found = group.solve(closed)
            if found is None:
                return np.inf
            bound, sum_ = bound + found.bound - group.cost, sum_ + found.cost - group.cost
            shares[group.columns] = found.shares
        least, found = bound, self._join(closed, shares, sum_)
        if found is None:
            found = self.programme.solve(closed)
            least = max(bound, found.bound) if found else np.inf
        if found is not None and np.isfinite(found.cost) and not self._is_worse(found.cost):
            self.best = found
        if found is not None and least < found.cost - EQUAL:
            self.missed = min(self.missed, least)
        return bound

    def _join(self, closed: Closed, shares: np.ndarray, bound: float) -> ProgrammeSolution | None:
        """Groups that were solved alone as one plan that costs no more, if there is one with other strategies only near
        the rows that do not fit."""
        items = set(self.owner[self.programme.misfits(shares)].tolist())
        for reach in REACHES:
            items = within(self.neighbours, items, reach)
            kept = [own for i, own in enumerate(self.programme.chosen) if i not in items]
            solution = self.programme.solve(closed.union(*(own[shares[own] < WHOLE].tolist() for own in kept)))
            if solution is not None and solution.cost <= bound + EQUAL:
                return solution
        return None

    def _leave(self, node: _Node, taken: Taken, bound: float, others: Sequence[_Other]) -> None:
        """Push a node for each strategy that was taken, without it and with those before it. What comes after it is
        open again, so that its bound is lowered by what gets cheaper there."""
        for k, other in enumerate(others):
            open_ = others[k + 1 :]
            closed = self._with(node.closed, {before.item: taken[before.item] for before in others[:k]})
            guess = {after.item: taken[after.item] for after in open_}
            if other.variable >= 0:
                least = bound + other.growth + sum(min(after.growth, 0.0) for after in open_)
                guess[other.item] = other.variable
                self._push(_Node(max(node.bound, least), closed | {taken[other.item]}, guess))


def _other(item: int, part: ProgrammePart, closed: Collection[int]) -> _Other:
    """A shared item where some variables are closed, by the part around it."""
    found = part.relax(closed)
    if found is None:
        return _Other(item, np.inf, -1)
    return _Other(item, found.cost - part.cost, int(part.columns[part.programme.preferred(item, found)]))
