"""Numbers that a model takes out of tensors and computes with, or looks rows up by."""

from __future__ import annotations

import copy
import math
import operator
import re
from typing import Any

import numpy as np
import pytest
import torch
from shares import share
from torch import Tensor, nn

from autopar import parallelize, verify
from autopar.errors import CaptureError


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Item(nn.Module):
    """torchlibrosa: decibels end 80 below the largest."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.inner, self.use = nn.Linear(8, 8), use

    def forward(self, x: Tensor) -> Any:
        return self.use(self, self.inner(x), x)


KEPT: list[Any] = []
ITEMS: dict[str, Any] = {
    "decibels": lambda m, y, x: torch.clamp(y, min=y.max().item() - 0.8, max=np.inf),
    "a bound above": lambda m, y, x: torch.clip(y, -1, max=y.mean().item()),
    "two bounds": lambda m, y, x: y.clamp(y.min().item() / 2, y.max().item() / 2),
    "a factor": lambda m, y, x: y * x.mean().item() + (x > 0).sum().item(),
    "a count": lambda m, y, x: y / (x > 0).sum().item(),
    "arithmetic": lambda m, y, x: (2 * y.std().item() + 1) ** 2 - y + abs(-y[0, 0].item()),
    "chosen": lambda m, y, x: torch.where(y > 0, y, y[0, 1].item()).masked_fill(x > 1, y[2, 3].item()),
    "compared": lambda m, y, x: y * (y > y.mean().item()),
}


@pytest.mark.parametrize(
    ("name", "mesh", "options"), list(share(2, ITEMS, ["dp=2,tp=2", "dp=3"], [{}, {"specialize": True}])), ids=str
)
def test_item_stays_a_tensor(name: str, mesh: str, options: Any) -> None:
    torch.manual_seed(0)
    report = verify(Item(ITEMS[name]), mesh, loss_fn=squares, batch=torch.randn(12, 8), **options)
    assert report.ok and report.max_error < 1e-10, str(report)


@pytest.mark.parametrize("specialize", [False, True])
def test_a_list_of_a_whole_activation_is_refused(specialize: bool) -> None:
    """At once: each of its numbers would be an op, and a trace of hours."""
    model = Item(lambda m, y, x: y * sum(map(sum, y.tolist())))
    with pytest.raises(CaptureError, match=r"\.tolist\(\).* It is of 4,104 numbers, of which 4,096 are taken\."):
        verify(model, "dp=1", loss_fn=squares, batch=torch.randn(513, 8), specialize=specialize)


def test_an_item_is_another_number_in_each_step() -> None:
    torch.manual_seed(0)
    plain = Item(ITEMS["decibels"])
    parallel = parallelize(copy.deepcopy(plain), "dp=1", loss_fn=squares)
    for x in torch.randn(3, 12, 8):
        torch.testing.assert_close(parallel.forward_backward(x), squares(plain, x))
    assert len(parallel.programs) == 1


class Read(nn.Module):
    """Reads numbers of tensors that it writes into before it computes with the numbers."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.inner, self.use = nn.Linear(8, 8), use
        self.register_buffer("count", torch.ones((), dtype=torch.int64))
        self.register_buffer("wide", torch.arange(1.0, 4.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return self.use(self, self.inner(x), x)


def counted(m: Any, y: Tensor, x: Tensor) -> Tensor:
    n = m.count.item()
    m.count += 1
    return y / n + y.square() / (1 - 0.9**n)


def through_data(m: Any, y: Tensor, x: Tensor) -> Tensor:
    n, part = m.count.item(), m.wide[1:].max().item() + m.wide.view(-1)[0].item()
    m.count.data.add_(2)
    m.wide[:] = 0
    return y * n + y.square() * part


def listed(m: Any, y: Tensor, x: Tensor) -> Tensor:
    first, _, last = m.wide.tolist()
    m.wide.mul_(2)
    return y * first + y.square() * last


def of_the_batch(m: Any, y: Tensor, x: Tensor) -> Tensor:
    size = x.double().abs().sum()
    n = size.item()
    size.zero_().add_(1)
    return y.square() / n + size


def drawn(m: Any, y: Tensor, x: Tensor) -> Tensor:
    draw = torch.rand((), dtype=torch.float64)
    n = draw.item()
    draw.add_(3)
    return y * n + y.square() * draw


def decided(m: Any, y: Tensor, x: Tensor) -> Tensor:
    n = m.count.item()
    m.count += 1
    return y * 2 if n > 2 else y


def summed(m: Any, y: Tensor, x: Tensor) -> Tensor:
    counts = torch.bincount((x[:, 0] > 0).long() + (x[:, 1] > 0).long(), minlength=3)
    a, b, c = counts.tolist()
    some, last = a + b, 0 + c
    counts.zero_()
    return y * some + y.square() * last


def summed_by_numpy(m: Any, y: Tensor, x: Tensor) -> Tensor:
    counts = torch.bincount((x[:, 0] > 0).long() + (x[:, 1] > 0).long(), minlength=3)
    listed = counts.cpu().numpy()
    some = listed[0] + listed[2]
    counts.add_(1)
    return y * some


@pytest.mark.parametrize(
    "use",
    [counted, through_data, listed, of_the_batch, drawn, decided, summed, summed_by_numpy],
    ids=lambda one: one.__name__,
)
def test_a_number_is_that_of_the_moment_when_it_was_read(use: Any) -> None:
    torch.manual_seed(0)
    report = verify(Read(use), "dp=2", loss_fn=squares, batch=torch.randn(12, 8), steps=3)
    assert report.ok and report.max_error < 1e-10, str(report)


def quotients(m: Any, y: Tensor, x: Tensor) -> Tensor:
    up, down, mean = (y > 0).sum().item(), (x > -9).sum().item(), y.mean().item()
    return y * (up / down) + y.square() * (up % down) + y.sin() / (1 + mean / (down - 0.5)) + down // max(up, 1)


def rounded(m: Any, y: Tensor, x: Tensor) -> Tensor:
    high, half = y.max().item() * 3, (x > 0).sum().item() / 2
    return y * round(half) + y.square() * math.floor(high) - math.ceil(high) * y.sin() + math.trunc(-high) + round(3.0)


def raised(m: Any, y: Tensor, x: Tensor) -> Tensor:
    up, norm = (x > -9).sum().item(), x.norm().item()
    whole, rest = divmod(up + norm, 7)
    return (
        y * up**0.5 + y.sin() * norm**-1.5 + y.square() / 2 ** (up // 40) + (-norm) ** 2.0 * up**-2 * y.cos()
        + y * norm ** (1 / up) * (up - up) ** 0.25 - y.abs() * whole * rest
    )  # fmt: skip


def larger(m: Any, y: Tensor, x: Tensor) -> Tensor:
    up, down = (y > 0).sum().item(), (x > 0).sum().item()
    return y * max(up, down) + (2 if y.mean().item() < x.mean().item() else 3) * y.square()


def against_a_draw(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """What data and a draw decide, data do."""
    draw, mean = torch.rand(()).item() - 0.5, x.mean().item() * 9
    return y * max(draw, mean, 0.01) * (2 if draw < mean else 3)


def test_a_draw_is_compared_with_a_number() -> None:
    torch.manual_seed(0)
    model = Item(against_a_draw).double()
    for x in torch.randn(3, 12, 8, dtype=torch.float64):
        report = verify(model, "dp=2", loss_fn=squares, batch=x, steps=4)
        assert report.ok, str(report)


@pytest.mark.parametrize(("use", "programs"), [(quotients, 1), (rounded, 1), (raised, 1), (larger, 4)])
def test_numbers_are_divided_rounded_raised_and_compared(use: Any, programs: int) -> None:
    """What Python refuses, or decides by, is looked at in each step."""
    torch.manual_seed(0)
    plain = Item(use).double()
    parallel = parallelize(copy.deepcopy(plain), "dp=1", loss_fn=squares)
    for x in torch.randn(8, 12, 8, dtype=torch.float64):
        plain.zero_grad()
        parallel.zero_grad()
        expected = squares(plain, x)
        expected.backward()
        torch.testing.assert_close(parallel.forward_backward(x), expected)
        for mine, its in zip(parallel.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad)
    assert 1 <= len(parallel.programs) <= programs
    report = verify(plain, "dp=2,tp=2", loss_fn=squares, batch=torch.randn(12, 8, dtype=torch.float64), steps=3)
    assert report.ok, str(report)


def to_the_power(number: float, zero: Any) -> Any:
    return zero**-number


@pytest.mark.parametrize("divide", [operator.truediv, operator.mod, operator.floordiv, to_the_power])
@pytest.mark.parametrize("number", [7, 7.5])
def test_a_divisor_that_comes_to_be_zero_is_pythons_error(divide: Any, number: float) -> None:
    """Also where torch has an error of its own: for integers on a CPU."""
    model = parallelize(
        Item(lambda m, y, x: y * divide(number, (x > 0).sum().item())).double(), "dp=1", loss_fn=squares
    )
    x = torch.ones(12, 8, dtype=torch.float64)
    model.forward_backward(x)
    before = [p.grad.full_tensor().clone() for p in model.parameters()]
    with pytest.raises(
        ZeroDivisionError, match=r"(by zero|float modulo|negative power)\n.*test_items\.py:\d+ .* Nothing was changed"
    ):
        model.forward_backward(-x)
    assert all(torch.equal(p.grad.full_tensor(), was) for p, was in zip(model.parameters(), before, strict=True))
    model.forward_backward(x)


def caught(m: Item, y: Tensor, x: Tensor) -> Tensor:
    m.last = y.mean().item()
    return y


ITEMS_REFUSED: dict[str, tuple[Any, str]] = {
    "a size": (lambda m, y, x: y[:, : x.argmax().item() % 8], r"The number is used by Python itself \(index\)"),
    "a list of sizes": (lambda m, y, x: y.split([8, y[0, 0].item()], 1)[0], r"is in an argument of split\(\)"),
    "a text": (lambda m, y, x: y * len(f"{y.mean().item():.3f}"), r"Python itself \(format\)"),
    "a log": (lambda m, y, x: KEPT.append(y.mean().item()) or y, "The number is kept from this step"),
    "an attribute": (caught, "The number is kept from this step"),
    "an option": (lambda m, y, x: nn.functional.dropout(y, y[0, 0].item()), r"is an argument of dropout\(\)"),
    "a root": (lambda m, y, x: y * abs((-y.abs().sum().item()) ** 0.5), "is in a power of numbers"),
    "math": (lambda m, y, x: y * math.exp(y.mean().item()), r"Python itself \(float\)"),
}


@pytest.mark.parametrize("name", ITEMS_REFUSED)
def test_an_item_that_python_needs_is_refused(name: str) -> None:
    use, said = ITEMS_REFUSED[name]
    with pytest.raises(CaptureError) as found:
        verify(Item(use), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))
    text = str(found.value)
    assert re.search(said, text) and "This line has .item(). Leave it a tensor" in text and f"{__file__}:" in text
    assert ("specialize=True" in text) == (name == "a size")


def with_numbers(model: nn.Module, x: Tensor) -> Any:
    """A loss with what a log has of it."""
    y = model(x)
    right = y.argmax(1) == x.argmax(1)
    loss = y.square().mean()
    log = {"loss": loss.item(), "right": right.sum().item(), "share": 100 * right.double().mean().item(), "rate": 2.5}
    return loss, {**log, "of": [y.max().item(), "text", 3], "y": y}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=3,tp=2", {}), ("fsdp=2", {"zero": 3}), ("pp=2,dp=2", {"microbatches": 3}), ("dp=2", {"precision": "bf16"})],
)
def test_items_are_returned(mesh: str, options: Any) -> None:
    torch.manual_seed(0)
    report = verify(Item(lambda m, y, x: y), mesh, loss_fn=with_numbers, batch=torch.randn(12, 8), **options)
    assert report.ok and sum(row.kind == "aux" for row in report.rows) == 7, str(report)


def test_returned_items_are_numbers_of_their_step(tmp_path: Any) -> None:
    """With a program of the cache, too."""
    torch.manual_seed(0)
    plain = Item(lambda m, y, x: y)
    for _ in range(2):
        parallel = parallelize(copy.deepcopy(plain), "dp=1", loss_fn=with_numbers, cache=tmp_path)
        for x in torch.randn(2, 12, 8):
            parallel.forward_backward(x)
            expected = with_numbers(plain, x)[1]
            assert {name: type(value) for name, value in parallel.last_aux.items() if name != "y"} == {
                name: type(value) for name, value in expected.items() if name != "y"
            }
            assert parallel.last_aux["right"] == expected["right"] and parallel.last_aux["of"][1:] == ["text", 3]
            assert parallel.last_aux["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert len(parallel.programs) == 1


def test_items_of_a_forward_pass_are_returned() -> None:
    model = Item(lambda m, y, x: (y, y.max().item(), y.argmax().item()))
    parallel = parallelize(copy.deepcopy(model), "dp=1").eval()
    with torch.no_grad():
        for x in torch.randn(2, 12, 8):
            assert parallel(x)[1:] == pytest.approx(model(x)[1:])
    assert type(parallel(x)[2]) is int


def test_an_item_as_the_loss_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"This line has \.item\(\).*The number is returned as the loss"):
        verify(
            Item(ITEMS["a factor"]), "dp=2", loss_fn=lambda model, x: squares(model, x).item(), batch=torch.randn(12, 8)
        )


def test_an_error_in_a_with_block_names_its_own_call() -> None:
    def use(m: Any, y: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            place = int(x[0].argmax())
        return y[place]

    with pytest.raises(
        CaptureError, match=r"a tensor as a Python integer .* queue\[:, i : i \+ 8\], read it by \.item\(\)"
    ):
        verify(Item(use), "dp=1", loss_fn=squares, batch=torch.randn(12, 8))


class LookedUp(nn.Module):
    """asteroid: the best permutation of each sample, by a loop over the numbers of the best."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        best = y[:, :4].argmin(1)
        rows = torch.stack([self.table[place] for place in best[:3]])
        first, last = best[0], best[1] - 4
        other = self.table[..., first] + self.table[1:, last].sum() + self.table[None, first, 2:].sum()
        return y * rows.sum(0) + other.sum() * y[0, first] + self.table[best[2], best[3]]


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
def test_a_row_of_a_number_that_is_computed(mesh: str) -> None:
    torch.manual_seed(0)
    report = verify(LookedUp(), mesh, loss_fn=squares, batch=torch.randn(12, 8))
    assert report.ok and report.max_error < 1e-10, str(report)


@pytest.mark.parametrize(
    "read", [lambda y: y[: y[0].argmax()], lambda y: y[y[0, 0] > 0], lambda y: y[y[0].argmax() :: 2].sum()]
)
def test_a_bound_or_a_condition_that_is_computed_is_refused(read: Any) -> None:
    with pytest.raises(CaptureError, match="depends on the values in a tensor"):
        verify(Item(lambda m, y, x: read(y)), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))
