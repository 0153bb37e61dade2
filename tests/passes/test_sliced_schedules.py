"""Schedules of slices of sequences: their orders, their bubbles and memory by formula, and what is proven of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from pipelines import on_numbers
from refusals import refused

from autopar.errors import ScheduleError
from autopar.ir.program import TensorType
from autopar.ir.schedule import Action, Costs, Flow, Orders, Work
from autopar.passes.schedules import check_schedule, in_flight, parse_schedule, simulate, with_transfers
from autopar.passes.schedules.orders import SCHEDULES

TYPE = TensorType((4,), torch.float16)
SIZES = [(p, m, k) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4) for k in (1, 2, 3, 4, 8)]


def orders(name: str, ranks: int, microbatches: int, slices: int, chunks: int = 1) -> Orders:
    return parse_schedule(name, ranks, microbatches * slices, ranks * chunks, slices=slices).orders


def chain(ranks: tuple[int, ...], microbatches: int, slices: int) -> Flow:
    """Activations there and gradients back, and keys that each stage keeps."""
    works: dict[tuple[int, str], Work] = {}
    last = len(ranks) - 1
    for s in range(last + 1):
        x, y = ((f"x{s}",) if s else ()), ((f"x{s + 1}",) if s < last else ())
        dx, dy = ((f"g{s}",) if s else ()), ((f"g{s + 1}",) if s < last else ())
        works[s, "F"] = Work(x, (*y, f"kept{s}"), carries=("k",))
        works[s, "B"] = Work((f"kept{s}", *dy), dx, carries=("k", "dk"))
    names = {n for work in works.values() for n in (*work.reads, *work.writes)}
    return Flow(ranks, microbatches * slices, works, dict.fromkeys(sorted(names), TYPE), slices=slices)


def idle(name: str, p: int, m: int, k: int, attention: float = 0.0) -> float:
    """The share of the step in which a rank does nothing; a backward pass takes twice as long as a forward one.
    attention: its share of the work."""
    times = {(s, kind): t / k for s in range(p) for kind, t in (("F", 1.0), ("B", 2.0))}
    costs = Costs(times, growing_us={key: attention * time for key, time in times.items()}, slices=k)
    flow = chain(tuple(range(p)), m, k)
    timeline = simulate(with_transfers(orders(name, p, m, k), flow, costs), flow, costs)
    return 1 - m * 3.0 / timeline.span_us


def test_as_the_papers_draw_them() -> None:
    def lines(found: Orders) -> list[str]:
        return [" ".join(map(str, order)) for order in found]

    assert lines(orders("gpipe", 2, 2, 2)) == ["0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", "1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"]
    assert lines(orders("seq1f1b", 2, 2, 2)) == ["0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2", "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2"]
    assert lines(orders("gpipe", 2, 1, 2, chunks=2)) == [
        "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0",
        "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0",
    ]


def test_one_slice_is_1f1b() -> None:
    for ranks in (1, 2, 4):
        assert orders("seq1f1b", ranks, 5, 1) == orders("1f1b", ranks, 5, 1)


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if entry.of_slices])
def test_all_orders_are_proven_and_give_the_same_numbers(name: str) -> None:
    for p, m, k in SIZES:
        flow = chain(tuple(range(p)), m, k)
        lists = with_transfers(orders(name, p, m, k), flow, Costs())
        check_schedule(lists, flow)
        on_numbers(lists, flow)


@pytest.mark.parametrize("name", ["gpipe", "seq1f1b"])
def test_the_bubble_of_equal_slices(name: str) -> None:
    """(p - 1) / (m k + p - 1), whatever the micro-batches."""
    for p, m, k in SIZES:
        assert idle(name, p, m, k) == pytest.approx((p - 1) / (m * k + p - 1), abs=1e-12), (p, m, k)


def test_slices_of_equal_length_are_no_equal_work() -> None:
    """Of slice i of k the pairs of a query and a key are 2 i + 1 of k^2. With attention 60 % of the work the last of
    four slices takes 1.45 times the mean, and the pipeline waits for it in each micro-batch."""
    costs = Costs({(0, "F"): 1.0}, growing_us={(0, "F"): 0.6}, slices=4)
    times = [costs.time_us(Action(0, "F", part)) for part in range(8)]
    assert times == pytest.approx([0.55, 0.85, 1.15, 1.45] * 2)
    assert [round(100 * idle("seq1f1b", 8, 8, k, 0.6), 1) for k in (1, 4)] == [46.7, 41.6]
    assert [round(100 * idle("seq1f1b", 4, 8, k, 0.6), 1) for k in (1, 4)] == [27.3, 34.6]


def test_slices_halve_the_idle_time_of_1f1b() -> None:
    assert idle("seq1f1b", 4, 4, 4) <= idle("1f1b", 4, 4, 1) / 2


def test_memory() -> None:
    """Stage i holds (p - i + k - 1) / k micro-batches, if there are as many."""
    for p, m, k in SIZES:
        found = orders("seq1f1b", p, m, k)
        assert [in_flight(order) for order in found] == [min(p - i + k - 1, m * k) for i in range(p)], (p, m, k)
        assert {in_flight(order) for order in orders("gpipe", p, m, k)} == {m * k}


def test_any_exchange_of_two_slices_is_found() -> None:
    """Of forwards, or of backwards, of one sequence on one stage."""
    p, m, k = 2, 2, 3
    flow, found = chain((0, 1), m, k), orders("seq1f1b", p, m, k)
    draw = random.Random(0)
    for _ in range(60):
        rank, kind, sequence = draw.randrange(p), draw.choice("FB"), draw.randrange(m)
        a, b = (sequence * k + slice_ for slice_ in draw.sample(range(k), 2))
        turned = {Action(s, kind, a): Action(s, kind, b) for s in range(p)}
        turned |= {value: key for key, value in turned.items()}
        wrong = tuple(tuple(turned.get(action, action) for action in order) for order in found)
        assert wrong != found and rank < p
        with pytest.raises(ScheduleError, match=r"takes over|waits"):
            check_schedule(with_transfers(wrong, flow, Costs()), flow)


def test_what_carries_nothing_may_go_in_any_order() -> None:
    flow = chain((0,), 1, 2)
    free = replace(flow, works={key: replace(work, carries=()) for key, work in flow.works.items()})
    table = "0F1,0F0,0B0,0B1\n"
    order = parse_schedule(table, 1, 2, 1, slices=2).orders
    check_schedule(with_transfers(order, free, Costs()), free)
    refused(
        ScheduleError,
        "these lists of instructions are wrong: rank 0, instruction 0 (0F1): it takes over %k of the slice that 0F0 "
        "computes, which runs later; rank 0, instruction 2 (0B0): it takes over %k, %dk of the slice that 0B1 "
        "computes, which runs later.",
        lambda: check_schedule(with_transfers(order, flow, Costs()), flow),
    )


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if not entry.of_slices])
def test_schedules_that_know_no_slices(name: str) -> None:
    refused(
        ScheduleError,
        f"slices=4: schedule '{name}' does not run the slices of a sequence in its order, and back in reverse. Use "
        f"schedule gpipe or seq1f1b, slices=1, or an order of your own.",
        lambda: parse_schedule(name, 2, 8, slices=4),
    )
