"""Rows that go to the rank of their expert, and back: `route` once, then `dispatch` and `combine` as often as needed.

Rows leave in the order of their experts, which is that of the ranks, too, since each holds experts that follow each
other. So those that come from a rank are sorted as well, and whose they are follows from how many there are of each:
their indices are computed, not sent. The order is stable, the same in every run.

A token that has several of its rows' experts on one rank goes there once (`send_tokens`): which of the tokens that came
a row is of is sent once (`token_places`), rows are copies of it, and what they give is added up before it goes back.

In the memory of the host those of all ranks are put together by expert, once for all products, which take runs of rows
there. Elsewhere they lie as they came: products place rows anew, at multiples of what a kernel wants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import fx
from torch.nn import functional

from autopar.errors import BatchError
from autopar.ir.ops.ops import NO_EXPERT
from autopar.runtime.collectives.moves import Member, Move, Step
from autopar.runtime.kernels import host

Tensor = torch.Tensor


def order_by_owner(index: Tensor, size: int, groups: int, bound: int) -> Tensor:
    """The places of rows, sorted by the expert of each; behind them those of rows without one. bound: the other way
    round, the place of each row among those that go to all ranks, of which each is sent as many; of more than that the
    last one holds one. Rows without an expert have the place behind all."""
    order = torch.argsort(index, stable=True)
    if not bound:
        return order
    chosen = index[order].to(torch.int64)
    owner = (chosen // (groups // size)).clamp(0, size - 1)
    starts = torch.searchsorted(owner, torch.arange(size, device=owner.device))
    within = torch.arange(len(owner), device=owner.device) - starts[owner]
    is_sent = (chosen >= 0) & (chosen < groups)
    places = torch.where(is_sent, owner * bound + within.clamp(max=bound - 1), size * bound)
    return torch.empty_like(order).index_copy_(0, order, places)


def route(x: Tensor, member: Member, owned: bool, groups: int, bound: int = 0, chosen: int = 1) -> Step:
    """Exchange how many rows go from each rank to each expert. x: the expert of each row.

    The result is on the host, the one read of a layer and step: [2 n, groups / n], first the rows that this rank sends
    to each expert of each rank, then those that each rank sends to this one's experts. chosen: if it is more than one,
    as many lines again, with the tokens that go to each rank and come from it in their first column. Of an expert that
    does not exist the ranks learn together, so that no rank waits for one that has given up: raises BatchError on all
    of them.

    bound: nothing is read. The result stays on the device, and three columns behind the counts tell of such experts;
    `rows_beyond` looks at it behind the step.
    """
    exists = (x >= 0) & (x < groups)
    wrong = ~exists & (x != NO_EXPERT)
    counts = torch.zeros(groups + 1, dtype=torch.int64, device=x.device)
    counts = counts.index_add(0, torch.where(exists, x, groups), torch.ones_like(counts[:1]).expand(x.shape[0]))
    unknown = torch.cat([torch.where(wrong, x, 0), x.new_zeros(2)]).aminmax()  # of no rows, too
    said = torch.stack([wrong.sum(), unknown.min.to(torch.int64), unknown.max.to(torch.int64)])
    sent = torch.cat([counts[:-1].view(member.size, -1), said.expand(member.size, 3)], 1)
    if bound:
        return Move("exchange", sent, lambda received: torch.cat([sent, received]))
    if chosen > 1:
        sent = torch.cat([_needs(x, member.size, groups, chosen).sum(0).unsqueeze(1), sent], 1)
    return Move("exchange", sent, lambda received: _counted(torch.cat([sent, received]).cpu(), groups, chosen > 1))


def _counted(table: Tensor, groups: int, of_tokens: bool) -> Tensor:
    check_experts_exist(table, groups)
    if not of_tokens:
        return table[:, :-3].contiguous()
    tokens, rows = table[:, :1], table[:, 1:-3]
    return torch.cat([rows, functional.pad(tokens, (0, rows.shape[1] - 1))])


def _needs(index: Tensor, size: int, groups: int, chosen: int) -> Tensor:
    """[tokens, size]: whether a token has an expert on each rank."""
    owner = torch.where((index >= 0) & (index < groups), index // (groups // size), size).view(-1, chosen)
    needs = torch.zeros(owner.shape[0], size + 1, dtype=torch.bool, device=index.device)
    return needs.scatter_(1, owner.to(torch.int64), True)[:, :size]


def tokens_by_owner(index: Tensor, size: int, groups: int, chosen: int) -> Tensor:
    """[tokens, chosen], read as one list: the tokens that go to each rank, one rank after the other; zeros behind."""
    needs = _needs(index, size, groups, chosen)
    count, is_sent = needs.shape[0], needs.T.flatten()
    place = torch.where(is_sent, is_sent.cumsum(0) - 1, index.shape[0])
    tokens = torch.arange(count, device=index.device).repeat(size)
    found = tokens.new_zeros(index.shape[0] + 1).scatter_(0, place, torch.where(is_sent, tokens, 0))
    return found[:-1].view(count, chosen)


def token_places(
    x: Tensor, member: Member, owned: bool, order: Tensor, counts: Tensor, groups: int, chosen: int
) -> Step:
    """Tell each rank of the rows that come to it which of the tokens that come is theirs. x: the expert of each row."""
    size = member.size
    place = (_needs(x, size, groups, chosen).cumsum(0) - 1).to(torch.int32)
    owner = (x // (groups // size)).clamp(0, size - 1).to(torch.int64)
    rows, came, _, tokens = _told(counts, member)
    given, received = _sums(rows), _sums(came)

    def among_all(found: Tensor) -> Tensor:
        before = torch.tensor([0, *accumulate(_sums(tokens[:-1]))], device=found.device)
        found = found + before.repeat_interleave(torch.tensor(received, device=found.device), output_size=sum(received))
        return _regrouped(found, came) if host.on_host(found) else found

    sent = place.gather(1, owner.view(-1, chosen)).flatten()[order[: sum(given)]]
    return Move("rows", sent, among_all, sent=given, received=received)


def check_experts_exist(table: Tensor, groups: int) -> None:
    """Raise BatchError for an expert that does not exist. table: a route's, on the host, with what it says of these."""
    for place, (rows, low, high) in enumerate(table[table.shape[0] // 2 :, -3:].tolist()):
        if rows:
            raise BatchError(
                f"expert {low if low < 0 else high} is out of range: there are {groups}, so an index is 0 to "
                f"{groups - 1}, and {rows} of the rows that rank {place} on their axis sends, part {place} of the "
                f"batch, are of others. Correct the router."
            )


def owned_index(index: Tensor, size: int, place: int, counts: Tensor, bound: int = 0) -> Tensor:
    """The experts of the rows that came to the rank at a place, in the order in which they lie. bound: behind those of
    each rank are rows of no expert, up to it."""
    if bound:
        came = counts[size:, :-3]
        here = came.shape[1]
        places = torch.arange(bound, device=counts.device).expand(size, bound).contiguous()
        expert = torch.searchsorted(came.cumsum(1), places, right=True)
        return torch.where(expert < here, expert + place * here, size * here).view(-1).to(index.dtype)
    here, came = counts.shape[1], counts[size : 2 * size]
    experts = torch.arange(place * here, (place + 1) * here, device=counts.device)
    if host.on_host(index):
        came = came.sum(0)
    else:
        experts, came = experts.repeat(size), came.reshape(-1)
    return torch.repeat_interleave(experts, came, output_size=int(came.sum())).to(index)


def dispatch(
    x: Tensor, member: Member, owned: bool, order: Tensor, counts: Tensor, bound: int = 0, places: Tensor | None = None
) -> Step:
    """Send each row to the rank of its expert: those of this rank's come, by source and then by expert, or on a host by
    expert and then by source. places: x is tokens, of which each goes to a rank once."""
    if places is not None:
        given, taken = map(_sums, _told(counts, member)[2:])
        sent = x[order.flatten()[: sum(given)]]
        return Move("rows", sent, lambda tokens: tokens.index_select(0, places), sent=given, received=taken)
    if bound:
        count = member.size * bound
        sent = x.new_zeros((count + 1, *x.shape[1:])).index_copy_(0, order, x)[:count]
        return Move("exchange", sent.unflatten(0, (member.size, bound)), _joined)
    rows, came, *_ = _told(counts, member)
    then = partial(_regrouped, runs=came) if host.on_host(x) else _as_it_is
    given = _sums(rows)
    return Move("rows", x[order[: sum(given)]], then, sent=given, received=_sums(came))


def combine(
    x: Tensor, member: Member, owned: bool, order: Tensor, counts: Tensor, bound: int = 0, places: Tensor | None = None
) -> Step:
    """Send each row back to where it came from, and to its place there. Those without an expert are zeros. places: the
    sums of a token's rows are what goes back, and are added up there."""
    if places is not None:
        given, taken = map(_sums, _told(counts, member)[2:])
        sums = _added(x, places, sum(taken))
        return Move(
            "rows", sums, lambda rows: _added(rows, order.flatten()[: sum(given)], len(order)), sent=taken,
            received=given,
        )  # fmt: skip
    if bound:
        return Move("exchange", x.unflatten(0, (member.size, bound)), lambda rows: _padded_places(_joined(rows), order))
    sent, came, *_ = _told(counts, member)
    x = _regrouped(x, list(zip(*came, strict=True))) if host.on_host(x) else x
    return Move("rows", x, lambda rows: _in_places(rows, order), sent=_sums(came), received=_sums(sent))


def _added(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """[count, ...]: the sum of the rows that have each place, one after the other and no shorter than in float32: the
    same bits in every run."""
    wide = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
    total = wide.new_zeros(count, *rows.shape[1:])
    if host.on_host(rows):
        return total.index_add_(0, places, wide).to(rows.dtype)
    return total.index_put_((places,), wide, accumulate=True).to(rows.dtype)  # which sorts; index_add_ has no order


def _in_places(rows: Tensor, order: Tensor) -> Tensor:
    if len(rows) == len(order):
        return torch.empty_like(rows).index_copy_(0, order, rows)
    return rows.new_zeros(len(order), *rows.shape[1:]).index_copy_(0, order[: len(rows)], rows)


def _padded_places(rows: Tensor, order: Tensor) -> Tensor:
    """The row of each place; zeros where that is behind all."""
    found = rows[order.clamp(max=len(rows) - 1)]
    return torch.where((order < len(rows)).view(-1, *(1 for _ in rows.shape[1:])), found, 0)


def _joined(rows: Tensor) -> Tensor:
    return rows.flatten(0, 1)


Runs = Sequence[Sequence[int]]  # lengths of runs of rows, in the order in which they lie


def _told(counts: Tensor, member: Member) -> list[Runs]:
    """What this rank sends to the experts of each rank, and what each rank sends to its own: rows, and tokens if they
    are counted."""
    table = counts.tolist()
    return [table[first : first + member.size] for first in range(0, len(table), member.size)]


def _sums(runs: Runs) -> tuple[int, ...]:
    return tuple(map(sum, runs))


def _regrouped(rows: Tensor, runs: Runs) -> Tensor:
    """The runs of each column, one column after the other."""
    columns = len(runs[0])
    if columns == 1:
        return rows
    parts = rows.split([count for row in runs for count in row])
    return torch.cat([part for column in range(columns) for part in parts[column::columns]])


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


def bound_of(route: fx.Node) -> int:
    """How many rows may go from a rank to another one by a route; 0 if that is not bounded."""
    return int(route.args[3]) if len(route.args) > 3 else 0  # type: ignore[arg-type]


def rows_of_experts(route: fx.Node, counts: Tensor) -> Tensor:
    """The counts of rows that a route gave, without what else it says, of tokens and of experts that do not exist."""
    if bound_of(route):
        return counts[:, :-3]
    return counts[: counts.shape[0] // 2] if len(route.args) > 4 else counts


def check_bound(route: fx.Node, counts: Tensor, place: int) -> None:
    """Raise BatchError if more rows went to another rank than a route has room for, or to an expert that does not
    exist. counts: what the route gave, on the host, to the rank at a place."""
    check_experts_exist(counts, int(route.args[2]))  # type: ignore[arg-type]
    rows = rows_of_experts(route, counts)
    sent = rows[: rows.shape[0] // 2].sum(1).tolist()
    most, mean, bound = max(sent), sum(sent) / len(sent), bound_of(route)
    if most > bound:
        raise BatchError(
            f"{most} rows go from part {place} of the batch to the experts of part {sent.index(most)} on axis "
            f"'{route.args[1]}', and there is room for {bound}: {mean:g} go to each on average. expert_rows="
            f"{math.ceil(100 * most / mean) / 100:g} would do for these, or leave it out where the host may read how "
            f"many there are."
        )
