"""Rows that a model adds up by index: numbers as torch counts them, and an index beyond the table is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError

ROWS = 5


def added(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(ROWS, 4, dtype=x.dtype).index_add(0, index, x)


def put(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(ROWS, 4, dtype=x.dtype).index_put((index,), x, accumulate=True)


def put_from_the_end(x: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(ROWS, 4, dtype=x.dtype).index_put((index - 2,), x, accumulate=True)


def counted(x: Tensor, index: Tensor) -> Tensor:
    return torch.bincount(index, minlength=ROWS).to(x.dtype)[:, None] * x.mean(0)


def weighted(x: Tensor, index: Tensor) -> Tensor:
    return index.bincount(x[:, 0].detach(), ROWS).to(x.dtype)[:, None] * x.mean(0)


BODIES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (added, put, put_from_the_end, counted, weighted)


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.body = nn.Linear(6, 4), body

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        rows = self.body(self.linear(x), index)
        return (rows.tanh() * torch.arange(1, ROWS + 1, dtype=x.dtype)[:, None]).sum()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 6), torch.randint(ROWS, (12,))


@pytest.mark.parametrize("mesh", ["dp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("body", BODIES)
def test_they_are_those_of_one_device(body: Callable[[Tensor, Tensor], Tensor], mesh: str) -> None:
    report = autopar.verify(Model(body), mesh, loss_fn=lambda model, *given: model(*given), batch=batch())
    assert report.ok, report


@pytest.mark.parametrize("body", BODIES)
def test_an_index_beyond_the_table_is_an_error(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = autopar.parallelize(Model(body), "dp=1", loss_fn=lambda model, *given: model(*given))
    x, index = batch()
    model.forward_backward(x, index)
    for wrong in (ROWS + 2, -ROWS - 1):
        with pytest.raises(BatchError, match=rf"is out of range: the table has {ROWS} entries[^%]*In %checked_index"):
            model.forward_backward(x, torch.cat([index[1:], torch.tensor([wrong])]))
