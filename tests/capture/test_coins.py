"""`if torch.rand(1) > p`: where p lets no draw decide, and where each step is decided by its own draw."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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


# Coins that leave a layer out, others that decide what is computed, and integers.


def flipped(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h.flip(0) if torch.rand(1) < 0.5 else h * 2 + m.adapter(x)


def counted(m: Any, h: Tensor, x: Tensor) -> Tensor:
    for _ in range(int(torch.randint(1, 3, ()))):
        h = m.adapter(h)
    return h


def cropped(m: Any, h: Tensor, x: Tensor) -> Tensor:
    at = torch.randint(0, 3, (1,)).item()
    return h[:, at : at + 2] * 2


def drawn_at_once(m: Any, h: Tensor, x: Tensor) -> Tensor:
    keep = torch.rand(3)
    for i in range(3):
        if keep[i] < 0.5:
            h = h + F.dropout(m.adapter(h), 0.2)
    return F.dropout(h, 0.2)


def bernoulli(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if torch.bernoulli(torch.tensor(0.5)):
        h = h + m.adapter(x)
    return h if h.new_empty(1).bernoulli_(0.5).item() == 1.0 else h + m.adapter(h)


def returned(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if torch.rand(()) < 0.5:
        h = F.dropout(m.adapter(h), 0.3)
    if torch.rand(()).item() < 0.5:
        return h + F.dropout(m.adapter(x), 0.3) * torch.rand(())
    return F.dropout(h, 0.1)


def nested(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if torch.rand(()) < 0.7:
        h = h + m.linear(h)
        if torch.rand(()) < 0.5:
            h = F.dropout(h + m.adapter(x), 0.3)
    return F.dropout(h, 0.1)


def written_inside(m: Any, h: Tensor, x: Tensor) -> Tensor:
    h = h * 1
    if torch.rand(()) < 0.5:
        h += m.adapter(x)
    return h


def a_buffer_inside(m: Any, h: Tensor, x: Tensor) -> Tensor:
    if torch.rand(()) < 0.5:
        m.count += 1
        h = h + m.adapter(x)
    return h * (1 + m.count)


def asked_twice(m: Any, h: Tensor, x: Tensor) -> Tensor:
    coin = torch.rand(())
    skip = coin < 0.5
    if not skip:
        h = h + m.adapter(x)
    if skip:
        h = h * 3
    return h if coin >= 0.2 else h + 1


def as_long_as(m: Any, h: Tensor, x: Tensor) -> Tensor:
    while torch.rand(()) < 0.5:
        h = m.adapter(h)
    return h


def with_data(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.rand(()) < x.mean().abs() else h


def skips_over(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """What the third layer leaves out, if it does, is not what the second gave."""
    first = h if torch.rand(()) < 0.5 else F.dropout(m.adapter(h), 0.2)
    second = first if torch.rand(()) < 0.5 else m.linear(first)
    third = first if torch.rand(()) < 0.5 else m.adapter(first + second)
    return second + third


def with_a_guard(m: Any, h: Tensor, x: Tensor) -> Tensor:
    for _ in range(3):
        if torch.rand(()) < 0.5:
            continue
        h = m.adapter(h)
        if not torch.isfinite(h).all():
            h = torch.nan_to_num(h)
    return h


JOINED = [loha, at_least, negated, inverted, mirrored, as_a_number, of_a_part, filled, drawn_at_once, skips_over,
          with_a_guard]  # fmt: skip
ALONE = [flipped, counted, cropped, bernoulli, returned, nested, written_inside, a_buffer_inside, asked_twice,
         as_long_as, with_data]  # fmt: skip


@pytest.mark.parametrize("body", [*JOINED, *ALONE])
def test_what_random_numbers_decide_is_decided_in_each_step(body: Body) -> None:
    report = autopar.verify(made(body, p=0.4), "dp=2,tp=2", loss_fn=loss_fn, batch=(rows(),), steps=6)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize("body", JOINED)
def test_calls_that_are_left_out_are_one_program(body: Body) -> None:
    found = autopar.compile(made(body, p=0.4), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert any(
        note.startswith(f"{__file__}:") and "a random number decides whether calls are left out" in note
        for note in found.notes
    )
    assert not any("there is one for each way" in note for note in found.notes)


class Stack(nn.Module):
    """Layers with dropout, each left out by chance; the second half reads what the first gave, as a decoder does."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.cross = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                continue
            memory = memory + F.dropout(layer(memory), 0.1)
        h = x * 2
        for layer in self.cross:
            if torch.rand([]) >= 0.5:
                h = F.dropout(layer(h), 0.2) + memory
        return F.dropout(h, 0.1)


@pytest.mark.parametrize("options", [{"mesh": "pp=2", "microbatches": 2}, {"mesh": "dp=3", "dtype": torch.float32}])
def test_layers_that_are_left_out(options: dict[str, Any]) -> None:
    """With weights that a step does not use: AdamW leaves them alone, as it does on one device."""
    torch.manual_seed(1)
    mesh = options.pop("mesh")
    report = autopar.verify(Stack(), mesh, loss_fn=loss_fn, batch=(rows(),), steps=5, **options)
    assert report.ok, report


def test_a_step_leaves_parameters_without_a_gradient() -> None:
    torch.manual_seed(1)
    parallel = autopar.parallelize(Stack(), "dp=1", loss_fn=loss_fn, seed=3)
    seen: set[tuple[bool, ...]] = set()
    for _ in range(6):
        parallel.zero_grad()
        parallel.forward_backward(rows())
        seen.add(tuple(parameter.grad is None for parameter in parallel.parameters()))
    assert len(seen) > 3 and len(parallel.programs) == 1
    assert all(any(flags) for flags in seen)


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
    assert autopar.verify(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),), steps=4).ok


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


DRAWN = [written, written_by_a_view, written_by_an_alias, shifted, rounded, wider, normal, many, computed_with,
         by_weight, by_written_buffer]  # fmt: skip


def float_of_another_range(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """As torchvision's ColorJitter, with a float of a normal one behind `.item()`."""
    k = float(torch.empty(1).uniform_(0.8, 1.2))
    return (h * k).clamp(max=1) * (1 - k) * math.exp(torch.randn(1).item())


def float_of_constants(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """As torchvision's RandomResizedCrop, whose bounds are a tensor."""
    low, high = torch.log(torch.tensor((0.75, 1.25)))
    return h * math.sqrt(torch.exp(torch.empty(1).uniform_(low, high)).item()) * float(torch.rand(1) * high)


def float_of_an_initialiser(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * float(nn.init.uniform_(torch.empty(1))) if nn.init.normal_(torch.empty(1)) < 0.3 else h


def quotients(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """As the sides of torchvision's RandomResizedCrop, and other arithmetic that is Python's alone."""
    one, other = torch.empty(1).uniform_(0.5, 1.5).item(), torch.rand(1).item()
    sides = round(math.sqrt(9 * one * (1 + other))) + round(math.sqrt(9 * one / (1 + other)))
    return h * (other / one + one**other + (9 * one) % 1 + 9 * other // 1) + sides * torch.randint(9, (1,)).item() % 4


def number_of_both(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """What data and random numbers decide, data do."""
    scale = torch.rand(1).item() * x.abs().max().item()
    return h * 2 if scale > 1.0 else h


def coin_of_the_host(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.rand(1) * random.random() > 0.25 else h


def coin_of_a_float(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.rand(1) > float(torch.rand(1)) else h


def number_of_the_host(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * (torch.rand(1).item() * random.random())


def padded(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """An integer in a list, as torchvision's crop pads."""
    left = torch.randint(0, 3, size=(1,)).item()
    return F.pad(h, [left, 2 - left])[..., 1:-1]


def float_beside_coins(m: Any, h: Tensor, x: Tensor) -> Tensor:
    k = float(torch.rand(1))
    if torch.rand(1) < 0.5:
        h = h + F.dropout(m.adapter(x), 0.1)
    return h * k if torch.rand(1) < 0.5 else h * float(torch.randn(()))


def order(m: Any, h: Tensor, x: Tensor) -> Tensor:
    """Which coins there are hangs on other coins."""
    for turn in torch.randperm(3):
        if turn == 0:
            h = h * 2
        elif turn == 1:
            h = m.adapter(h)
        else:
            h = h + float(torch.rand(1))
    return h


def integer_of_a_float(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * int(torch.rand(1) * 3)


FLOATS = [float_by_chance, float_in_between, two_floats, float_computed_with, float_of_another_range,
          float_of_constants, float_of_an_initialiser, quotients, number_of_both, coin_of_the_host, coin_of_a_float,
          number_of_the_host, padded, float_beside_coins, order, integer_of_a_float]  # fmt: skip


NO_BRANCH = (computed_with, float_computed_with, float_of_another_range, float_of_constants, quotients,
             number_of_the_host)  # fmt: skip


@pytest.mark.parametrize("body", [*DRAWN, *FLOATS])
def test_what_each_step_has_anew(body: Body) -> None:
    """Two steps have other numbers; four go both ways of a branch. Where each step has a program, two do."""
    steps = 2 if body in (*NO_BRANCH, order, float_beside_coins) else 4
    report = autopar.verify(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),), steps=steps)
    assert report.ok and report.max_error < 1e-10, report


def tensor_of_the_host(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if torch.rand(1) > torch.tensor(random.random()) else h


def float_of_floats(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * math.sqrt(torch.rand(1).item() * math.exp(torch.rand(1).item()))


@pytest.mark.parametrize("body", [tensor_of_the_host, float_of_floats])
def test_what_tensors_and_the_host_decide_together_is_refused(body: Body) -> None:
    with pytest.raises(CaptureError, match=r"test_coins\.py:\d+: random tensors and numbers that Python computes with"):
        autopar.verify(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),), steps=4)


def test_a_float_that_each_step_has_anew_is_an_input_of_one_program() -> None:
    model = autopar.parallelize(made(float_of_another_range), "dp=1", loss_fn=loss_fn)
    found = {float(model.forward_backward(rows()).detach()) for _ in range(4)}
    assert len(found) == 4 and len(model.programs) == 1
    assert any("random tensors, as floats" in note for note in model.programs[-1].compiled.notes)


def by_batch(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if x.sum() > 0 else h


def by_buffer(m: Any, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if (m.sigma > 0).all() else h


@pytest.mark.parametrize("body", [by_batch, by_buffer])
@pytest.mark.parametrize("specialize", [False, True])
def test_the_truth_of_data(body: Body, specialize: bool) -> None:
    report = autopar.verify(made(body), "dp=2", loss_fn=loss_fn, batch=(rows(),), specialize=specialize)
    assert report.ok and report.max_error < 1e-10, report


def test_without_data_the_truth_is_a_guess() -> None:
    batch = (torch.empty(12, 5, 8, device="meta"),)
    notes = autopar.compile(made(by_batch), "dp=2", loss_fn=loss_fn, batch=batch).notes
    assert any(note.startswith("bool() of a tensor at") and "is taken as False" in note for note in notes)
