"""What an action is: a function of one side, run on the parallel model and on its plain twin, with one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from autopar.errors import AutoparError
from benchmarks.journeys.side import Side


@dataclass(frozen=True)
class Action:
    """`run(side, **args)` does it on one side; what it returns must be equal on both.

    draws: a strategy of literals for each argument. needs: facts of the pair (`Pair.facts`) that must hold, those
    with a "!" not. must_refuse: the error that every rank must get, as no user can mean it.
    torn: a loop of torch's, of which a refusal leaves what came before: the journey ends.

    One of several parts says `side.mark()` between them: refused in a later part, the parallel model must be as the
    plain one is after the earlier parts.
    """

    name: str
    run: Callable[..., Any]
    draws: Mapping[str, SearchStrategy[Any]]
    needs: tuple[str, ...]
    must_refuse: type[AutoparError] | None
    torn: bool = False
    weight: int = 1  # how often it is drawn beside others

    def allowed(self, facts: frozenset[str]) -> bool:
        return all((need[1:] not in facts) if need.startswith("!") else (need in facts) for need in self.needs)


Registered = Callable[[Callable[..., Any]], Callable[..., Any]]
ACTIONS: dict[str, Action] = {}


def action(
    *needs: str,
    must_refuse: type[AutoparError] | None = None,
    torn: bool = False,
    weight: int = 1,
    **draws: SearchStrategy[Any],
) -> Registered:
    """Put a function of a side into the table, under its own name."""

    def register(run: Callable[[Side], Any]) -> Callable[..., Any]:
        ACTIONS[run.__name__] = Action(run.__name__, run, draws, needs, must_refuse, torn, weight)
        return run

    return register
