"""Two runs on one rank that change places at each wait: how a pair of actions runs, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any


def in_turns(
    runs: tuple[Generator[Any, Any, Any], Generator[Any, Any, Any]], is_wait: Callable[[Any], bool]
) -> Generator[Any, Any, tuple[Any, Any]]:
    """Run two generators as one, which returns what both return. Where one of them would wait, the other goes on, until
    it would wait too; then the first one waits, and goes on. is_wait: of what a generator yields.

    Nothing of when things are done decides it, so that all ranks that run the same two have the same order.
    """
    held: list[Any] = [None, None]  # of each the wait that it stands at
    answers: list[Any] = [None, None]
    results: list[Any] = [None, None]
    alive, now = {0, 1}, 0
    while alive:
        if held[now] is not None:
            request, held[now] = held[now], None
            answers[now] = yield request
            del request  # it holds a tensor that may die in the next step
        answer, answers[now] = answers[now], None
        try:
            request = runs[now].send(answer)
        except StopIteration as done:
            results[now] = done.value
            alive.discard(now)
            now = 1 - now
            continue
        finally:
            del answer
        if is_wait(request) and len(alive) > 1:
            held[now], now = request, 1 - now
        else:
            answers[now] = yield request
        del request
    return results[0], results[1]
