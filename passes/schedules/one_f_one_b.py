"""one_f_one_b: each micro-batch goes back as soon as it can."""

from __future__ import annotations

from autopar.ir.schedule import Action, Costs
from autopar.passes.schedules.placement import chunks_of


def one_f_one_b(stages: int, ranks: int, microbatches: int, costs: Costs) -> tuple[tuple[Action, ...], ...]:
    """The order 1F1B (arXiv 2104.04473); two ranks, three micro-batches:

        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2

    After a warm-up of p - i - 1 forwards, rank i alternates. At most p - i micro-batches are in flight there.
    """
    chunks_of("1f1b", stages, ranks, 1)
    return tuple(_of_rank(rank, min(ranks - rank - 1, microbatches), microbatches) for rank in range(ranks))


def _of_rank(stage: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    order = [Action(stage, "F", k) for k in range(warm_up)]
    for k in range(microbatches):
        if k + warm_up < microbatches:
            order.append(Action(stage, "F", k + warm_up))
        order.append(Action(stage, "B", k))
    return tuple(order)
