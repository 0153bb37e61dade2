"""`x[mask] = value`, in all its spellings, is a choice by element: no rank needs the rows of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import compile as compiled
from autopar import verify


class Written(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(8, 6), nn.Linear(6, 4), body
        self.row = nn.Parameter(torch.linspace(0.5, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x)) * 1
        self.body(self, y)
        return self.down(y)


def nans(m: Any, y: Tensor) -> None:
    y[torch.isnan(y)] = 0


def elements(m: Any, y: Tensor) -> None:
    y[y > 0.1] = 1.5


def kept(m: Any, y: Tensor) -> None:
    y[~(y > 0.1)] = float("-inf")
    y[y == float("-inf")] = 0.25


def tuples(m: Any, y: Tensor) -> None:
    y[(y > 0.1,)] = 0


def dots(m: Any, y: Tensor) -> None:
    y[y > 0.1, ...] = 0


def rows(m: Any, y: Tensor) -> None:
    y[y[:, :, 0] > 0.1] = 0.5


def samples(m: Any, y: Tensor) -> None:
    y[y[:, 0, 0] > 0.1] = 0.5


def rows_by_colon(m: Any, y: Tensor) -> None:
    y[y[:, :, 0] > 0.1, :] = 0.5


def put(m: Any, y: Tensor) -> None:
    y.index_put_((y > 0.1,), torch.tensor(0.5, dtype=y.dtype))


def put_elsewhere(m: Any, y: Tensor) -> None:
    y.copy_(y.index_put((y[:, :, 0] > 0.1,), y.new_ones(1, 6)))


def of_a_row(m: Any, y: Tensor) -> None:
    y[y[:, :, 0] > 0.1] = m.row


def columns(m: Any, y: Tensor) -> None:
    y[:, :, m.row.detach() > 0.7] = 0.5


def columns_of_column(m: Any, y: Tensor) -> None:
    y[:, :, m.row.detach() > 0.7] = y.detach().mean((1, 2)).reshape(-1, 1, 1)


def columns_by_dots(m: Any, y: Tensor) -> None:
    y[..., m.row.detach() > 0.7] = 0


BODIES = [nans, elements, kept, tuples, dots, rows, samples, rows_by_colon, put, put_elsewhere, of_a_row, columns,
          columns_of_column, columns_by_dots]  # fmt: skip


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def data() -> Tensor:
    return torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("options", [{"mesh": "dp=3"}, {"mesh": "pp=2,dp=2", "microbatches": 2}], ids=str)
@pytest.mark.parametrize("body", BODIES)
def test_each_is_what_one_device_computes(body: Any, options: Any) -> None:
    torch.manual_seed(0)
    report = verify(Written(body), loss_fn=squares, batch=data(), **options)
    assert report.ok and report.max_error < 1e-10, str(report)


@pytest.mark.parametrize("body", BODIES)
def test_none_gathers_the_rows(body: Any) -> None:
    program = compiled(Written(body), "dp=3", loss_fn=squares, batch=data()).program
    names = {str(node.target) for node in program.calls()}
    assert not names & {"autopar.all_gather.default", "aten.index_put.default"}, names
