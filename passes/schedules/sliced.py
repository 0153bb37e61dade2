"""The orders of slices of sequences: forwards in the order of a sequence, backwards in reverse.

A line is a rank, as in `orders.py`. The number of an action is micro-batch * slices + slice. A slice reads what those
before it left on its stage (keys and values), and its gradients are complete when those after it have run.
"""

from __future__ import annotations

from autopar.ir.schedule import Action, Costs, Orders
from autopar.passes.schedules.chunks import chunks_of


def gpipe_of_slices(stages: int, ranks: int, parts: int, slices: int, costs: Costs) -> Orders:
    """Order all forwards before all backwards, which go back in reverse: TeraPipe (arXiv 2102.07988).

    Two ranks, two micro-batches of two slices:

        0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0
        1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0

    All micro-batches are in flight at once.
    """
    chunks = chunks_of("gpipe", stages, ranks)
    turns = [(chunk, k) for chunk in range(chunks) for k in range(parts)]
    return tuple(
        tuple(Action(chunk * ranks + rank, "F", k) for chunk, k in turns)
        + tuple(Action(chunk * ranks + rank, "B", k) for chunk, k in reversed(turns))
        for rank in range(ranks)
    )


def seq1f1b(stages: int, ranks: int, parts: int, slices: int, costs: Costs) -> Orders:
    """Let each slice go back as soon as it can: Seq1F1B (arXiv 2406.03488).

    Two ranks, two micro-batches of two slices:

        0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2
        1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2

    After a warm-up of p - i - 1 + k - 1 forwards, rank i alternates; with k slices at most p - i + k - 1 of them are in
    flight there. With one slice it is 1F1B. The backwards go through the micro-batches in order, and through the slices
    of each in reverse.
    """
    chunks_of("seq1f1b", stages, ranks, 1)
    back = [first + i for first in range(0, parts, slices) for i in reversed(range(slices))]
    return tuple(_seq1f1b_of(rank, min(ranks - rank - 1 + slices - 1, parts), back) for rank in range(ranks))


def _seq1f1b_of(stage: int, warm_up: int, back: list[int]) -> tuple[Action, ...]:
    order = [Action(stage, "F", k) for k in range(warm_up)]
    for turn, k in enumerate(back):
        if turn + warm_up < len(back):
            order.append(Action(stage, "F", turn + warm_up))
        order.append(Action(stage, "B", k))
    return tuple(order)
