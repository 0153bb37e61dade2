"""interleaved: 1F1B where each rank has several stages."""

from __future__ import annotations

from autopar.ir.schedule import Action, Costs
from autopar.passes.schedules.one_f_one_b import one_f_one_b
from autopar.passes.schedules.placement import chunks_of


def interleaved(stages: int, ranks: int, microbatches: int, costs: Costs) -> tuple[tuple[Action, ...], ...]:
    """The order of interleaved 1F1B (arXiv 2104.04473); two stages on each of two ranks, two micro-batches:

        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    The micro-batches go in groups of p: a group through the first stage of the rank, then through its second. Rank i
    of p, with v stages, alternates after 2 (p - i - 1) + (v - 1) p forwards.

    The paper wants whole groups. Here the last one is filled up with micro-batches which are then left out: nothing
    waits for these but they themselves, so what is left of an order without circular waits has none.
    """
    chunks = chunks_of("interleaved-1f1b", stages, ranks)
    if chunks == 1:  # without the second stage's forwards the longer warm-up would only cost memory
        return one_f_one_b(stages, ranks, microbatches, costs)
    return tuple(_of_rank(rank, ranks, chunks, microbatches) for rank in range(ranks))


def _of_rank(rank: int, ranks: int, chunks: int, microbatches: int) -> tuple[Action, ...]:
    groups = range(0, microbatches, ranks)
    turns = [(start + k, chunk) for start in groups for chunk in range(chunks) for k in range(ranks)]
    forwards = [Action(chunk * ranks + rank, "F", k) for k, chunk in turns]
    backwards = [Action((chunks - 1 - chunk) * ranks + rank, "B", k) for k, chunk in turns]
    warm_up = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(forwards))
    order = forwards[:warm_up]
    for turn, backward in enumerate(backwards):
        order += forwards[warm_up + turn : warm_up + turn + 1]
        order.append(backward)
    return tuple(action for action in order if action.microbatch < microbatches)
