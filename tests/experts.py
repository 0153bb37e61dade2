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
        """The way back by adding to the tokens."""
        order = torch.argsort(experts, stable=True)
        counts = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS)
        token = order // CHOSEN
        y = self._products(rows[token], experts[order], counts) * weights[order, None]
        return torch.zeros_like(rows).index_put([token], y, accumulate=True)

    def _running(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: a sum over the sorted rows so far."""
        sorted_experts, order = torch.sort(experts, stable=True)
        counts = torch.histc(sorted_experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        y = self._products(rows[order // CHOSEN], sorted_experts, counts).cumsum(0)
        return self._back(y, order)

    def _dropped(self, rows: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """The order shows: what dropout keeps depends on where a row stands."""
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
SEEN = ("running", "dropped", "first", "compared", "descending")


def experts_case(way: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and an asymmetric batch."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, 8, WIDTH) * torch.linspace(0.2, 2, ROWS).view(-1, 1, 1)
    return Experts(way), (x, torch.randn(ROWS, 8, 5))
