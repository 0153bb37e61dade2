"""Tensors that lie in one memory: what is written into one is seen in the other, or it is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import verify
from autopar.capture.inputs.shared_memory import overlapping
from autopar.errors import CaptureError
from autopar.ir.program import Input

Given = tuple[Tensor, Tensor]


class Net(nn.Module):
    """buffers: two rows of a table, and the row between them."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.inner, self.use = nn.Linear(8, 8), use
        table = torch.arange(24.0, dtype=torch.float64).reshape(3, 8) / 9
        self.register_buffer("rows", table[::2])
        self.register_buffer("row", table[1])
        self.register_buffer("part", self.rows[1, 4:])
        self.register_buffer("expanded", torch.ones(1, dtype=torch.float64).expand(8))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.use(self, x, y).square().mean()


def rows_between(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.row.add_(1)
    return m.inner(x) * m.row + m.rows.sum(0) * m.expanded


def read_alone(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return m.inner(x) * m.rows[1] + m.part.sum() * m.row


def columns(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return m.inner(x) + y


def read_before(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = m.inner(x + 1)
    y[y < 0] = 0
    return z * y


def moved_once(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.row.data = m.row.data * 0.9 + m.rows.data[0] * 0.1
    m.row.data = m.row.data.clone()
    return m.inner(x) * m.row


def written_and_bound(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.row.add_(x.detach().mean(0))
    m.row = m.row * 0.9
    return m.inner(x) * m.row


def in_columns() -> Given:
    return torch.randn(4, 16, dtype=torch.float64).split(8, 1)  # type: ignore[return-value]


def shifted() -> Given:
    whole = torch.randn(4, 9, dtype=torch.float64)
    return whole[:, :-1], whole[:, 1:]


@pytest.mark.parametrize(
    ("use", "given"),
    [(rows_between, in_columns), (read_alone, shifted), (columns, in_columns), (read_before, shifted),
     (moved_once, shifted), (written_and_bound, shifted)],
)  # fmt: skip
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_what_does_not_meet_is_right(mesh: str, use: Any, given: Callable[[], Given]) -> None:
    torch.manual_seed(0)
    report = verify(Net(use).double(), mesh, batch=given(), steps=3)
    assert report.ok, str(report)


def written_part(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.part.add_(1)
    return m.inner(x) * m.rows[1]


def written_whole(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.rows.add_(1)
    return m.inner(x)


def read_behind(m: Any, x: Tensor, y: Tensor) -> Tensor:
    y[y < 0] = 0
    return m.inner(x) * y


def swapped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    one, other = m.row.clone(), m.row * 2
    one.data, other.data = other.data, one.data
    return m.inner(x) * one + other


def joined(m: Any, x: Tensor, y: Tensor) -> Tensor:
    one, other = m.row.clone(), m.row * 2
    one.data = other
    other.mul_(3)
    return m.inner(x) * one


def left(m: Any, x: Tensor, y: Tensor) -> Tensor:
    one = m.row.clone()
    flat = one.view(2, 4)
    one.data = one.data * 2
    return m.inner(x) * one + flat.sum()


def place_of_old(m: Any, x: Tensor, y: Tensor) -> Tensor:
    one = m.rows[x[0].argmax() % 2]
    m.rows.data = m.rows.data * 2
    return m.inner(x) * m.rows[0] + one


_DATA = r"This line has a tensor that lay in the memory of x, or of y, before x\.data = y\."
_WRITE = (
    r"This line has a write to {}, which lies in the memory of {} too\. .* Give one of them memory of its own: \.cl"
)


@pytest.mark.parametrize(
    ("use", "line", "text"),
    [(written_part, "m.part.add_", _WRITE.format("'part'", "'rows'")),
     (written_whole, "m.rows.add_", _WRITE.format("'rows'", "'part'")),
     (read_behind, "y[y < 0] = 0", _WRITE.format("tensor 1 of the batch", "tensor 0 of the batch")),
     (swapped, "one.data, other.data", _DATA), (joined, "other.mul_(3)", _DATA), (left, "flat.sum()", _DATA),
     (place_of_old, "+ one", _DATA)],
)  # fmt: skip
def test_what_would_be_seen_in_another_tensor_is_refused(use: Any, line: str, text: str) -> None:
    with pytest.raises(CaptureError, match=text) as caught:
        verify(Net(use).double(), "dp=1", batch=shifted())
    assert line in str(caught.value)


def _view(dice: random.Random, view: Tensor) -> Tensor:
    for _ in range(dice.randint(0, 3)):
        first = dice.randrange(view.shape[0])
        view = dice.choice([view[first:], view[: first + 1], view[:: 1 + first % 3], view.t(), view[:, -1:]])
    return view


def _places(view: Tensor) -> set[int]:
    return set(torch.arange(144).as_strided(view.shape, view.stride(), int(view.storage_offset())).flatten().tolist())


def test_tensors_that_meet_are_found() -> None:
    dice = random.Random(0)
    for _ in range(60):
        base = torch.zeros(12, 12)
        views = [_view(dice, base) for _ in range(6)]
        found = {
            (a.name, b.name)
            for (a, _), (b, _) in overlapping((Input("buffer", (str(i),)), v) for i, v in enumerate(views))
        }
        meeting = ((i, j) for i, j in combinations(range(6), 2) if _places(views[i]) & _places(views[j]))
        assert found == {(str(i), str(j)) for i, j in meeting}


class Kept(nn.Module):
    """Writes a buffer in place, or binds some anew, and reads another one, an attribute and a list."""

    p: Tensor
    q: Tensor

    def __init__(self, step: Callable[[Any, Tensor], None], is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.step = nn.Linear(4, 4).double(), step
        self.register_buffer("p", torch.ones(4, dtype=torch.float64))
        self.register_buffer("q", self.p if is_tied else self.p + 1)
        self.table, self.listed = self.p + 2, [self.p + 3]

    def forward(self, x: Tensor) -> Tensor:
        self.step(self, x.detach().mean(0))
        return self.layer(x) * self.q * self.table * self.listed[0] + self.p


def add(m: Any, x: Tensor) -> None:
    m.p.add_(x)


COMES = {
    "the memory of a buffer": lambda m: setattr(m.q, "data", m.p.data),
    "memory that it gives": lambda m: setattr(m.p, "data", m.q.data),
    "the memory of an attribute": lambda m: setattr(m.table, "data", m.p.data),
    "a part of the memory": lambda m: m.q.set_(m.p),
    "the same attribute": lambda m: setattr(m, "table", m.p),
    "the same buffer": lambda m: setattr(m, "q", m.p),
    "a view": lambda m: setattr(m, "table", m.p[:]),
    "a view as a buffer": lambda m: setattr(m, "q", m.p[:]),
    "in a list": lambda m: m.listed.__setitem__(0, m.p),
    "a view in a list": lambda m: m.listed.__setitem__(0, m.p[:]),
}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("how", list(COMES))
def test_tensors_that_come_to_share_memory_between_steps(how: str, first: int) -> None:
    """Red where a program went on for which they had memory of their own: what a step writes to one of them is seen in
    the other. It is so, or refused."""
    plain = Kept(add)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=lambda m, x: m(x).square().mean())
    for step in range(4):
        x = torch.randn(4, 4, dtype=torch.float64)
        if step == first:
            COMES[how](plain), COMES[how](model)
        if step >= first and "same" not in how:
            with pytest.raises(CaptureError, match="a write to 'p', which lies in the memory of"):
                model.forward_backward(x)
            return
        want = plain(x).square().mean()
        torch.testing.assert_close(model.forward_backward(x), want.detach(), rtol=1e-12, atol=0)
        assert all(torch.equal(getattr(model, name), getattr(plain, name)) for name in ("p", "q", "table"))


def of_mean(m: Any, x: Tensor) -> None:
    m.p.add_(m.q.mean())


@pytest.mark.parametrize("place", ["q", "table"])
def test_a_tensor_that_takes_another_form_between_steps(place: str) -> None:
    """Red where only objects were looked at: the mean was that of as many elements as before."""
    plain = Kept(of_mean)
    plain.q, plain.table = torch.arange(4.0, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)
    model = autopar.parallelize(
        copy.deepcopy(plain), "dp=1", loss_fn=lambda m, x: m(x).square().mean() * getattr(m, place).mean()
    )
    for step in range(6):
        x = torch.randn(4, 4, dtype=torch.float64)
        for m in (plain, model):
            tensor: Tensor = getattr(m, place)
            tensor.data = torch.arange(4.0, dtype=torch.float64) if step % 2 == 0 else tensor.data[1:2]
        want = plain(x).square().mean() * getattr(plain, place).mean()
        torch.testing.assert_close(model.forward_backward(x), want.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(model.p, plain.p)
    assert len(model.programs) == 2


def own(m: Any, x: Tensor) -> None:
    m.p = 0.9 * m.p + 0.1 * x


def second(m: Any, x: Tensor) -> None:
    m.q = 0.9 * m.q + 0.1 * x


def both(m: Any, x: Tensor) -> None:
    m.p = m.q = x


def shift(m: Any, x: Tensor) -> None:
    m.q, m.p = m.p, x


def take(m: Any, x: Tensor) -> None:
    m.p = m.q


def write_and_bind(m: Any, x: Tensor) -> None:
    m.p.add_(x)
    m.p = m.p * 0.9


def bind_and_write(m: Any, x: Tensor) -> None:
    old = m.p
    m.p = old * 0.9
    old.add_(x)


def write_and_shift(m: Any, x: Tensor) -> None:
    m.p.mul_(0.5)
    m.q, m.p = m.p, x


@pytest.mark.parametrize("is_tied", [False, True], ids=["two", "tied"])
@pytest.mark.parametrize("step", [add, own, second, both, shift, take, write_and_bind, bind_and_write, write_and_shift])
def test_who_holds_a_buffer_that_a_step_binds_anew(step: Callable[[Any, Tensor], None], is_tied: bool) -> None:
    """Red where it was written in place: a list of `model.mean` had the last one many times, and the other of two names
    changed with it. Those that are bound to one tensor are one from then on."""
    plain = Kept(step, is_tied)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=lambda m, x: m(x).square().mean())
    held: list[tuple[Tensor, Tensor]] = []
    for number in range(5):
        x = torch.randn(4, 4, dtype=torch.float64)
        want = plain(x).square().mean()
        torch.testing.assert_close(model.forward_backward(x), want.detach(), rtol=1e-12, atol=0)
        held += [(model.p, plain.p), (model.q, plain.q)]
        assert (model.p is model.q) == (plain.p is plain.q)
        if number == 2:
            model.p.add_(1), plain.p.add_(1)
        for one, other in held:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert len(model.programs) <= 2


class Queue(nn.Module):
    """Writes a buffer, and a tensor of the batch if it is told to."""

    queue: Tensor

    def __init__(self, step: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.step = nn.Linear(4, 4).double(), step
        self.register_buffer("queue", torch.randn(4, 4, dtype=torch.float64))
        self.table = torch.randn(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.step(self, x, y)


def write_and_read(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.queue.mul_(0.5)
    return m.layer(y) * x.mean()  # type: ignore[no-any-return]


def read_and_write(m: Any, x: Tensor, y: Tensor) -> Tensor:
    value: Tensor = m.layer(x + 1) * y
    m.queue.mul_(0.5)
    return value


def bind_and_read(m: Any, x: Tensor, y: Tensor) -> Tensor:
    m.queue = m.queue * 0.5
    return m.layer(y) * x.mean()  # type: ignore[no-any-return]


def write_batch(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x.mul_(0.5)
    return m.layer(x) * y.mean() * m.queue.mean() * m.table.mean()  # type: ignore[no-any-return]


def _own(m: Any) -> Given:
    return torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)


ALIKE: dict[str, tuple[Any, Callable[[Any], Given], str]] = {
    "the buffer": (write_and_read, lambda m: (m.queue, _own(m)[0]), "a write to 'queue'"),
    "a view of it": (write_and_read, lambda m: (m.queue.t(), _own(m)[0]), "a write to 'queue'"),
    "read before": (read_and_write, lambda m: (m.queue[:], _own(m)[0]), "a write to 'queue'"),
    "bound anew": (bind_and_read, lambda m: (m.queue[:], _own(m)[0]), ""),
    "one tensor twice": (write_batch, lambda m: (m.x, m.x), "a write to tensor 0 of the batch"),
    "two views": (write_batch, lambda m: (m.x[:], m.x.t()), "a write to tensor 0 of the batch"),
    "an attribute": (write_batch, lambda m: (m.table, m.x), "a write to tensor 0 of the batch"),
    "a buffer that is read": (write_batch, lambda m: (m.queue[:], m.x), "a write to tensor 0 of the batch"),
}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("how", list(ALIKE))
def test_a_batch_that_lies_in_what_a_step_writes(how: str, first: int) -> None:
    """Red where only the batch of the capture was looked at: later ones read what was there before the write."""
    step, given, fault = ALIKE[how]
    plain = Queue(step)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=lambda m, x, y: m(x, y).square().mean())
    for number in range(6):
        plain.x, model.original.x = _own(plain)  # type: ignore[assignment]
        model.original.x = plain.x.clone()
        of = given if number >= first and number != 4 else lambda m: (m.x.clone(), m.x * 2)
        torch.manual_seed(number)
        batch = of(plain)
        torch.manual_seed(number)
        if fault and of is given:
            with pytest.raises(CaptureError, match=f"{fault}, which lies in the memory of"):
                model.forward_backward(*of(model.original))
            return
        want = plain(*batch).square().mean()
        want.backward()
        got = model.forward_backward(*of(model.original))
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(model.layer.weight.grad.full_tensor(), plain.layer.weight.grad)
        torch.testing.assert_close(model.queue, plain.queue)
    assert len(model.programs) <= 2


class Stages(nn.Module):
    """Two layers, between which a buffer is written and bound anew."""

    row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("row", torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).tanh()
        write_row(self, x.detach().mean(0))
        return (self.last(h) * self.row - y).square().mean()


def write_row(m: Any, x: Tensor) -> None:
    m.row.add_(x)
    m.row = m.row * 0.9


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_buffer_that_is_written_and_bound_anew_beside_stages(microbatches: int) -> None:
    """Both of its values leave the program, and neither is taken for the other."""
    torch.manual_seed(0)
    batch = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    report = verify(Stages().double(), "pp=2", batch=batch, steps=3, microbatches=microbatches)
    assert report.ok, str(report)
