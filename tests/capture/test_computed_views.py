"""Views at a place that a tensor holds: what is written into one, or into what it is of, is written into both."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import parallelize, verify
from autopar.errors import BatchError, CaptureError


class Net(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.inner, self.other, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use
        self.register_buffer("table", torch.arange(32.0).reshape(4, 8))
        self.register_buffer("queue", torch.randn(8, 24))
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        return self.use(self, self.inner(x), x)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return (y * torch.arange(1, y.numel() + 1).reshape(y.shape)).square().mean()


CASES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {}


def case(function: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    CASES[function.__name__] = function
    return function


@case
def row_of_a_buffer(m: Any, y: Tensor, x: Tensor) -> Tensor:
    m.table[x[0].argmax() % 4].add_(1)
    m.table[:, x[1].argmax() % 8].data.mul_(2)
    m.table[x[2].argmax() % 4][2:4] = 1
    return y * m.table.sum(0)


@case
def row_of_an_activation(m: Any, y: Tensor, x: Tensor) -> Tensor:
    y[x[0].argmax() % 4].mul_(3)
    return y


@case
def written_where_it_is_of(m: Any, y: Tensor, x: Tensor) -> Tensor:
    row = y[x[0].argmax() % 4]
    y.mul_(3)
    return y * row


@case
def kept_by_a_buffer(m: Any, y: Tensor, x: Tensor) -> Tensor:
    table, at = m.queue * 1, x[0].argmax() % 4
    m.table = table[at : at + 4, at : at + 8]
    table.mul_(2)
    return y * table[:, 0]


@case
def moving_average(m: Any, y: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        for sample in range(3):
            at = x[sample].argmax() % 4
            m.table[at] = m.table[at] * 0.9 + x[sample] * 0.1
            m.table[at] += 1
    return y * m.table.mean(0)


@case
def rows_from_one_on(m: Any, y: Tensor, x: Tensor) -> Tensor:
    out, at = torch.zeros_like(y), x[0].argmax() % 4
    out[:, at : at + 3] = y[:, 1:4] * 2
    out[at] = y[1]
    out[-1, at] = 3
    out[:, at + 1] *= 2
    out[None, at, 2:] += y[2, 2:]
    out[..., at + 2 : at + 4].mul_(y[:, at : at + 2])
    return out * y


@case
def both_dims(m: Any, y: Tensor, x: Tensor) -> Tensor:
    a, b = x[0].argmax() % 2, x[1].argmax() % 3
    y[a : a + 2, b : b + 3].mul_(y[b : b + 2, a : a + 3].clone())
    y[a % 2, b] = y[b % 3, a] * 5
    return y


@case
def views_of_views(m: Any, y: Tensor, x: Tensor) -> Tensor:
    at = x[0].argmax() % 4
    row, end = y[at], at + 3
    some = row[end - 3 : end]
    some.mul_(2)
    y.add_(1)
    more = some * 3
    row[1:3] = 0
    return y + more.sum() + some.sum() * 2


@case
def by_name(m: Any, y: Tensor, x: Tensor) -> Tensor:
    at = x[0].argmax() % 4
    y.narrow(1, at, 3).mul_(2)
    torch.narrow(y, 1, -at - 2, 2).add_(1)
    y.select(0, at).mul_(3)
    y.select(1, at.item()).mul_(3)
    y.narrow(0, start=at.item(), length=1).mul_(2)
    return y


@case
def queue(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """MoCo's, with `.item()` in place of `int()`."""
    keys = F.normalize(m.other(x).detach(), dim=1)
    found = y @ m.queue.clone()
    at = m.at.item()
    m.queue[:, at : at + len(keys)] = keys.T
    m.at[0] = (at + len(keys)) % 24
    return found


@case
def queue_by_tensors(m: Any, y: Tensor, x: Tensor) -> Tensor:
    found, at = y @ m.queue.clone(), m.at[0]
    m.queue[:, m.at[-1] : at + len(x)].copy_(x.T)
    m.at.add_(len(x)).remainder_(24)
    return found


@case
def rows_by_number(m: Any, y: Tensor, x: Tensor) -> Tensor:
    n = m.at.item()
    m.table[n % 4] = y.detach().mean(0)
    m.table[(n + 5) // 2 % 4] += 1
    m.at += 1
    return y * m.table[n % 4] + m.table[n // 4].sum()


@case
def crop(m: Any, y: Tensor, x: Tensor) -> Tensor:
    at = torch.randint(0, 5, (1,)).item()
    return y[:, at : at + 3]


@case
def crop_that_ends_outside(m: Any, y: Tensor, x: Tensor) -> Tensor:
    at = torch.randint(0, 8, ())
    return y.square() + y[:, at : at + 4].sum()


@case
def drawn_arguments(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """Of which each is another program."""
    size = torch.randint(1, 3, (1,)).item()
    return y.roll(size, 1) + y.narrow(1, 2, size).sum()


@case
def crop_of_each(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """VITS' random slices of segments."""
    places, made = (torch.rand(len(x)) * 5).long(), torch.zeros_like(y[:, :4])
    for sample in range(len(x)):
        start = places[sample]
        made[sample] = y[sample, start : start + 4]
    return made


@case
def blanks(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """SpecAugment: as many as are drawn, and cut where they end outside."""
    y = y.clone()
    size, start = torch.randint(0, 4, (1,)).item(), torch.randint(0, 8, (1,)).item()
    y[:, start : start + size] = 0
    first, wide = torch.randint(-3, 8, ()), x[0].argmax() % 5
    y[:, first : first + wide] = 0.5
    y[first.abs() % 4, -first:] = y.mean()
    y[:, start + 3 : -2] = 0.25
    return y


@case
def pieces(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """Rows that counts cut."""
    groups = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    order, counts = groups.argsort(stable=True), torch.bincount(groups, minlength=3)
    y, out, start = y[order], torch.zeros_like(y), 0
    for group, count in enumerate(counts.tolist()):
        y[start : start + count].mul_(group + 2)
        out[start : start + count].copy_(m.other(y[start : start + count].clone()))
        start += count
    return y + out


@case
def pieces_without_a_gradient(m: Any, y: Tensor, x: Tensor) -> Tensor:
    groups = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    order, counts = groups.argsort(stable=True), torch.bincount(groups, minlength=3)
    rows = x[order].clone()
    cut = rows.split(counts.tolist())
    for group, piece in enumerate(cut):
        piece.mul_(group + 2)
    rows.add_(3)
    return y * rows + torch.cat([piece * (group + 2) for group, piece in enumerate(cut)])


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
@pytest.mark.parametrize("name", CASES)
def test_views_are_those_of_one_device(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(8 if "pieces" in name else 4, 8)
    report = verify(Net(CASES[name]), mesh, loss_fn=squares, batch=batch, steps=4)
    assert report.ok and report.max_error < 1e-10, str(report)


def test_what_is_returned_is_as_at_the_end() -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        y = model(x)
        row = y[x[0].argmax() % 4]
        y.mul_(3)
        return y.square().mean(), {"row": row}

    torch.manual_seed(0)
    report = verify(Net(lambda m, y, x: y), "dp=1", loss_fn=loss, batch=torch.randn(4, 8))
    assert report.ok and report.max_error < 1e-10, str(report)


def test_what_a_forward_pass_returns_is_as_at_its_end() -> None:
    def use(m: Any, y: Tensor, x: Tensor) -> Any:
        row = y[x[0].argmax() % 4]
        y.mul_(3)
        return y, row

    model, x = Net(use).eval(), torch.randn(4, 8)
    parallel = parallelize(copy.deepcopy(model), "dp=1").eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(x)[1], model(x)[1])


@pytest.mark.parametrize(("name", "most"), [("crop", 1), ("crop_that_ends_outside", 5), ("blanks", 1)])
def test_drawn_places_are_few_programs(name: str, most: int) -> None:
    """One, but of crops that end outside, which have other shapes."""
    torch.manual_seed(0)
    parallel = parallelize(copy.deepcopy(Net(CASES[name])), "dp=1", loss_fn=squares)
    for x in torch.randn(12, 4, 8):
        parallel.forward_backward(x)
    assert len(parallel.programs) <= most


def test_a_place_outside_is_an_error_of_its_step() -> None:
    parallel = parallelize(Net(CASES["queue"]), "dp=1", loss_fn=squares)
    parallel.get_buffer("at").fill_(22)
    with pytest.raises(BatchError, match=r"(?s)index 24 is out of range: .* 24 entries.*test_computed_views\.py"):
        parallel.forward_backward(torch.randn(4, 8))
    assert parallel.get_buffer("at").item() == 22


def test_rows_outside_that_are_read_are_an_error_of_their_step() -> None:
    def use(m: Any, y: Tensor, x: Tensor) -> Tensor:
        at = m.at.item()
        return y @ m.queue[:, at : at + 4]

    parallel = parallelize(Net(use), "dp=1", loss_fn=squares)
    for at, text in ((22, "index 24 is out"), (-1, "index -1 is out")):
        parallel.get_buffer("at").fill_(at)
        with pytest.raises(BatchError, match=text):
            parallel.forward_backward(torch.randn(4, 8))


@pytest.mark.parametrize("use", [lambda y, at: y[:, :at], lambda y, at: y[:, at : 2 * at], lambda y, at: y[at::2]])
def test_as_many_rows_as_data_say_are_refused(use: Any) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return use(model(x), x[0].argmax().item()).square().mean()

    with pytest.raises(CaptureError, match=r"This line has \.item\(\).*The number is used by Python itself \(index\)"):
        verify(Net(lambda m, y, x: y), "dp=1", loss_fn=loss, batch=torch.randn(4, 8))


def test_rows_between_places_of_two_tensors_are_refused() -> None:
    def use(m: Any, y: Tensor, x: Tensor) -> Tensor:
        first, last = x[0].argmax(), x[1].argmax()
        return y[:, first : last + 3]

    with pytest.raises(
        CaptureError, match=r"a slice whose length a tensor decides\. Use bounds that are so many rows apart"
    ):
        verify(Net(use), "dp=1", loss_fn=squares, batch=torch.randn(4, 8))


def buffers_cast(m: Any, y: Tensor, x: Tensor) -> Tensor:
    row = m.table.float()[1]
    row.add_(0.5)
    table = m.table[2:].to(torch.float32)
    m.table.mul_(0.5)
    return y * m.table.mean(0) + table.sum()


def parameter_cast(m: Any, y: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.other.weight.float().mul_(0.5)
    return m.other(y)


def batch_cast(m: Any, y: Tensor, x: Tensor) -> Tensor:
    x.float().mul_(3)
    return m.other(x)


@pytest.mark.parametrize("use", [buffers_cast, parameter_cast, batch_cast])
def test_a_cast_to_their_own_dtype_is_what_is_given_itself(use: Any) -> None:
    """Under mixed precision `x.float()` is a copy in the program, of what may be in another dtype by then."""
    torch.manual_seed(0)
    model = Net(use).float()
    model.table.div_(32)
    report = verify(model, "dp=2", loss_fn=squares, batch=torch.randn(4, 8), precision="bf16", steps=3)
    assert report.ok, str(report)
