"""zb_h1: 1F1B whose gradients of weights fill the bubble, in the same memory."""

from __future__ import annotations

from autopar.ir.schedule import Action, Costs
from autopar.passes.schedules.placement import chunks_of


def zb_h1(stages: int, ranks: int, microbatches: int, costs: Costs) -> tuple[tuple[Action, ...], ...]:
    """The order ZB-H1 (arXiv 2401.10241); two ranks, three micro-batches:

        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Rank i runs p - i - 1 forwards ahead and keeps i gradients of weights for later: p micro-batches in all.
    """
    chunks_of("zb-h1", stages, ranks, 1)
    return tuple(split_1f1b(rank, ranks - rank - 1, rank, microbatches) for rank in range(ranks))


def split_1f1b(stage: int, warm_up: int, late: int, microbatches: int) -> tuple[Action, ...]:
    """One stage: `warm_up` forwards ahead, and each gradient of weights `late` micro-batches after that of inputs."""
    order = [Action(stage, "F", k) for k in range(min(warm_up, microbatches))]
    for k in range(microbatches):
        if k + warm_up < microbatches:
            order.append(Action(stage, "F", k + warm_up))
        order.append(Action(stage, "I", k))
        if k >= late:
            order.append(Action(stage, "W", k - late))
    return (*order, *(Action(stage, "W", k) for k in range(max(microbatches - late, 0), microbatches)))
