"""What an action is: a function of one side, run on the parallel model and on its plain twin, with one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from benchmarks.journeys.side import Side


@dataclass(frozen=True)
class Action:
    """`run(side, **args)` does it on one side; what it returns must be equal on both.

    draws: a strategy of literals for each argument. needs: facts of the pair (`Pair.facts`) that must hold, those
    with a "!" not. partial: refused in its middle it may have changed something, which ends the journey.
    must_refuse: no user can mean it; every rank must be told.
    """

    name: str
    run: Callable[..., Any]
    draws: Mapping[str, SearchStrategy[Any]]
    needs: tuple[str, ...]
    partial: bool
    must_refuse: bool

    def allowed(self, facts: frozenset[str]) -> bool:
        return all((need[1:] not in facts) if need.startswith("!") else (need in facts) for need in self.needs)


Registered = Callable[[Callable[..., Any]], Callable[..., Any]]
ACTIONS: dict[str, Action] = {}


def action(*needs: str, partial: bool = False, must_refuse: bool = False, **draws: SearchStrategy[Any]) -> Registered:
    """Put a function of a side into the table, under its own name."""

    def register(run: Callable[[Side], Any]) -> Callable[..., Any]:
        ACTIONS[run.__name__] = Action(run.__name__, run, draws, needs, partial, must_refuse)
        return run

    return register
