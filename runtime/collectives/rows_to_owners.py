"""Rows that go to the rank of their expert, and back: `route` once, then `dispatch` and `combine` as often as needed.

Rows leave in the order of their experts, which is that of the ranks, too, since each holds experts that follow each
other. So those that come from a rank are sorted as well, and whose they are follows from how many there are of each:
their indices are computed, not sent. The order is stable, the same in every run.
"""

from __future__ import annotations

import torch

from autopar.errors import BatchError
from autopar.ir.ops.ops import NO_EXPERT
from autopar.runtime.collectives.moves import Member, Move, Step

Tensor = torch.Tensor


def order_by_owner(index: Tensor) -> Tensor:
    """The places of rows, sorted by the expert of each; behind them those of rows without one."""
    return torch.argsort(index, stable=True)


def route(x: Tensor, member: Member, owned: bool, groups: int) -> Step:
    """Exchange how many rows go from each rank to each expert. x: the expert of each row.

    The result is on the host, the one read of a layer and step: [2 n, groups / n], first the rows that this rank sends
    to each expert of each rank, then those that each rank sends to this one's experts. Of an expert that does not exist
    the ranks learn together, so that no rank waits for one that has given up: raises BatchError on all of them.
    """
    exists = (x >= 0) & (x < groups)
    wrong = ~exists & (x != NO_EXPERT)
    counts = torch.zeros(groups + 1, dtype=torch.int64, device=x.device)
    counts = counts.index_add(0, torch.where(exists, x, groups), torch.ones_like(counts[:1]).expand(x.shape[0]))
    unknown = torch.cat([torch.where(wrong, x, 0), x.new_zeros(2)]).aminmax()  # of no rows, too
    said = torch.stack([wrong.sum(), unknown.min.to(torch.int64), unknown.max.to(torch.int64)])
    sent = torch.cat([counts[:-1].view(member.size, -1), said.expand(member.size, 3)], 1)
    return Move("exchange", sent, lambda received: _counted(torch.cat([sent, received]).cpu(), groups))


def _counted(table: Tensor, groups: int) -> Tensor:
    for place, (rows, low, high) in enumerate(table[table.shape[0] // 2 :, -3:].tolist()):
        if rows:
            raise BatchError(
                f"expert {low if low < 0 else high} is out of range: there are {groups}, so an index is 0 to "
                f"{groups - 1}, and {rows} of the rows that part {place} of the batch sends are of others. Correct the "
                f"router."
            )
    return table[:, :-3].contiguous()


def owned_index(index: Tensor, size: int, place: int, counts: Tensor) -> Tensor:
    """The experts of the rows that came to the rank at a place, in the order in which they lie."""
    here, came = counts.shape[1], counts[size:].reshape(-1)
    experts = torch.arange(place * here, (place + 1) * here, device=counts.device).repeat(size)
    return torch.repeat_interleave(experts, came, output_size=int(came.sum())).to(index)


def dispatch(x: Tensor, member: Member, owned: bool, order: Tensor, counts: Tensor) -> Step:
    """Send each row to the rank of its expert: those of this rank's come, by source and then by expert."""
    sent, received = _rows(counts, member)
    return Move("rows", x[order[: sum(sent)]], _as_it_is, sent=sent, received=received)


def combine(x: Tensor, member: Member, owned: bool, order: Tensor, counts: Tensor) -> Step:
    """Send each row back to where it came from, and to its place there. Those without an expert are zeros."""
    sent, received = _rows(counts, member)
    return Move("rows", x, lambda rows: _in_places(rows, order), sent=received, received=sent)


def _in_places(rows: Tensor, order: Tensor) -> Tensor:
    if len(rows) == len(order):
        return torch.empty_like(rows).index_copy_(0, order, rows)
    return rows.new_zeros(len(order), *rows.shape[1:]).index_copy_(0, order[: len(rows)], rows)


def _rows(counts: Tensor, member: Member) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rows = counts.sum(1).tolist()
    return tuple(rows[: member.size]), tuple(rows[member.size :])


def _as_it_is(rows: Tensor) -> Tensor:
    return rows
