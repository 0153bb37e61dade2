"""Tensors kept in objects, lists, dicts and globals, and calls that pass one on as it is: `x.to(x.device)`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from verified import verified

import autopar
from autopar.errors import CaptureError


class Scheduler:
    """diffusers': no module, whose table is moved where the samples are."""

    def __init__(self) -> None:
        self.alphas_cumprod = torch.linspace(1, 0.1, 10, dtype=torch.float64)

    def add_noise(self, x: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        self.alphas_cumprod = self.alphas_cumprod.to(device=x.device)
        alphas = self.alphas_cumprod.to(dtype=x.dtype)
        steps = steps.to(x.device)
        kept, added = alphas[steps] ** 0.5, (1 - alphas[steps]) ** 0.5
        return x * kept.flatten()[:, None, None] + noise * added.flatten()[:, None, None]


SCHEDULER = Scheduler()
TABLES = [torch.arange(8.0).double(), torch.ones(8).double()]
NAMED = {"scale": torch.ones(8).double() * 2}
GLOBAL = torch.linspace(0, 1, 8).double()
Body = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x), x)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(body: Body) -> Net:
    torch.manual_seed(1)
    return Net(body).double()


def rows() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(12, 5, 8).double()


def diffuses(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return SCHEDULER.add_noise(h, x, torch.arange(len(h)) % 10)


def in_lists(m: Any, h: Tensor, x: Tensor) -> Tensor:
    for i, table in enumerate(TABLES):
        TABLES[i] = table.to(h.device).contiguous()
        h = h * TABLES[i].to(h.dtype)
    NAMED["scale"] = NAMED["scale"].to(x.device)
    return h * NAMED["scale"]


def in_globals(m: Any, h: Tensor, x: Tensor) -> Tensor:
    global GLOBAL
    GLOBAL = GLOBAL.to(x.device)
    return h * GLOBAL


def chained(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * GLOBAL.cpu().double().contiguous().view(8).type_as(h)


def wrapped(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * Variable(GLOBAL) + Variable(h.detach()) + Variable(x, requires_grad=False)
    return h + torch.Tensor(x) * torch.Tensor(GLOBAL) + Variable(torch.ones(8).double())


def made_of_numbers(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * torch.from_numpy(np.hanning(8)).to(h) + torch.as_tensor(np.ones(8)).to(h)
    return h + torch.FloatTensor([1.0] * 8) + torch.Tensor([2.0, 3.0, 4.0, 5.0]).repeat(2)


BODIES = [diffuses, in_lists, in_globals, chained, wrapped, made_of_numbers]


@pytest.mark.parametrize("body", BODIES)
def test_what_is_passed_on_as_it_is_is_the_same(body: Body) -> None:
    verified(made(body), ["dp=2,tp=2", "dp=3"], loss_fn, (rows(),))
    kept = [SCHEDULER.alphas_cumprod, *TABLES, *NAMED.values(), GLOBAL]
    assert all(type(tensor) is Tensor for tensor in kept)  # no stand-in of the capture is left in them


@pytest.mark.parametrize("body", [diffuses, wrapped])
def test_with_microbatches(body: Body) -> None:
    verified(made(body), ["dp=2", "pp=2"], loss_fn, (rows(),), microbatches=2)


def test_a_table_that_is_replaced_is_read_anew() -> None:
    plain = made(diffuses)
    parallel = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    before = SCHEDULER.alphas_cumprod
    try:
        for factor in (1.0, 0.5, 0.25):
            SCHEDULER.alphas_cumprod = before * factor
            torch.testing.assert_close(parallel.forward_backward(rows()), loss_fn(plain, rows()).detach())
    finally:
        SCHEDULER.alphas_cumprod = before


# -- what changes all the same --------------------------------------------------------------------------------------


def adds(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.history = getattr(m, "history", GLOBAL).to(h.device) + 1
    return h * m.history


def adds_in_a_list(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.held = getattr(m, "held", None) or [torch.zeros(8).double()]
    m.held[0] = m.held[0].to(h.device) + 1
    return h * m.held[0]


def adds_in_place(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.held = getattr(m, "held", None) or [torch.zeros(8).double()]
    m.held[0] += 1
    return h * m.held[0]


def rectifies_in_place(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """An in-place option: the result is the operand, and another one."""
    m.held = getattr(m, "held", None) or [torch.ones(8).double()]
    torch.nn.functional.elu(m.held[0].mul_(-1), inplace=True)
    return h * m.held[0]


def keeps_the_batch(m: Any, h: Tensor, x: Tensor) -> Tensor:
    before = getattr(m, "before", x).to(h.device)
    m.before = torch.Tensor(h.detach())
    return h * before


def adds_and_wraps(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.history = Variable(torch.Tensor(getattr(m, "history", GLOBAL) + 1))
    return h * m.history


def adds_into_new_memory(m: Any, h: Tensor, x: Tensor) -> Tensor:
    row = torch.empty(8, dtype=h.dtype)
    row.copy_(getattr(m, "history", GLOBAL) + 1)
    m.history = row
    return h * m.history


def keeps_the_first(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Each run computes the same, and the second takes what the first has made of its batch. Red before: a compiled
    step took that of its own."""
    m.kept = getattr(m, "kept", {})
    return h * m.kept.setdefault("scale", x.detach().mean(0) + 1)


def keeps_the_first_of_a_weight(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.kept = getattr(m, "kept", {})
    return h * m.kept.setdefault("scale", next(m.parameters()).detach().sum().exp()).view(1)


@pytest.mark.parametrize(
    "body",
    [adds, adds_in_a_list, adds_in_place, rectifies_in_place, keeps_the_batch, adds_and_wraps, adds_into_new_memory,
     keeps_the_first, keeps_the_first_of_a_weight],
)  # fmt: skip
def test_what_changes_from_step_to_step_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match="a second step would not be the same as the first") as caught:
        autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert f"{__file__}:" in str(caught.value)
