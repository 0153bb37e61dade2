"""zb_v: two stages on each rank, in a V: the memory of 1F1B and, where all actions take as long, no bubble."""

from __future__ import annotations

from itertools import count

from autopar.ir.schedule import Action, Costs
from autopar.passes.schedules.placement import chunks_of


def zb_v(stages: int, ranks: int, microbatches: int, costs: Costs) -> tuple[tuple[Action, ...], ...]:
    """The order ZB-V (arXiv 2401.10241, 2405.15362); two ranks, three micro-batches:

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Rank i has the stages i and 2p - 1 - i, so that the first rank makes the loss and starts the way back. A rank holds
    the activations of 2p of these smaller stages.

    Fewer micro-batches than fill the warm-up are filled up with ones that are left out afterwards (see `interleaved`).
    """
    chunks_of("zb-v", stages, ranks, 2)
    return tuple(_of_rank(rank, ranks, microbatches) for rank in range(ranks))


def _of_rank(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    down, up = rank, 2 * ranks - 1 - rank
    filled = max(microbatches, 2 * ranks - 1)
    counts = {(stage, kind): count() for stage in (down, up) for kind in "FIW"}
    order: list[Action] = []

    def run(times: int, *kinds: tuple[int, str]) -> None:
        for stage, kind in kinds * times:
            if (k := next(counts[stage, kind])) < microbatches:
                order.append(Action(stage, kind, k))

    ahead = 2 * (ranks - rank) - 1
    run(ahead, (down, "F"))
    run(rank, (up, "F"), (down, "F"))  # until the first micro-batch is back
    run(ranks - rank, (up, "F"), (up, "I"), (up, "W"))
    steady = filled - ranks  # forwards of the second stage that are left
    run(steady, (down, "F"), (down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W"))
    run(rank, (down, "I"), (up, "I"))
    run(ranks - rank, (down, "I"), (down, "W"))
    run(rank, (up, "W"), (down, "W"))
    return tuple(order)
