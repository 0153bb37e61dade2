"""`if torch.rand(1) > p` where p lets no draw decide; and where `specialize=True` is offered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.errors import CaptureError

Body = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body, p: float = 0.0) -> None:
        super().__init__()
        self.body, self.p = body, p
        self.linear, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("sigma", torch.ones(2))
        self.register_buffer("count", torch.zeros(()))
        self.rates = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x), x)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(body: Body, p: float = 0.0) -> Net:
    torch.manual_seed(1)
    return Net(body, p)


def rows() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(12, 5, 8)


def loha(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """peft's LoHa and LoKr."""
    if (not m.training) or (m.training and torch.rand(1) > m.p):
        h = h + m.adapter(x)
    return h


def at_least(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if torch.rand([]) >= m.p else h


def as_a_float(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if float(torch.rand(1)) > m.p else h


def floats_within(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if 0.0 <= float(torch.rand(())) < 1.0 - m.p else h


def negated(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if not torch.rand(1) < m.p else h


def inverted(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if ~(torch.rand(1) <= m.p) else h


def mirrored(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if m.p < torch.rand(()) else h


def as_a_number(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h if torch.rand(1).item() < m.p else h + m.adapter(x)


def of_a_table(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if torch.rand(1) > m.rates[1] else h


def of_a_part(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if torch.rand(3, device=x.device)[0].to(x.device) > m.p else h


def filled(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h + m.adapter(x) if torch.empty(1).uniform_(0, 1) > m.p else h


SURE = [
    loha,
    as_a_float,
    floats_within,
    at_least,
    negated,
    inverted,
    mirrored,
    as_a_number,
    of_a_table,
    of_a_part,
    filled,
]


@pytest.mark.parametrize("body", SURE)
def test_a_layer_that_is_never_dropped_is_no_branch(body: Body) -> None:
    verified(made(body), ["dp=2,tp=2", "dp=3"], loss_fn, (rows(),))
    found = autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert 'gradient "adapter.weight"' in found.text() and "random" not in found.text()


def test_a_layer_that_is_always_dropped_is_no_branch() -> None:
    for body in (loha, at_least, negated, as_a_number):
        found = autopar.compile(made(body, p=1.0), "dp=2", loss_fn=loss_fn, batch=(rows(),))
        assert 'gradient "adapter.weight"' not in found.text()


@pytest.mark.parametrize(
    "body", [loha, as_a_float, at_least, negated, inverted, mirrored, as_a_number, of_a_part, filled]
)
def test_a_layer_that_may_be_dropped_is_refused_and_nothing_is_offered(body: Body) -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.compile(made(body, p=0.1), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    text = str(caught.value)
    assert f"{__file__}:{body.__code__.co_firstlineno}" in text.replace(
        f":{body.__code__.co_firstlineno + 1}", f":{body.__code__.co_firstlineno}"
    ).replace(f":{body.__code__.co_firstlineno + 2}", f":{body.__code__.co_firstlineno}")
    assert "torch.where" in text and "specialize" not in text


def written_in_part(m: Any, h: Tensor, x: Tensor) -> Tensor:
    draw = torch.rand(2)
    draw[:1].sub_(0.5)
    return h + m.adapter(x) if draw[0] >= m.p else h


def written_uncounted(m: Any, h: Tensor, x: Tensor) -> Tensor:
    with torch.inference_mode():
        draw = torch.rand(1)
        draw -= 0.5
    return h + m.adapter(x) if draw >= m.p else h


@pytest.mark.parametrize("body", [written_in_part, written_uncounted])
def test_a_draw_that_is_written_into_decides(body: Body) -> None:
    with pytest.raises(CaptureError, match=r"torch\.where"):
        autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))


def test_what_hands_draws_on_may_be_called_by_keywords() -> None:
    def body(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return torch.squeeze(input=torch.reshape(input=h, shape=(-1, 8, 1)), dim=2)

    verified(made(body), ["dp=2"], loss_fn, (rows(),))


def test_masks_of_whole_tensors() -> None:
    """That one of many elements is 0 itself is no rarity; that one is 1 never happens."""

    def kept(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return h * (torch.rand(h.shape) < 1.0) * (torch.rand(h.shape) >= 0.0)

    def drawn(m: Any, h: Tensor, x: Tensor) -> Tensor:
        return h * (torch.rand(h.shape) > 0.0)

    assert "random" not in autopar.compile(made(kept), "dp=2", loss_fn=loss_fn, batch=(rows(),)).text()
    assert "random" in autopar.compile(made(drawn), "dp=2", loss_fn=loss_fn, batch=(rows(),)).text()


# -- what is a uniform draw no more ---------------------------------------------------------------------------------


def written(m: Any, h: Tensor, x: Tensor) -> Tensor:
    coin = torch.rand(())
    coin.sub_(1)
    return h * 2 if coin < 0 else h


def written_by_a_view(m: Any, h: Tensor, x: Tensor) -> Tensor:
    coin = torch.rand(3)
    coin[0].sub_(1)
    return h * 2 if coin[0] < 0 else h


def written_by_an_alias(m: Any, h: Tensor, x: Tensor) -> Tensor:
    coin = torch.rand(1)
    coin.data.sub_(1)
    return h * 2 if coin < 0 else h


def shifted(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.rand(()) - 1 < 0 else h


def rounded(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.rand(1).to(torch.bfloat16) < 1 else h


def wider(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.empty(1).uniform_(0, 2) < 1 else h


def normal(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.randn(1) > 0 else h


def many(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if (torch.rand(9) > 0).all() else h


def computed_with(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.rand(1).item()


def float_by_chance(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if float(torch.rand(1)) > 0.001 else h


def float_in_between(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if 0.55 < float(torch.rand(1)) < 0.7 else h


def two_floats(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if float(torch.rand(1)) > float(torch.rand(1)) else h


def float_computed_with(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * float(torch.rand(1))


def by_weight(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if (m.linear.weight > 0).any() else h


def by_written_buffer(m: Any, h: Tensor, x: Tensor) -> Tensor:
    m.count += 1
    return h * 2 if m.count > 0 else h


REFUSED = [written, written_by_a_view, written_by_an_alias, shifted, rounded, wider, normal, many, computed_with,
           float_by_chance, float_in_between, two_floats, float_computed_with, by_weight,
           by_written_buffer]  # fmt: skip


@pytest.mark.parametrize("body", REFUSED)
def test_what_each_step_has_anew_is_refused_and_nothing_is_offered(body: Body) -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    lines = range(body.__code__.co_firstlineno, body.__code__.co_firstlineno + 5)
    assert any(f"{__file__}:{line}\n" in str(caught.value) for line in lines)
    assert "specialize" not in str(caught.value)


def by_batch(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if x.sum() > 0 else h


def by_buffer(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if (m.sigma > 0).all() else h


@pytest.mark.parametrize("body", [by_batch, by_buffer])
def test_where_it_is_offered_it_is_taken(body: Body) -> None:
    with pytest.raises(CaptureError, match="Or specialize=True takes the value"):
        autopar.compile(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    report = autopar.verify(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),), specialize=True)
    assert report.ok and report.max_error < 1e-10, report


def test_without_data_nothing_is_offered() -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.compile(made(by_batch), "dp=2", loss_fn=loss_fn, batch=(torch.empty(12, 5, 8, device="meta"),))
    assert "an `if`" in str(caught.value) or "a conditional expression" in str(caught.value)
    assert "specialize" not in str(caught.value)
