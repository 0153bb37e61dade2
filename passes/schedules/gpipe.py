"""gpipe: all forwards, then all backwards."""

from __future__ import annotations

from autopar.ir.schedule import Action, Costs
from autopar.passes.schedules.placement import chunks_of


def gpipe(stages: int, ranks: int, microbatches: int, costs: Costs) -> tuple[tuple[Action, ...], ...]:
    """The order of GPipe (arXiv 1811.06965); two stages on each of two ranks, two micro-batches:

        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    All micro-batches are in flight at once.
    """
    chunks = chunks_of("gpipe", stages, ranks)
    each = range(microbatches)
    return tuple(
        tuple(Action(chunk * ranks + rank, "F", k) for chunk in range(chunks) for k in each)
        + tuple(Action(chunk * ranks + rank, "B", k) for chunk in reversed(range(chunks)) for k in each)
        for rank in range(ranks)
    )
