"""Mixtures of experts as people write them: rows sorted by expert, grouped products, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS, CHOSEN, ROWS = 12, 24, 4, 2, 6


class Experts(nn.Module):
    """Each token goes to two of four experts; a residual and a head around it. `way`: how the rows are sorted."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.2)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        rows = x.reshape(-1, WIDTH)
        weights, experts = torch.topk(self.gate(rows).softmax(-1), CHOSEN)
        mixed = getattr(self, f"_{self.way}")(rows, weights.reshape(-1), experts.reshape(-1))
        out: Tensor = self.head(x + mixed.view_as(x))
        return out

    def _sort(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The way back by the inverse of the order."""
        sorted_experts, order = torch.sort(experts)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        y = self._products(rows[order // CHOSEN], sorted_experts, counts) * weights[order].unsqueeze(-1)
        return self._back(y, order)

    def _argsort(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The counts of the rows as they stand; the way back by writing to their places."""
        counts = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS)
        order = torch.argsort(experts, stable=True)
        y = self._products(rows[order // CHOSEN], experts[order], counts) * weights[order, None]
        back = torch.zeros_like(y)
        back[order] = y
        return back.view(-1, CHOSEN, WIDTH).sum(1)

    def _added(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The way back by adding to the tokens, of which JetMoE says so which they are."""
        order = torch.argsort(experts, stable=True)
        counts = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS)
        token = order.div(CHOSEN, rounding_mode="trunc")
        y = self._products(rows[token], experts[order], counts) * weights[order, None]
        return torch.zeros_like(rows).index_put([token], y, accumulate=True)

    def _sorted(self, rows: Tensor, experts: Tensor, order: Tensor) -> Tensor:
        counts = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS)
        return self._products(rows[order // CHOSEN], experts[order], counts)

    def _summed(self, y: Tensor, weights: Tensor) -> Tensor:
        """Rows in their own order, weighted and summed by token."""
        return (y * weights[:, None]).view(-1, CHOSEN, WIDTH).sum(1)

    def _inverted(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The inverse is the order of the order."""
        order = torch.argsort(experts)
        return self._summed(self._sorted(rows, experts, order)[torch.argsort(order)], weights)

    def _resorted(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Sorted once more, with a range that is used: the places, sorted; and the inverse, inverted."""
        _, order = torch.sort(experts, stable=True)
        places, inverse = order.sort()
        y = self._sorted(rows, experts, inverse.argsort())[inverse]
        return self._summed(y * (1 + places + order[inverse] + inverse[order])[:, None] / 50, weights)

    def _ranked(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The smallest n of n are a sort; the inverse by scatter, the counts by adding."""
        _, order = torch.topk(experts, len(experts), largest=False)
        counts = torch.zeros(EXPERTS, dtype=torch.long).index_add(0, experts, torch.ones_like(experts))
        inverse = torch.empty_like(order).scatter_(-1, order, torch.arange(len(order)))
        return self._summed(self._products(rows[order // CHOSEN], experts[order], counts)[inverse], weights)

    def _gathered(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """By gather and scatter along a repeated index; the counts of what is hit."""
        order = torch.argsort(experts, stable=True)
        counts = F.one_hot(experts, EXPERTS).sum(0)
        wide = order.unsqueeze(1).expand(-1, WIDTH)
        twice = rows.repeat_interleave(CHOSEN, 0).gather(0, wide)
        y = self._products(twice, experts[order], counts)
        return self._summed(torch.zeros_like(y).scatter(0, wide, y), weights)

    def _scattered(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The way back by adding along a repeated index."""
        order = torch.argsort(experts, stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(0, experts, torch.ones_like(experts))
        token = torch.div(order, CHOSEN, rounding_mode="floor")
        y = self._products(rows[token], experts[order], counts) * weights[order, None]
        return torch.zeros_like(rows).scatter_add(0, token[:, None].expand(-1, WIDTH), y)

    def _copied(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """By index_select and index_copy, and back to the order and from it once more."""
        order = torch.argsort(experts, stable=True)
        y = self._sorted(rows, experts, order)
        own = torch.zeros_like(y).index_copy(0, order, y)
        again = own.index_select(0, order) * weights.index_select(0, order)[:, None]
        return torch.zeros_like(rows).index_add(0, order // CHOSEN, again)

    def _half(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: only the smallest half is there."""
        _, order = torch.topk(experts, len(experts) // 2, largest=False)
        return rows + self.bias.sum() * order.sum() * 1e-3

    def _flipped(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: its inverse is sorted downwards."""
        order = torch.argsort(experts, stable=True)
        return self._summed(self._sorted(rows, experts, order)[torch.argsort(order, descending=True)], weights)

    def _weighed(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: its places are numbers that count."""
        order = torch.argsort(experts, stable=True)
        y = self._sorted(rows, experts, order) * (1 + order)[:, None]
        return self._summed(y[torch.argsort(order)] / (1 + torch.argsort(order))[:, None], weights)

    def _column(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: a gather along the other dim."""
        order = torch.argsort(experts, stable=True)
        y = self._sorted(rows, experts, order)
        return self._summed(y.gather(1, (order % WIDTH)[:, None].expand(-1, WIDTH)), weights)

    def _running(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: a sum over the sorted rows so far."""
        sorted_experts, order = torch.sort(experts, stable=True)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        y = self._products(rows[order // CHOSEN], sorted_experts, counts).cumsum(0)
        return self._back(y, order)

    def _dropped(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """What dropout keeps depends on where a row stands, which it can be told."""
        sorted_experts, order = torch.sort(experts, stable=True)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        y = F.dropout(self._products(rows[order // CHOSEN], sorted_experts, counts), 0.3)
        return self._back(y, order)

    def _first(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: only the first half of the sorted rows counts."""
        sorted_experts, order = torch.sort(experts, stable=True)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        y = self._products(rows[order // CHOSEN], sorted_experts, counts)
        return y[: y.shape[0] // 2].sum(0).expand(rows.shape)

    def _compared(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: sorted rows meet rows that are not."""
        sorted_experts, order = torch.sort(experts, stable=True)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        y = self._products(rows[order // CHOSEN], sorted_experts, counts)
        y = y * weights.unsqueeze(-1)
        return self._back(y, order)

    def _counts(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """No ends, but counts: rows go to other experts than their own."""
        sorted_experts, order = torch.sort(experts, stable=True)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        counts = counts.to(torch.int32)
        return self._back(F.grouped_mm(rows[order // CHOSEN], self.up @ self.down, offs=counts), order)

    def _descending(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The other way round: rows go to other experts than their own."""
        sorted_experts, order = torch.sort(experts, descending=True)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        return self._back(self._products(rows[order // CHOSEN], sorted_experts, counts), order)

    def _back(self, y: Tensor, order: Tensor) -> Tensor:
        """Sorted rows in their own order again, summed by token."""
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        return y[inverse].view(-1, CHOSEN, WIDTH).sum(1)

    def _products(self, rows: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.grouped_mm(rows, self.up, offs=ends) + self.bias[experts]
        return F.grouped_mm(F.silu(hidden), self.down, offs=ends)


UNSEEN = ("sort", "argsort", "added")
PERMUTED = ("inverted", "resorted", "ranked", "gathered", "scattered", "copied")
SEEN = ("half", "flipped", "weighed", "column", "running", "first", "compared", "descending")


def experts_case(way: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and an asymmetric batch."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, 8, WIDTH) * torch.linspace(0.2, 2, ROWS).view(-1, 1, 1)
    return Experts(way), (x, torch.randn(ROWS, 8, 5))
