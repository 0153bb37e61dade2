"""The orders of the schedules, what a user may give instead, and the transfers that follow from them."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
from pipelines import flow_of, on_numbers, on_one_device, plain_order
from refusals import refused
from torch.distributed.pipelining import schedules

from autopar.errors import ScheduleError
from autopar.ir.schedule import Action, Costs, Flow, Work
from autopar.passes.schedules import (
    SCHEDULES,
    Orders,
    Schedule,
    check_schedule,
    forward_only,
    in_flight,
    parse_schedule,
    simulate,
    with_transfers,
)

RANKS = (1, 2, 3, 4, 8)
ANY_CHUNKS = ("gpipe", "interleaved-1f1b")
CASES = [
    (name, ranks, chunks)
    for name, entry in SCHEDULES.items()
    for ranks in RANKS
    for chunks in ((1, 2, 3, 4) if name in ANY_CHUNKS else (entry.chunks,))
]


def lines(orders: Orders) -> list[str]:
    """Each rank's turns, the actions of a pair with | between."""
    return [" ".join("|".join(map(str, turn.actions)) for turn in order) for order in orders]


def flow_for(schedule: Schedule, microbatches: int) -> Flow:
    return flow_of(schedule.ranks, microbatches, "".join(sorted(schedule.kinds)))


# As the papers draw them: (name, ranks, micro-batches, stages)
TEXTBOOK = {
    ("gpipe", 2, 3, 2): ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
    ("1f1b", 4, 4, 4): [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    ],
    ("1f1b", 3, 1, 3): ["0F0 0B0", "1F0 1B0", "2F0 2B0"],
    ("interleaved-1f1b", 2, 4, 4): [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ],
    ("interleaved-1f1b", 2, 3, 4): [  # the last group has one micro-batch
        "0F0 0F1 2F0 2F1 0F2 2B0 2B1 2F2 0B0 0B1 2B2 0B2",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1B1 3F2 3B2 1B2",
    ],
    ("zb-h1", 3, 4, 3): [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ],
    ("zb-h2", 3, 5, 3): [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4",
    ],
    ("zb-v", 2, 3, 4): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ],
    ("dualpipev", 2, 4, 4): [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3|3B1 3F2|0B0 3B2 3F3|0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2|1B0 1F3|2B1 2F3|1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ],
}


@pytest.mark.parametrize("case", TEXTBOOK, ids=str)
def test_textbook(case: tuple[str, int, int, int]) -> None:
    name, ranks, microbatches, stages = case
    assert lines(parse_schedule(name, ranks, microbatches, stages).orders) == TEXTBOOK[case]


@pytest.mark.skipif(not hasattr(schedules, "ScheduleDualPipeV"), reason="this torch has no DualPipeV")
@pytest.mark.parametrize("ranks", RANKS)
def test_dualpipev_is_the_order_of_torch(ranks: int) -> None:
    """Torch's own rows, with its pairs."""
    for microbatches in (2 * ranks, 2 * ranks + 3, 4 * ranks):
        of_torch = SimpleNamespace(pp_group_size=ranks, _n_microbatches=microbatches)
        rows = [schedules.ScheduleDualPipeV._calculate_single_rank_operations(of_torch, r) for r in range(ranks)]  # type: ignore[arg-type]
        table = "\n".join(",".join(map(str, row)) for row in rows) + "\n"
        theirs = parse_schedule(table, ranks, microbatches, 2 * ranks)
        assert theirs.orders == parse_schedule("dualpipev", ranks, microbatches).orders


@pytest.mark.parametrize(("name", "ranks", "chunks"), CASES)
def test_runs_everywhere(name: str, ranks: int, chunks: int) -> None:
    """With fewer micro-batches than ranks, and with a rest: proven, and on numbers where it is small."""
    costs = Costs(latency_us=0.1)
    for microbatches in range(1, 11):
        schedule = parse_schedule(name, ranks, microbatches, ranks * chunks)
        flow = flow_for(schedule, microbatches)
        small = ranks * chunks * microbatches <= 16
        wanted = on_one_device(flow, plain_order(flow, schedule.orders)) if small else {}
        for prefetch in (False, True):
            lists = with_transfers(schedule.orders, flow, costs, prefetch)
            check_schedule(lists, flow)
            simulate(lists, flow, costs)
            assert not small or on_numbers(lists, flow) == wanted


@pytest.mark.parametrize(("name", "ranks", "chunks"), CASES)
def test_both_ends_of_a_queue_have_its_messages_in_one_order(name: str, ranks: int, chunks: int) -> None:
    """NCCL does what is between two ranks in the order in which each of them asks for it. A queue carries one pass
    (`Group.of_messages`), both ways where stages lie in a V."""
    schedule = parse_schedule(name, ranks, 6, ranks * chunks)
    flow = flow_for(schedule, 6)
    for prefetch in (False, True):
        seen: dict[tuple[int, int, bool], list[tuple[object, ...]]] = {}
        for rank, lines_ in enumerate(with_transfers(schedule.orders, flow, Costs(latency_us=0.1), prefetch)):
            for line in (line for line in lines_ if line.op != "RUN"):
                ends = (rank, line.peer) if line.op == "SEND" else (line.peer, rank)
                queue = rank, line.peer, line.action.kind in "BIW"
                seen.setdefault(queue, []).append((*ends, line.action, line.values))
        for (rank, peer, way), messages in seen.items():
            assert messages == seen[peer, rank, way], f"ranks {rank} and {peer}"


@pytest.mark.parametrize(("name", "ranks", "chunks"), CASES)
def test_forward_only(name: str, ranks: int, chunks: int) -> None:
    for microbatches in (1, ranks, 7):
        schedule = parse_schedule(name, ranks, microbatches, ranks * chunks)
        flow = flow_of(schedule.ranks, microbatches, "F")
        lists = with_transfers(forward_only(schedule.orders), flow, Costs())
        check_schedule(lists, flow)


@pytest.mark.parametrize("ranks", RANKS)
def test_memory(ranks: int) -> None:
    """Micro-batches in flight, as the papers say."""
    for microbatches in (1, 3, 8, 40):
        orders = {name: parse_schedule(name, ranks, microbatches).orders for name in SCHEDULES}
        for rank in range(ranks):
            most = {name: in_flight(orders[name][rank]) for name in SCHEDULES}
            assert most["gpipe"] == microbatches
            assert most["1f1b"] == min(ranks - rank, microbatches)
            interleaved = min(2 * (ranks - rank - 1) + ranks + 1, 2 * microbatches)
            assert most["interleaved-1f1b"] <= interleaved
            assert most["interleaved-1f1b"] == interleaved or microbatches % ranks
            assert most["zb-h1"] == min(ranks, microbatches)
            assert most["zb-h2"] == min(2 * ranks - 1, microbatches)
            assert most["zb-v"] <= min(2 * ranks, 2 * microbatches)
            assert most["dualpipev"] <= min(2 * ranks + 1, 2 * microbatches)
            assert most["dualpipev"] == 2 * ranks + 1 or microbatches < 2 * ranks or ranks == 1
            assert in_flight(orders["zb-h1"][rank], until="I") == min(ranks - rank, microbatches)
            assert in_flight(orders["zb-v"][rank], stage=rank) <= min(2 * ranks, microbatches)


def test_lists_of_instructions() -> None:
    """All of a small one, in the order of each rank, with what ends where."""
    works = {
        (0, "F"): Work((), ("x",), (), ("w",)),
        (1, "F"): Work(("x",), ("kept",), ("loss",), ("w",)),
        (1, "B"): Work(("kept",), ("g",), ("gw1",)),
        (0, "B"): Work(("g",), (), ("gw0",)),
        **{(rank, "E"): Work(step_reads=("loss", f"gw{rank}")) for rank in (0, 1)},
    }
    types = flow_of((0,), 1).types | {name: flow_of((0,), 1).types["w0"] for name in ("x", "kept", "g", "w", "gw1")}
    flow = Flow((0, 1), 2, works, types, {"w": (0,)})
    orders = parse_schedule("1f1b", 2, 2).orders

    def texts(prefetch: bool) -> list[list[str]]:
        lists = with_transfers(orders, flow, Costs(), prefetch)
        return [[f"{line} ends {' '.join(line.frees)}".removesuffix(" ends ") for line in rank] for rank in lists]

    assert texts(False) == [
        [
            "SEND 0P to rank 1: %w",
            "0F0",
            "SEND 0F0 to rank 1: %x ends x",
            "0F1",
            "SEND 0F1 to rank 1: %x ends x",
            "RECV 1B0 from rank 1: %g",
            "0B0 ends g",
            "RECV 1F1 from rank 1: %loss",
            "RECV 1B1 from rank 1: %g",
            "0B1 ends g",
            "0E ends loss gw0",
        ],
        [
            "RECV 0P from rank 0: %w",
            "RECV 0F0 from rank 0: %x",
            "1F0 ends x",
            "RECV 0F1 from rank 0: %x",
            "1B0 ends kept",
            "SEND 1B0 to rank 0: %g ends g",
            "1F1 ends x w",
            "SEND 1F1 to rank 0: %loss",
            "1B1 ends kept",
            "SEND 1B1 to rank 0: %g ends g",
            "1E ends loss gw1",
        ],
    ]
    early, late = texts(True), texts(False)
    assert late[1][2:4] == ["1F0 ends x", "RECV 0F1 from rank 0: %x"]
    assert early[1][2:4] == ["RECV 0F1 from rank 0: %x", "1F0 ends x"]  # rank 1 is busy with 1F0 when it is sent


def test_circular_wait() -> None:
    flow = flow_of((0, 1), 2)
    orders = parse_schedule("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1", 2, 2).orders
    message = (
        "the schedule cannot be run: rank 0 waits at 0B0 for 1B0 of rank 1, rank 1 waits at 1F1 for 0F1 of rank 0."
    )
    refused(ScheduleError, message, lambda: with_transfers(orders, flow, Costs()))
    backwards = parse_schedule("0B0,0F0", 1, 1).orders
    message = "the schedule cannot be run: rank 0 waits at 0B0 for 0F0 of rank 0."
    refused(ScheduleError, message, lambda: with_transfers(backwards, flow_of((0,), 1), Costs()))


def test_value_that_nobody_makes() -> None:
    flow = Flow((0,), 1, {(0, "F"): Work(("x",))})
    message = "rank 0 waits at 0F0 for %x of micro-batch 0, which no action makes."
    refused(ScheduleError, message, lambda: with_transfers([[Action(0, "F", 0)]], flow, Costs()))


# What a user may give

TABLE = """0F0,0SEND_F0,0F1,,,0RECV_B0,0B0,,0B1,0REDUCE_GRAD
1UNSHARD,1RECV_F0,1F0,1I0,(1F1;1W0)OVERLAP_F_B,1B1,1RESHARD
"""
READ = ["0F0 0F1 0B0 0B1", "1F0 1I0 1F1|1W0 1B1"]


def test_table(tmp_path: Path) -> None:
    """From text and from a file; backwards in one and split, side by side."""
    path = tmp_path / "mine.csv"
    path.write_text(TABLE)
    for given in (TABLE, path, str(path)):
        schedule = parse_schedule(given, 2, 2)
        assert lines(schedule.orders) == READ
        assert schedule.ranks == (0, 1)
    flow = flow_for(schedule, 2)
    lists = with_transfers(schedule.orders, flow, Costs())
    check_schedule(lists, flow)


def test_function() -> None:
    """Of (stages, stages on a rank, micro-batches, costs); it may place the stages as it likes."""

    def mine(stages: int, chunks: int, microbatches: int, costs: Costs) -> list[list[str | Action]]:
        assert (stages, chunks, microbatches) == (4, 2, 1)
        return [["0F0", Action(1, "F", 0), "1B0", "0B0"], ["2F0", "3F0", "3B0", "2B0"]]

    schedule = parse_schedule(mine, 2, 1, 4)
    assert schedule.ranks == (0, 0, 1, 1)
    flow = flow_for(schedule, 1)
    check_schedule(with_transfers(schedule.orders, flow, Costs()), flow)


NAMES = "gpipe, 1f1b, seq1f1b, interleaved-1f1b, zb-h1, zb-h2, zb-v, dualpipev"
REFUSALS = {
    "name": ("zero", None, f"schedule 'zero' is unknown. Known are {NAMES}; or give a function or a CSV file."),
    "file": ("no/such.csv", None, "schedule 'no/such.csv': there is no such file."),
    "multiple": (
        "interleaved-1f1b",
        5,
        "schedule 'interleaved-1f1b': 5 stages cannot be spread evenly over 2 ranks. Take a multiple of 2, e.g. 4.",
    ),
    "one": ("1f1b", 4, "schedule '1f1b' has one stage on each rank; 4 stages on 2 ranks are 2."),
    "v": ("zb-v", 2, "schedule 'zb-v' has 2 stages on each rank; 2 stages on 2 ranks are 1."),
    "cells": (
        "0F0,F1\n1F0,1X0",
        None,
        "the schedule: row 1, column 2: 'F1' is not an action such as '0F1' (stage, F, B, I or W, micro-batch); "
        "row 2, column 2: '1X0' is not an action such as '0F1' (stage, F, B, I or W, micro-batch).",
    ),
    "rows": ("0F0,0F1", None, "the schedule has rows for 1 ranks; the axis 'pp' has 2."),
    "missing": (
        "0F0,0F1,0B0,0F0\n1F0,1F1,1I1,1B0",
        None,
        "the schedule: 0F0 is run 2 times; 0B1 is missing; 1W1 is missing.",
    ),
    "both": (
        "0F0,0F1,0B0,0B1\n1F0,1F1,1I1,1B1,1W1,1B0",
        None,
        "the schedule: 1B1 is I and W in one, and there are 1I1 or 1W1 too.",
    ),
    "range": (
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1,1F2",
        None,
        "the schedule: 1F2 is not of 2 stages and 2 micro-batches.",
    ),
    "two ranks": ("0F0,0F1,0B0\n1F0,1F1,0B1,1B0,1B1", None, "the schedule: stage 0 is on ranks 0 and 1."),
    "many": (
        "0F0\n1F0",
        None,
        "the schedule: 0B0 is missing; 0F1 is missing; 0B1 is missing; 1B0 is missing; 1F1 is missing; and 1 more.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    given, stages, message = REFUSALS[case]
    refused(ScheduleError, message, lambda: parse_schedule(given, 2, 2, stages))


def test_function_refusals() -> None:
    def mine(stages: int, chunks: int, microbatches: int, costs: Costs) -> list[list[object]]:
        return [["0F0", 3]]

    message = "schedule 'mine': rank 0, entry 1: 3 is not an action such as '0F1' (stage, F, B, I or W, micro-batch)."
    refused(ScheduleError, message, lambda: parse_schedule(mine, 1, 1))


def test_sum_on_two_ranks() -> None:
    flow = Flow((0, 1), 1, {(s, "F"): Work(sums=("loss",)) for s in (0, 1)})
    message = "a value is made on one rank, but %loss on ranks [0, 1]."
    refused(ScheduleError, message, lambda: with_transfers([[], []], flow, Costs()))
    refused(ScheduleError, message, lambda: check_schedule([[], []], flow))


def test_name_of_two_values() -> None:
    flow = Flow((0,), 1, {(0, "F"): Work(writes=("x",)), (0, "E"): Work(step_reads=("x",))})
    message = "a value is of a micro-batch or of the step, but both are %x."
    refused(ScheduleError, message, lambda: check_schedule([[]], flow))


def test_transfers_leave_no_cycles():
    """A search of plans draws thousands, and collects no garbage meanwhile: it would hold what each looked at."""
    schedule = parse_schedule("1f1b", 4, 16, 4)
    gc.collect()
    with_transfers(schedule.orders, flow_for(schedule, 16), Costs())
    assert gc.collect() == 0
