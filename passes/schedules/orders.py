"""The orders of the schedules: what each rank of a pipeline computes, one action after the other.

In the docstrings a line is a rank, and `0F1` the forward of stage 0 on micro-batch 1; `B` is its backward, `I` and `W`
are the halves of that: the gradients of inputs and those of weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from autopar.ir.schedule import Action, Costs, Orders, Turn, actions_of, turns_of
from autopar.passes.schedules.chunks import chunks_of

# The orders of slices of sequences: forwards in the order of a sequence, backwards in reverse.


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


def gpipe(stages: int, ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Order all forwards before all backwards: GPipe (arXiv 1811.06965).

    Two stages on each of two ranks, two micro-batches:

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


def one_f_one_b(stages: int, ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Let each micro-batch go back as soon as it can: 1F1B (arXiv 2104.04473).

    Two ranks, three micro-batches:

        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2

    After a warm-up of p - i - 1 forwards, rank i alternates. At most p - i micro-batches are in flight there.
    """
    chunks_of("1f1b", stages, ranks, 1)
    return tuple(_one_f_one_b_of(rank, min(ranks - rank - 1, microbatches), microbatches) for rank in range(ranks))


def _one_f_one_b_of(stage: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    order = [Action(stage, "F", k) for k in range(warm_up)]
    for k in range(microbatches):
        if k + warm_up < microbatches:
            order.append(Action(stage, "F", k + warm_up))
        order.append(Action(stage, "B", k))
    return tuple(order)


def interleaved(stages: int, ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Interleave several stages on each rank: interleaved 1F1B (arXiv 2104.04473).

    Two stages on each of two ranks, two micro-batches:

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
    return tuple(_interleaved_of(rank, ranks, chunks, microbatches) for rank in range(ranks))


def _interleaved_of(rank: int, ranks: int, chunks: int, microbatches: int) -> tuple[Action, ...]:
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


def zb_h1(stages: int, ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Fill the bubble of 1F1B with gradients of weights, in the same memory: ZB-H1 (arXiv 2401.10241).

    Two ranks, three micro-batches:

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


def zb_h2(stages: int, ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Leave no bubble, where all actions take as long, in about twice the memory: ZB-H2 (arXiv 2401.10241).

    Two ranks, four micro-batches:

        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3

    Rank i runs 2 (p - i - 1) forwards ahead and keeps 2 i gradients of weights for later: 2 p - 1 micro-batches.
    """
    chunks_of("zb-h2", stages, ranks, 1)
    return tuple(split_1f1b(rank, 2 * (ranks - rank - 1), 2 * rank, microbatches) for rank in range(ranks))


def zb_v(stages: int, ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Lay two stages on each rank, in a V, so that there is no bubble where all actions take as long, in the memory of
    1F1B: ZB-V (arXiv 2401.10241, 2405.15362).

    Two ranks, three micro-batches:

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Rank i has the stages i and 2p - 1 - i, so that the first rank makes the loss and starts the way back. A rank holds
    the activations of 2p of these smaller stages.

    Fewer micro-batches than fill the warm-up are filled up with ones that are left out afterwards (see `interleaved`).
    """
    chunks_of("zb-v", stages, ranks, 2)
    return tuple(_zb_v_of(rank, ranks, microbatches) for rank in range(ranks))


def _zb_v_of(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
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


def dualpipev(stages: int, ranks: int, microbatches: int, costs: Costs) -> Orders:
    """Let a forward of one stage of a rank stand beside a backward of its other one, as both go through a V: DualPipeV,
    which cuts DualPipe (arXiv 2412.19437) in half.

    Two ranks, four micro-batches:

        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3|3B1 3F2|0B0 3B2 3F3|0B1 3B3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 1F2 2B0 2F2|1B0 1F3|2B1 2F3|1B1 2B2 1B2 2I3 1I3 2W3 1W3

    Rank i has the stages i and 2p - 1 - i. From the middle on a forward and a backward of different micro-batches run
    side by side (0F3|3B1), in which one computes while values of the other are on their way. A rank holds the
    activations of 2p + 1 of these smaller stages, one more than with ZB-V.

    Fewer micro-batches than fill the warm-up are filled up with ones that are left out afterwards (see `interleaved`).
    """
    chunks_of("dualpipev", stages, ranks, 2)
    return tuple(_dualpipev_of(rank, ranks, microbatches) for rank in range(ranks))


def _dualpipev_of(rank: int, ranks: int, microbatches: int) -> tuple[Turn, ...]:
    down, up = rank, 2 * ranks - 1 - rank
    below = ranks - rank - 1  # ranks between this one and the turn of the V
    counts = {(stage, is_forward): count() for stage in (down, up) for is_forward in (True, False)}
    late: deque[Action] = deque()  # gradients of weights, which wait
    order: list[Turn] = []

    def add(*actions: Action) -> None:
        order.extend(turns_of(action for action in actions if action.microbatch < microbatches))

    def run(times: int, *kinds: tuple[int, str]) -> None:
        for stage, kind in kinds * times:
            if kind == "W":
                add(*[late.popleft()] if late else ())
                continue
            k = next(counts[stage, kind == "F"])
            add(Action(stage, kind, k))
            if kind == "I":
                late.append(Action(stage, "W", k))

    def run_beside(there: int, back: int) -> None:
        add(Action(there, "F", next(counts[there, True])), Action(back, "B", next(counts[back, False])))

    run(2 * below, (down, "F"))
    run(rank + 1, (down, "F"), (up, "F"))
    run(below, (up, "I"), (up, "W"), (up, "F"))
    steady = max(microbatches, 2 * ranks) - 2 * ranks + rank + 1  # until the first stage has no forward left
    for turn in range(steady):
        if turn or below:
            run_beside(down, up)
        else:  # at the turn of the V the others wait for what the first pair makes
            run(1, (down, "F"), (up, "B"))
        run_beside(up, down)
    for _ in range(below):
        run(1, (up, "B"))
        run_beside(up, down)
    # Half of what is left keeps the gradients of weights for when there is nothing else to do.
    for place, stage in enumerate((up, down) * (rank + 1)):
        run(1, (stage, "B" if place <= rank else "I"))
    run(below, (down, "W"), (down, "I"))
    run(len(late), (down, "W"))
    return tuple(order)


def forward_only(orders: Sequence[Sequence[Turn]]) -> Orders:
    """The forwards of any schedule, in its order: for `model(x)`.

    No forward waits for a backward, so what is left of an order without circular waits has none.
    """
    return tuple(
        tuple(one for turn in order for one in turns_of(action for action in turn.actions if action.kind == "F"))
        for order in orders
    )


def in_halves(orders: Sequence[Sequence[Turn]]) -> Orders:
    """A schedule in which some backwards are whole and some in halves, with all of them in halves: stages are cut into
    graphs of one kind. Of a pair what stands beside the other action is the gradients of inputs, which others wait
    for; those of weights follow it."""
    kinds = {action.kind for order in orders for action in actions_of(order)}
    if not {"B", "I"} <= kinds:
        return tuple(map(tuple, orders))
    return tuple(tuple(one for turn in order for one in _halves_of(turn)) for order in orders)


def _halves_of(turn: Turn) -> tuple[Turn, ...]:
    firsts = (replace(action, kind="I") if action.kind == "B" else action for action in turn.actions)
    return *turns_of(firsts), *(replace(action, kind="W") for action in turn.actions if action.kind == "B")


def apart(orders: Sequence[Sequence[Turn]], pairs: Callable[[Turn], bool]) -> Orders:
    """A schedule with the pairs for which `pairs` is true; the actions of all others run one behind the other."""
    return tuple(tuple(one for turn in order for one in ((turn,) if pairs(turn) else turn.actions)) for order in orders)


def in_rounds(stages: int, ranks: int) -> tuple[int, ...]:
    """Stage s on rank s modulo p: with as many stages as ranks, one on each."""
    return tuple(stage % ranks for stage in range(stages))


def in_a_v(stages: int, ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again, so that one rank has the first stage and the last (arXiv 2405.15362)."""
    return tuple(min(stage, stages - 1 - stage) for stage in range(stages))


@dataclass(frozen=True, slots=True)
class Entry:
    """order: of (stages, ranks, microbatches, costs). chunks: stages on a rank if nobody says otherwise.
    place: the rank of each stage, of (stages, ranks). of_slices: the order where micro-batches are slices of sequences,
    of (stages, ranks, microbatches, slices, costs); None if it has none."""

    order: Callable[[int, int, int, Costs], Orders]
    chunks: int = 1
    place: Callable[[int, int], tuple[int, ...]] = in_rounds
    of_slices: Callable[[int, int, int, int, Costs], Orders] | None = None


SCHEDULES: Mapping[str, Entry] = {
    "gpipe": Entry(gpipe, of_slices=gpipe_of_slices),
    "1f1b": Entry(one_f_one_b),
    "seq1f1b": Entry(one_f_one_b, of_slices=seq1f1b),
    "interleaved-1f1b": Entry(interleaved, chunks=2),
    "zb-h1": Entry(zb_h1),
    "zb-h2": Entry(zb_h2),
    "zb-v": Entry(zb_v, chunks=2, place=in_a_v),
    "dualpipev": Entry(dualpipev, chunks=2, place=in_a_v),
}
