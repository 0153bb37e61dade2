"""check_schedule: what it says of broken lists, how much of 500 breaks it finds, and how fast it is."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from pipelines import Wrong, flow_of, on_numbers, on_one_device, plain_order, resized, with_host
from refusals import refused

from autopar.errors import ScheduleError
from autopar.ir.schedule import Action, Costs, Flow, Instruction, copies_ended
from autopar.passes.schedules import check_schedule, parse_schedule, with_transfers

Lists = list[list[Instruction]]


def lists_of(
    name: str, ranks: int, microbatches: int, prefetch: bool = False, host: bool = False
) -> tuple[Lists, Flow]:
    schedule = parse_schedule(name, ranks, microbatches)
    flow = flow_of(schedule.ranks, microbatches, "".join(sorted(schedule.kinds)))
    flow = with_host(flow) if host else flow
    return [list(lines) for lines in with_transfers(schedule.orders, flow, Costs(), prefetch)], flow


def place(lists: Lists, rank: int, text: str) -> int:
    """Where an instruction stands, by the beginning of its text."""
    return next(i for i, line in enumerate(lists[rank]) if str(line).startswith(text))


def change(lists: Lists, rank: int, text: str, **changes: object) -> None:
    at = place(lists, rank, text)
    lists[rank][at] = replace(lists[rank][at], **changes)  # type: ignore[arg-type]


def drop(lists: Lists, rank: int, text: str) -> None:
    del lists[rank][place(lists, rank, text)]


def too_late(lists: Lists) -> None:
    """The forward after its result is sent."""
    at = place(lists, 0, "0F0")
    lists[0][at], lists[0][at + 1] = lists[0][at + 1], lists[0][at]


def resize(lists: Lists) -> None:
    at = place(lists, 1, "RECV 0F0")
    lists[1][at] = resized(lists[1][at])


def resize_both(lists: Lists) -> None:
    resize(lists)
    at = place(lists, 0, "SEND 0F0")
    lists[0][at] = resized(lists[0][at])


def swap_receives(lists: Lists) -> None:
    a, b = place(lists, 0, "RECV 1F1"), place(lists, 0, "RECV 1B0")
    lists[0][a], lists[0][b] = lists[0][b], lists[0][a]


def twice(lists: Lists) -> None:
    at = place(lists, 1, "1F0")
    lists[1].insert(at + 1, replace(lists[1][at], frees=()))
    lists[1][at] = replace(lists[1][at], frees=())


def sum_too_soon(lists: Lists) -> None:
    """The loss is sent before the second micro-batch is added to it."""
    at = place(lists, 1, "1F1")
    lists[1][at], lists[1][at + 1] = lists[1][at + 1], lists[1][at]


# two ranks and two micro-batches of 1F1B
BREAKS: dict[str, tuple[Callable[[Lists], None], str]] = {
    "dropped run": (
        lambda lists: drop(lists, 1, "1F1"),
        "rank 1: 1F1 is not run; rank 1, instruction 7 (SEND 1F1 to rank 0: %loss): it sends %loss, "
        "which lacks 1 of its parts; rank 1, instruction 8 (1B1): it reads %saved1, which is not there; "
        "rank 1, instruction 11 (1E): it reads %loss, which lacks 1 of its parts.",
    ),
    "dropped send": (
        lambda lists: drop(lists, 0, "SEND 0F1"),
        "rank 0, instruction 6 (RECV 1B0 from rank 1: %g1, %skip_grad): it waits for rank 1, which "
        "waits at instruction 4 (RECV 0F1 from rank 0: %x1, %skip); rank 1, instruction 4 (RECV 0F1 "
        "from rank 0: %x1, %skip): it waits for rank 0, which waits at instruction 6 (RECV 1B0 from "
        "rank 1: %g1, %skip_grad).",
    ),
    "other peer": (
        lambda lists: change(lists, 0, "SEND 0F1", peer=7),
        "rank 0, instruction 6 (SEND 0F1 to rank 7: %x1, %skip): it waits for rank 7, which does not "
        "exist; rank 1, instruction 4 (RECV 0F1 from rank 0: %x1, %skip): it waits for rank 0, which "
        "waits at instruction 6 (SEND 0F1 to rank 7: %x1, %skip).",
    ),
    "action too late": (
        too_late,
        "rank 0, instruction 3 (SEND 0F0 to rank 1: %x1, %skip): it sends %x1, which is not there.",
    ),
    "resized": (
        resize,
        "rank 0, instruction 4 (SEND 0F0 to rank 1: %x1, %skip): rank 1 receives %x1: f32[7,2,2], "
        "%skip: f32[2,2] here, but what is sent is %x1: f32[2,2], %skip: f32[2,2].",
    ),
    "resized on both": (
        resize_both,
        "rank 0, instruction 4 (SEND 0F0 to rank 1: %x1, %skip): the flow knows other types than %x1: "
        "f32[7,2,2], %skip: f32[2,2].",
    ),
    "swapped": (
        swap_receives,
        "rank 1, instruction 6 (SEND 1B0 to rank 0: %g1, %skip_grad): this meets instruction 7 of rank "
        "0 (RECV 1F1 from rank 1: %loss), which is another message.",
    ),
    "run twice": (twice, "rank 1, instruction 4 (1F0): this action is run twice."),
    "sum too soon": (
        sum_too_soon,
        "rank 1, instruction 7 (SEND 1F1 to rank 0: %loss): it sends %loss, which lacks 1 of its parts.",
    ),
    "another's action": (
        lambda lists: change(lists, 0, "0F1", action=Action(1, "F", 1)),
        "rank 0: 0F1 is not run; rank 0, instruction 5 (1F1): this is an action of rank 1; rank 0, "
        "instruction 6 (SEND 0F1 to rank 1: %x1, %skip): it sends %x1, which is not there; rank 1, "
        "instruction 7 (1F1): this action is run twice; rank 0, instruction 12 (0B1): it reads %saved0, "
        "which is not there.",
    ),
    "unknown action": (
        lambda lists: change(lists, 0, "0F1", action=Action(0, "W", 1)),
        "rank 0: 0F1 is not run; rank 0, instruction 5 (0W1): the flow has no such action; rank 0, "
        "instruction 6 (SEND 0F1 to rank 1: %x1, %skip): it sends %x1, which is not there; rank 0, "
        "instruction 12 (0B1): it reads %saved0, which is not there.",
    ),
    "unknown micro-batch": (
        lambda lists: change(lists, 0, "0F1", action=Action(0, "F", 2)),
        "rank 0: 0F1 is not run; rank 0, instruction 5 (0F2): the flow has no such micro-batch; rank 0, "
        "instruction 6 (SEND 0F1 to rank 1: %x1, %skip): it sends %x1, which is not there; rank 0, "
        "instruction 12 (0B1): it reads %saved0, which is not there.",
    ),
    "not freed": (
        lambda lists: change(lists, 0, "0B1", frees=()),
        "rank 0: %saved0 of micro-batch 1 is never freed; "
        "rank 0: %g1 of micro-batch 1 is never freed; "
        "rank 0: %skip_grad of micro-batch 1 is never freed.",
    ),
    "freed too soon": (
        lambda lists: change(lists, 1, "1F0", frees=("x1", "skip", "saved1")),
        "rank 1, instruction 5 (1B0): it reads %saved1, which is freed already.",
    ),
    "freed twice": (
        lambda lists: change(lists, 1, "1F0", frees=("x1", "skip", "x1")),
        "rank 1, instruction 3 (1F0): it frees %x1, which is freed already.",
    ),
    "owner freed": (
        lambda lists: change(lists, 0, "0E", frees=("w0",)),
        "rank 0, instruction 13 (0E): it frees %w0, whose owner is this rank.",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_says_what_is_wrong(case: str) -> None:
    lists, flow = lists_of("1f1b", 2, 2)
    check_schedule(lists, flow)
    break_, message = BREAKS[case]
    break_(lists)
    refused(ScheduleError, f"these lists of instructions are wrong: {message}", lambda: check_schedule(lists, flow))


def test_gradient_in_two_ways() -> None:
    """A stage that knows both ways of going back takes one of them, once for each micro-batch."""
    schedule = parse_schedule("0F0,0B0,0F1,0I1,0W1", 1, 2)
    flow = flow_of(schedule.ranks, 2, "FBIW")
    good = with_transfers(schedule.orders, flow, Costs())[0]
    check_schedule([good], flow)
    run = {str(line): replace(line, frees=()) for line in good}
    without = [line for line in good if str(line) not in ("0I1", "0W1")]
    twice = [*good[:-1], replace(run["0B0"], action=Action(0, "B", 1)), good[-1]]
    with pytest.raises(ScheduleError, match="rank 0: 0B1 is not run; rank 0: 0I1 is not run; rank 0: 0W1 is not run"):
        check_schedule([without], flow)
    with pytest.raises(ScheduleError, match="rank 0: 0B1 is run, and the same gradient another way"):
        check_schedule([twice], flow)


# 500 breaks

SEED = 20240130
KINDS = (
    "swap",
    "swap neighbours",
    "move",
    "drop",
    "double",
    "retarget",
    "resize",
    "rename",
    "other rank",
    "micro-batch",
    "stage",
    "kind",
)
FREES = ("free dropped", "free moved", "free late", "free doubled", "free exchanged")
BOTH = ("drop on both", "double on both", "resize on both", "swap on both")


def broken(rng: random.Random, kind: str, lists: Lists, flow: Flow) -> bool:
    """Change the lists in one way; whether there was anything to change."""
    rank = rng.choice([r for r, lines in enumerate(lists) if lines])
    lines = lists[rank]
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines))
    line = lines[at]
    if kind == "swap neighbours":
        lines[at - 1], lines[at] = lines[at], lines[at - 1]
    elif kind == "swap":
        lines[at], lines[to] = lines[to], lines[at]
    elif kind == "move":
        lines.insert(to, lines.pop(at))
    elif kind == "drop":
        del lines[at]
    elif kind == "double":
        lines.insert(rng.randint(at + 1, len(lines)), line)
    elif kind == "other rank":
        lists[rng.randrange(len(lists))].insert(to, lines.pop(at))
    elif kind in ("micro-batch", "stage", "kind"):
        action = line.action
        microbatch, stage, letter = (
            rng.randrange(-1, flow.microbatches + 1),
            rng.randrange(flow.stages),
            rng.choice("FBIWPE"),
        )
        new = {"micro-batch": {"microbatch": microbatch}, "stage": {"stage": stage}, "kind": {"kind": letter}}[kind]
        lines[at] = replace(line, action=replace(action, **new))  # type: ignore[arg-type]
    elif kind.startswith("free"):
        if not line.frees:
            return False
        place = rng.randrange(len(line.frees))
        name, rest = line.frees[place], line.frees[:place] + line.frees[place + 1 :]
        others = [n for other in lists[rng.randrange(len(lists))] for n in (*other.frees, *other.values)]
        lines[at] = replace(line, frees=(*rest, rng.choice(others)) if kind == "free exchanged" else rest)
        if kind == "free late":
            late = [i for i in range(at, len(lines)) if lines[i].action.microbatch == line.action.microbatch]
            to = rng.choice(late)
        if kind == "free doubled":
            lines[at] = line
        if kind in ("free doubled", "free moved", "free late"):
            lines[to] = replace(lines[to], frees=(*lines[to].frees, name))
    else:
        return broken_message(rng, kind, lists, rank, at)
    return True


def broken_message(rng: random.Random, kind: str, lists: Lists, rank: int, at: int) -> bool:
    line = lists[rank][at]
    if line.op == "RUN" or (line.is_copy and kind in BOTH):
        return False
    if kind == "retarget":
        lists[rank][at] = replace(line, peer=rng.randrange(-1, len(lists) + 1))
    elif kind == "resize":
        lists[rank][at] = resized(line)
    elif kind == "rename":
        names = [name for other in lists[rank] for name in other.values]
        lists[rank][at] = replace(line, values=(rng.choice(names), *line.values[1:]))
    else:
        there = lists[line.peer]
        half = "RECV" if line.op == "SEND" else "SEND"
        peer_at = next(i for i, o in enumerate(there) if (o.op, o.action, o.values) == (half, line.action, line.values))
        for lines, place in ((lists[rank], at), (there, peer_at)):
            if kind == "drop on both":
                del lines[place]
            elif kind == "double on both":
                lines.insert(place, lines[place])
            elif kind == "resize on both":
                lines[place] = resized(lines[place])
            else:
                lines[place - 1], lines[place] = lines[place], lines[place - 1]
    return True


def test_500_breaks() -> None:
    """A change matters if the lists, run by `on_numbers`, hang, fail, keep something or come to other numbers.

    That does not ask the checker: it moves real numbers between memories, and forgets what is freed.
    """
    rng = random.Random(SEED)
    cases = [
        ("1f1b", 3, 4, False), ("interleaved-1f1b", 2, 3, True), ("zb-h1", 3, 3, False), ("zb-v", 2, 3, True),
        ("dualpipev", 2, 4, True), ("1f1b", 3, 4, True, True), ("zb-v", 2, 4, True, True),
    ]  # fmt: skip
    bases = [lists_of(*case) for case in cases]
    turns = [[[line.turn for line in each if line.op == "RUN"] for each in lists] for lists, _ in bases]
    flows = [lists_of(*case[:3])[1] for case in cases]  # nothing waits elsewhere
    wanted = [on_one_device(flow, plain_order(flow, order)) for order, flow in zip(turns, flows, strict=True)]
    tally: Counter[str] = Counter()
    missed, unnamed = [], []
    while sum(tally.values()) < 500:
        which = rng.randrange(len(bases))
        good, flow = bases[which]
        lists = [list(lines) for lines in good]
        kind = rng.choice(KINDS + FREES + BOTH)
        if not broken(rng, kind, lists, flow) or lists == good:
            continue
        try:
            matters = on_numbers(lists, flow) != wanted[which]
        except Wrong:
            matters = True
        try:
            check_schedule(lists, flow)
            verdict = "accepted"
        except ScheduleError as error:
            verdict = "refused"
            if not re.search(r"rank \d+(, instruction \d+ \(.+\))?: ", str(error)):
                unnamed.append(str(error))
        tally[f"{'matters' if matters else 'harmless'}, {verdict}"] += 1
        if matters and verdict == "accepted":
            missed.append((cases[which], kind))
    print(f"seed {SEED}: {dict(tally)}")
    assert not unnamed
    assert tally["matters, refused"] > 300
    assert not missed
    assert tally["harmless, accepted"] > 10  # it does not refuse whatever differs


def sabotage(text: str, **changes: object) -> Callable[[Lists, Flow], None]:
    return lambda lists, flow: change(lists, 0, text, **changes)


def moved(text: str, to: str) -> Callable[[Lists, Flow], None]:
    """An instruction of rank 0 before another one."""

    def move(lists: Lists, flow: Flow) -> None:
        line = lists[0].pop(place(lists, 0, text))
        lists[0].insert(place(lists, 0, to), line)

    return move


# what waits in the host's memory; rank 0 of three, four micro-batches of 1F1B
COPIES: dict[str, tuple[Callable[[Lists, Flow], None], str]] = {
    "no copy out": (lambda lists, _: drop(lists, 0, "OUT 0F1"), "it copies %saved0_host0, which is not there"),
    "no copy back": (lambda lists, _: drop(lists, 0, "IN 0B1"), "(0B1): it reads %saved0_back0B, which is not there"),
    "out before it is made": (moved("OUT 0F1", "0F1"), "(OUT 0F1: %saved0_host0): it copies %saved0, which is not th"),
    "back before it is out": (moved("IN 0B0", "OUT 0F0"), "(IN 0B0: %saved0_back0B): it copies %saved0_host0, which"),
    "back too late": (moved("0B0", "IN 0B0"), "(0B0): it reads %saved0_back0B, which is not there"),
    "out twice": (
        lambda lists, _: lists[0].insert(place(lists, 0, "OUT 0F1"), replace(lists[0][place(lists, 0, "OUT 0F1")],
                                                                             frees=())),
        "%saved0_host0 comes to this rank twice",
    ),
    "buffer given back early": (
        sabotage("OUT 0F1", frees=("saved0", "saved0_host0")), "copies %saved0_host0, which is freed already",
    ),
    "buffer kept": (sabotage("IN 0B1", frees=()), "%saved0_host0 of micro-batch 1 is never freed"),
    "device memory kept": (sabotage("OUT 0F1", frees=()), "%saved0 of micro-batch 1 is never freed"),
    "of another micro-batch": (sabotage("IN 0B1", action=Action(0, "B", 2)), "reads %saved0_back0B, which is not ther"),
    "of none": (sabotage("IN 0B1", action=Action(0, "B", 9)), "the flow has no such micro-batch"),
    "of another rank": (sabotage("OUT 0F1", action=Action(1, "F", 1)), "this is no action of the rank"),
    "of no such value": (sabotage("OUT 0F1", values=("w0",)), "the flow knows no %w0 that goes out behind 0F1"),
    "of another size": (
        lambda lists, _: lists[0].__setitem__(at := place(lists, 0, "IN 0B1"), resized(lists[0][at])),
        "the flow knows other types than %saved0_back0B: f32[7",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_broken_copies_are_named(name: str) -> None:
    lists, flow = lists_of("1f1b", 3, 4, True, host=True)
    check_schedule(lists, flow)
    make, text = COPIES[name]
    make(lists, flow)
    with pytest.raises(ScheduleError, match=re.escape(text)):
        check_schedule(lists, flow)


def test_copies_go_beside_the_turns_of_others() -> None:
    """A copy back starts a turn ahead; the memory of what goes out is free behind the next turn."""
    lists, flow = lists_of("1f1b", 3, 4, True, host=True)
    mine = [line for line in lists[0] if line.op in ("RUN", "OUT", "IN") and line.action.kind in "FB"]
    assert [str(line).partition(":")[0] for line in mine] == [
        "0F0", "OUT 0F0", "0F1", "OUT 0F1", "IN 0B0", "0F2", "OUT 0F2", "0B0", "IN 0B1", "0F3", "OUT 0F3", "IN 0B2",
        "0B1", "IN 0B3", "0B2", "0B3",
    ]  # fmt: skip
    ends = {str(mine[out].action): str(mine[end].action) for out, end in copies_ended(mine, flow).items()}
    assert ends == {"0F0": "0F1", "0F1": "0F2", "0F2": "0B0", "0F3": "0B1"}
    soon = [mine[0], mine[1], replace(mine[4], action=Action(0, "B", 0)), mine[7]]  # no turn is between the two
    assert copies_ended(soon, flow) == {1: 2}


@pytest.mark.parametrize("ranks", [256, pytest.param(1024, marks=pytest.mark.slow)])
def test_many_ranks(ranks: int) -> None:
    """Of 1,024 about 300,000 instructions, in a second on one core of a desk machine."""
    lists, flow = lists_of("1f1b", ranks, 48)
    assert 290 * ranks < sum(map(len, lists)) < 310 * ranks
    start = time.process_time()
    check_schedule(lists, flow)
    took = time.process_time() - start
    print(f"checked {sum(map(len, lists)):,} instructions in {took:.2f} s")
    assert took < ranks / 200


@pytest.mark.parametrize(("faults", "more"), [(1, ""), (5, ""), (6, "; and 1 more"), (7, "; and 2 more")])
def test_five_faults_are_named_and_the_others_are_counted(faults: int, more: str) -> None:
    lists, flow = lists_of("gpipe", 1, 8)
    at = place(lists, 0, "0F0")
    lists[0][at + 1 : at + 1] = [lists[0][at]] * faults
    said = "; ".join(
        f"rank 0, instruction {at + i} (0F0): this action is run twice" for i in range(1, min(faults, 5) + 1)
    )
    refused(ScheduleError, f"these lists of instructions are wrong: {said}{more}.", lambda: check_schedule(lists, flow))
