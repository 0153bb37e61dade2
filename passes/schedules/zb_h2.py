"""zb_h2: ZB-H1 with about twice its memory and, where all actions take as long, no bubble."""

from __future__ import annotations

from autopar.ir.schedule import Action, Costs
from autopar.passes.schedules.placement import chunks_of
from autopar.passes.schedules.zb_h1 import split_1f1b


def zb_h2(stages: int, ranks: int, microbatches: int, costs: Costs) -> tuple[tuple[Action, ...], ...]:
    """The order ZB-H2 (arXiv 2401.10241); two ranks, four micro-batches:

        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

    Rank i runs 2 (p - i - 1) forwards ahead and keeps 2 i gradients of weights for later: 2 p - 1 micro-batches.
    """
    chunks_of("zb-h2", stages, ranks, 1)
    return tuple(split_1f1b(rank, 2 * (ranks - rank - 1), 2 * rank, microbatches) for rank in range(ranks))
