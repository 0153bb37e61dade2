"""Simulated times against the published ones, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.errors import ScheduleError
from autopar.ir.program import TensorType
from autopar.ir.schedule import Action, Costs, Flow, Instruction, Timeline, Work
from autopar.passes.schedules import Walk, in_flight, in_halves, parse_schedule, simulate, with_transfers

HALF = TensorType((4,), torch.float16)  # 8 bytes


def chain(ranks: tuple[int, ...], microbatches: int) -> Flow:
    """Activations there and gradients back, and nothing else."""
    works: dict[tuple[int, str], Work] = {}
    last = len(ranks) - 1
    for s in range(last + 1):
        x, y = ((f"x{s}",) if s else ()), ((f"x{s + 1}",) if s < last else ())
        dx, dy = ((f"g{s}",) if s else ()), ((f"g{s + 1}",) if s < last else ())
        works[s, "F"] = Work(x, (*y, f"kept{s}"))
        works[s, "B"] = Work((f"kept{s}", *dy), dx)
        works[s, "I"] = Work((f"kept{s}", *dy), (*dx, f"mid{s}"))
        works[s, "W"] = Work((f"mid{s}",))
    names = {n for work in works.values() for n in (*work.reads, *work.writes)}
    return Flow(ranks, microbatches, works, dict.fromkeys(sorted(names), HALF))


def timeline(name: str, ranks: int, microbatches: int, costs: Costs, chunks: int | None = None) -> Timeline:
    schedule = parse_schedule(name, ranks, microbatches, chunks and ranks * chunks, costs)
    flow = chain(schedule.ranks, microbatches)
    return simulate(with_transfers(schedule.orders, flow, costs), flow, costs)


def costs_of(stages: int, forward: float, input_grad: float, weight_grad: float, transfer: float = 0.0) -> Costs:
    kinds = {"F": forward, "I": input_grad, "W": weight_grad}
    return Costs({(s, kind): t for s in range(stages) for kind, t in kinds.items()}, latency_us=transfer)


# arXiv 2401.10241: tables 6 (p, m, T_F, T_B, T_W, T_comm) and 5 (1F1B, 1F1B-I, ZB-H1, ZB-H2); shared/PUBLISHED.md
ROWS = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 0.1585, 0.1083),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 0.1242, 0.0837),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 0.0674, 0.0444),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1104, 0.1397, 0.0672),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.0852, 0.1088, 0.0516),
    pytest.param((16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0445, 0.0576, 0.0266), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"p={row[0]},m={row[1]}")
def test_published_bubbles(row: tuple[float, ...]) -> None:
    """1F1B, ZB-H1, ZB-H2 to the last decimal; 1F1B-I, with the three stages a rank that fit best, near it."""
    ranks, microbatches = int(row[0]), int(row[1])
    forward, input_grad, weight_grad, transfer = row[2:6]

    def rate(name: str, chunks: int = 1) -> float:
        costs = costs_of(ranks * chunks, *(t / chunks for t in (forward, input_grad, weight_grad)), transfer)
        span_us = timeline(name, ranks, microbatches, costs, chunks).span_us
        return 1 - microbatches * (forward + input_grad + weight_grad) / span_us

    exact = {"1f1b": row[6], "zb-h1": row[8], "zb-h2": row[9]}
    assert {name: round(rate(name), 4) for name in exact} == exact
    assert abs(rate("interleaved-1f1b", 3) - row[7]) <= 0.0036
    # not in the tables: two stages a rank in a V, in half of ZB-H2's memory
    assert rate("zb-v", 2) < min(row[6:10])


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_formulas(ranks: int, microbatches: int) -> None:
    """Bubbles by formula: (p - 1)(F + B), its v-th part, (p - 1)(F + I - W), and none where all takes as long."""

    def bubble_us(name: str, costs: Costs, chunks: int, step_us: float) -> float:
        return timeline(name, ranks, microbatches, costs, chunks).span_us - microbatches * step_us

    costs = costs_of(ranks, 2.0, 3.0, 1.0)
    for name in ("gpipe", "1f1b"):
        assert bubble_us(name, costs, 1, 6.0) == (ranks - 1) * 6.0
    for chunks in (2, 3, 4):
        assert (
            bubble_us("interleaved-1f1b", costs_of(ranks * chunks, 2.0, 3.0, 1.0), chunks, chunks * 6.0)
            == (ranks - 1) * 6.0
        )
    assert bubble_us("zb-h1", costs, 1, 6.0) == (ranks - 1) * (2.0 + 3.0 - 1.0)
    even = costs_of(ranks * 2, 1.0, 1.0, 1.0)
    if microbatches >= 2 * ranks - 1:
        assert bubble_us("zb-h2", even, 1, 3.0) == 0
        assert bubble_us("zb-v", even, 2, 6.0) == 0


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (2, 10), (4, 8), (4, 10), (4, 20), (8, 16), (8, 32)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (10.0, 12.0, 7.0)])
def test_the_bubble_of_dualpipev(ranks: int, microbatches: int, times: tuple[float, float, float]) -> None:
    """(PP/2 - 1)(F&B + B - 3 W) of PP half chunks (arXiv 2412.19437, table 2): just that where F = I = W and a pair
    takes as long as both, at most that elsewhere. What a pair hides is no bubble: its time is less."""
    forward, input_grad, weight_grad = times
    backward = input_grad + weight_grad
    costs = costs_of(2 * ranks, *times)
    for hidden in (0.0, 0.1, 0.25):
        pair = (1 - hidden) * (forward + backward)
        on_rank = [(s, t) for s in range(2 * ranks) for t in range(2 * ranks) if s in (t, 2 * ranks - 1 - t)]
        costs = replace(costs, pairs_us={((s, "F"), (t, "B")): pair for s, t in on_rank})
        found = timeline("dualpipev", ranks, microbatches, costs, 2)
        published = (ranks - 1) * (pair + backward - 3 * weight_grad)
        for rank in range(ranks):
            spans = found.runs(rank)
            bubble = spans[-1].end_us - spans[0].start_us - sum(span.end_us - span.start_us for span in spans)
            assert bubble <= published + 1e-9
        if len(set(times)) == 1 and not hidden:
            whole = found.span_us - 2 * microbatches * (forward + backward)
            assert whole == pytest.approx(published)


def test_by_hand() -> None:
    """Two ranks, two micro-batches of 1F1B: F 1, B 2, a transfer 0.5 + 8 bytes / 16."""
    costs = Costs({(s, kind): t for s in (0, 1) for kind, t in (("F", 1.0), ("B", 2.0))}, 0.5, 16.0)
    found = timeline("1f1b", 2, 2, costs)
    assert [
        [(str(span.instruction).split(":")[0], span.start_us, span.end_us) for span in spans] for spans in found.ranks
    ] == [
        [
            ("0F0", 0.0, 1.0),
            ("SEND 0F0 to rank 1", 1.0, 2.0),
            ("0F1", 1.0, 2.0),
            ("SEND 0F1 to rank 1", 2.0, 3.0),
            ("RECV 1B0 from rank 1", 5.0, 6.0),
            ("0B0", 6.0, 8.0),
            ("RECV 1B1 from rank 1", 8.0, 9.0),
            ("0B1", 9.0, 11.0),
        ],
        [
            ("RECV 0F0 from rank 0", 1.0, 2.0),
            ("RECV 0F1 from rank 0", 2.0, 3.0),
            ("1F0", 2.0, 3.0),
            ("1B0", 3.0, 5.0),
            ("SEND 1B0 to rank 0", 5.0, 6.0),
            ("1F1", 5.0, 6.0),
            ("1B1", 6.0, 8.0),
            ("SEND 1B1 to rank 0", 8.0, 9.0),
        ],
    ]
    assert found.span_us == 11.0
    assert (found.bubble(0), found.bubble(1)) == (1 - 6 / 11, 1 - 6 / 11)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipev"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 9)])
def test_a_span_without_instructions(name: str, ranks: int, microbatches: int) -> None:
    schedule = parse_schedule(name, ranks, microbatches)
    flow = chain(schedule.ranks, microbatches)
    times = {(s, kind): 1.0 + 0.1 * s + 0.3 * i for s in range(flow.stages) for i, kind in enumerate("FIW")}
    costs = Costs(times, latency_us=0.7, bytes_per_us=10.0)
    orders = in_halves(schedule.orders)
    whole = simulate(with_transfers(orders, flow, costs), flow, costs)
    walk = Walk.of(orders, flow)
    assert walk.span_us(flow.types, costs) == pytest.approx(whole.span_us, rel=1e-12)


def test_a_circle_has_no_span() -> None:
    orders = [[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    with pytest.raises(ScheduleError, match=r"rank 0 waits for ever at 0B0\."):
        Walk.of(orders, chain((0, 1), 1))


def test_in_flight_of_instructions() -> None:
    schedule = parse_schedule("zb-h1", 3, 5)
    flow = chain(schedule.ranks, 5)
    for order, lines in zip(schedule.orders, with_transfers(schedule.orders, flow, Costs()), strict=True):
        assert in_flight(order) == in_flight(lines) == 3


def test_waits_for_ever() -> None:
    lines = [[Instruction("RECV", Action(1, "F", 0), 1, ("x",), (HALF,))], []]
    with pytest.raises(ScheduleError, match=r"rank 0 waits for ever at instruction 0 \(RECV 1F0 from rank 1: %x\)\."):
        simulate(lines, chain((0, 1), 1), Costs())
