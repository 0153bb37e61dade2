"""Chains whose ranks take turns: every step is computed once, by the rank that has its row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from semantic_examples import STEP

from autopar.ir.ops.ring_ops import messages, turns_of
from autopar.runtime.collectives.collectives import together
from autopar.runtime.collectives.mesh_ops import COORD, WAIT, pieces
from autopar.runtime.kernels import run_chain

# an LSTM's state and a count of its steps, which is a number of another dtype
TWO = (
    "v0 = autopar.einsum.default(h1, w0, 'ab,bc->ac'); v1 = aten.add.Tensor(v0, x0); v2 = aten.sigmoid.default(v1); "
    "v3 = aten.mul.Tensor(h0, v2); v4 = aten.add.Tensor(v3, x1); v5 = aten.tanh.default(v4); "
    "v6 = aten.add.Tensor(h2, 1); rows = [v5, v6]; states = [v4, v5, v6]"
)


def examples() -> dict[str, tuple[Any, ...]]:
    torch.manual_seed(0)
    x, w, h = (torch.randn(*shape, dtype=torch.float64) for shape in ((24, 3, 2), (2, 2), (3, 2)))
    return {
        "one state": ([h], [x], [w], STEP),
        "three": ([h, -h, torch.zeros(1, dtype=torch.int64)], [x, x * 2], [w], TWO),
    }


def turning(run: Any, *args: Any) -> Callable[[Any], Any]:
    """Makes the generator of a rank."""
    return lambda ask: run_chain.in_turns(run, ask, *args)


def driven(makes: list[Callable[[Any], Any]]) -> tuple[list[Any], int]:
    """What generators of all ranks return, and how often they moved something."""
    running = [make(lambda op, *args: (op, args)) for make in makes]
    asked, done, moved = [next(one) for one in running], [None] * len(running), 0
    while None in done:
        (op,) = {op for op, _ in asked}
        if op is COORD:
            answers: list[Any] = list(range(len(running)))
        elif op is WAIT:
            answers = [args[0] for _, args in asked]
        else:
            answers, moved = together(asked), moved + 1
        for i, one in enumerate(running):
            try:
                asked[i] = one.send([answers[i]])
            except StopIteration as end:
                done[i] = end.value
    return done, moved


@pytest.mark.parametrize("run", (run_chain.run_steps, run_chain.called_steps), ids=("steps", "called"))
@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("outer", (1, 2, -2, -4))
@pytest.mark.parametrize("size", (2, 3))
def test_turns_are_the_whole(size: int, outer: int, reverse: bool, run: Any) -> None:
    for start, rows, fixed, step in examples().values():
        whole = run_chain.chain(start, rows, fixed, step, reverse)
        mine = [[pieces(row, size, 0, outer)[place] for row in rows] for place in range(size)]
        rest = fixed, step, reverse, "cp", size, outer
        makes = [turning(run, start, given, *rest) for given in mine]
        found, moved = driven(makes)
        assert moved == messages(size, outer) * len({one.dtype for one in start})
        for i, one in enumerate(whole):
            for place in range(size):
                torch.testing.assert_close(found[place][i], pieces(one, size, 0, outer)[place], rtol=0, atol=0)


def test_each_step_is_computed_once() -> None:
    (start, rows, fixed, step), counts = examples()["one state"], [0] * 3

    def counted(place: int, *args: Any) -> Any:
        counts[place] += len(args[1][0])
        return run_chain.run_steps(*args)

    mine = [[pieces(rows[0], 3, 0, -2)[place]] for place in range(3)]
    rest = fixed, step, False, "cp", 3, -2
    makes = [turning(partial(counted, place), start, given, *rest) for place, given in enumerate(mine)]
    driven(makes)
    assert counts == [8, 8, 8]


def test_the_last_rank_has_two_runs_in_a_row() -> None:
    assert [turn.place for turn in turns_of(3, -2, reverse=False)] == [0, 1, 2, 2, 1, 0]
    assert [turn.place for turn in turns_of(3, 2, reverse=True)] == [2, 1, 0, 2, 1, 0]
    assert [messages(3, outer) for outer in (1, -2, 2)] == [2, 4, 5]
