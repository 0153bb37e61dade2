"""Split one layer into what is kept and what is recomputed: minimum cuts, for every price of a byte."""

from __future__ import annotations

from dataclasses import dataclass

_SOURCE, _SINK = -1, -2


@dataclass(frozen=True, slots=True)
class CutValue:
    """call: the place of the call that makes it. needed: the backward pass reads it."""

    call: int
    bytes_: int
    needed: bool


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """A layer's calls and values. times: of each call in ns, None if it may not be computed again. reads: of each call
    the places of its operands among the values; those that are there anyway are left out. Equal layers are equal
    problems."""

    times: tuple[int | None, ...]
    reads: tuple[tuple[int, ...], ...]
    values: tuple[CutValue, ...]


@dataclass(frozen=True, slots=True)
class CutChoice:
    """A choice: the calls that are computed again, the time that this takes, and the bytes that are kept."""

    bytes_: int
    time: int
    again: tuple[int, ...] = ()


def nothing_again(problem: LayerProblem) -> CutChoice:
    """Every value that the backward pass reads is kept."""
    return CutChoice(sum(value.bytes_ for value in problem.values if value.needed), 0)


def least(problem: LayerProblem) -> CutChoice:
    """The fewest bytes, and for them the least time."""
    return _solve(problem, sum(time or 0 for time in problem.times) + 1, 1)


def frontier(problem: LayerProblem) -> tuple[CutChoice, ...]:
    """The choices that are best for some price of a byte in time, from `nothing_again` to `least`.

    They are the corners of the convex hull of all choices in the plane of bytes and time: between two of them a cut at
    the price of their slope finds the next, until there is none.
    """
    first, last = nothing_again(problem), least(problem)
    if last.bytes_ >= first.bytes_:
        return (first,)
    return (first, *_between(problem, first, last), last)


def _between(problem: LayerProblem, a: CutChoice, b: CutChoice) -> tuple[CutChoice, ...]:
    price, weight = b.time - a.time, a.bytes_ - b.bytes_
    if weight <= 0 or price <= 0:
        return ()
    found = _solve(problem, price, weight)
    if found.bytes_ * price + found.time * weight >= a.bytes_ * price + a.time * weight:
        return ()
    return (*_between(problem, a, found), found, *_between(problem, found, b))


def _solve(problem: LayerProblem, price: int, weight: int) -> CutChoice:
    """The choice with the least `price * bytes + weight * time`, and of those the one that computes least again.

    On the sink's side are the calls that are computed again and the values that the backward pass needs. An edge that
    is cut is paid: from the source to a call the time, from a call to its value the bytes. What cannot be paid has no
    capacity: a call computed again needs its operands. All numbers are whole, so that a cut is exact.
    """
    import networkx as nx  # a quarter of a second, for those who recompute

    count = len(problem.times)
    graph = nx.DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))
    for call, (time, reads) in enumerate(zip(problem.times, problem.reads, strict=True)):
        if time is None:
            graph.add_edge(_SOURCE, call)
            continue
        graph.add_edge(_SOURCE, call, capacity=weight * time)
        for value in reads:
            graph.add_edge(count + value, call)
    for place, made in enumerate(problem.values):
        graph.add_edge(made.call, count + place, capacity=price * made.bytes_)
        if made.needed:
            graph.add_edge(count + place, _SINK)
    _, (_, needed) = nx.minimum_cut(graph, _SOURCE, _SINK)
    again = tuple(call for call in range(count) if call in needed)
    kept = sum(v.bytes_ for i, v in enumerate(problem.values) if count + i in needed and v.call not in needed)
    return CutChoice(kept, sum(problem.times[call] or 0 for call in again), again)
