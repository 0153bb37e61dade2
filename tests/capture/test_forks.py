"""Branches on data: taken where all sides compute the same, and refused where they do not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import compile, parallelize, verify
from autopar.capture.data import reads
from autopar.errors import AutoparError, BatchError


class Branching(nn.Module):
    seen: Tensor

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.inner, self.body, self.flag = nn.Linear(8, 8), body, False
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.inner(x), x)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def warned(m: Any, y: Tensor, x: Tensor) -> Tensor:
    if torch.isnan(y).any():
        warnings.warn("nan", stacklevel=1)
    return y * 2


def halves(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """pytorch-metric-learning: what is done about nan is done in fp16."""
    total = y.sum()
    if torch.isnan(total) and y.dtype == torch.float16:
        total = y.float().sum().half()
    if y.max() > 100 and y.dtype == torch.float16:
        total = total / 2
    return y * total


def counted(m: Any, y: Tensor, x: Tensor) -> Tensor:
    if (x > 2).any():
        print("large")
    y = y if y.min() > 0 else y.clone()
    return y


@pytest.mark.parametrize("options", [{}, {"specialize": True}], ids=["plain", "specialize"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
@pytest.mark.parametrize("body", [warned, halves, counted])
def test_sides_that_are_the_same(body: Any, mesh: str, options: Any) -> None:
    torch.manual_seed(0)
    report = verify(Branching(body), mesh, loss_fn=squares, batch=torch.randn(12, 8), **options)
    assert report.ok and report.max_error < 1e-10, str(report)


def test_the_branch_is_noted() -> None:
    found = compile(Branching(halves), "dp=2", loss_fn=squares, batch=torch.randn(12, 8))
    line = halves.__code__.co_firstlineno
    assert [note for note in found.notes if "branch" in note] == [
        f"{__file__}:{line + at} is a branch on data whose sides compute the same: no step takes it" for at in (3, 5)
    ]


def other(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return y * 2 if y.sum() > 0 else y


def second(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """Each alone makes no difference."""
    one, two = bool(y.sum() > 0), bool(y.max() > 3)
    return y * 2 if one and two else y


def raised(m: Any, y: Tensor, x: Tensor) -> Tensor:
    if torch.isnan(y).any():
        raise ValueError("nan")
    return y


def endless(m: Any, y: Tensor, x: Tensor) -> Tensor:
    while not y.sum() > 100:
        pass
    return y


def rounds(m: Any, y: Tensor, x: Tensor) -> Tensor:
    while y.sum() > 1:
        y = y / 2
    return y


def remembered(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """The same in this step, and not in the next one."""
    y = y * 2 if m.flag else y
    if y.sum() > 0:
        m.flag = True
    return y


def kept(m: Any, y: Tensor, x: Tensor) -> Tensor:
    if y.sum() > 0:
        m.seen.add_(1)
    return y


def constant(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """Another constant, of one form."""
    return y * torch.tensor([1.0] * 8 if y.sum() > 0 else [2.0] * 8, dtype=y.dtype)


@pytest.mark.parametrize("body", [other, second, raised, rounds, kept, constant])
def test_sides_that_are_not_the_same_are_guarded(body: Any) -> None:
    torch.manual_seed(3)
    batch = torch.randn(12, 8)
    assert verify(Branching(body), "dp=2", loss_fn=squares, batch=batch).ok
    notes = compile(Branching(body), "dp=2", loss_fn=squares, batch=batch).notes
    assert any(note.startswith("bool() of a tensor at") for note in notes)


def likelihood(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return F.gaussian_nll_loss(y, x, x + 4, reduction="none")


def test_a_check_of_torchs_own_is_guarded() -> None:
    """The look of gaussian_nll_loss for negative variances: where there are some, its error is raised."""
    torch.manual_seed(3)
    a_row = Branching(lambda m, y, x: F.gaussian_nll_loss(y, x, x[:, 0].square(), full=True))
    a_column = Branching(
        lambda m, y, x: F.gaussian_nll_loss(y.view(-1, 2, 4), x.view(-1, 2, 4), x.view(-1, 2, 4)[:, :1])
    )
    assert verify(a_row, "dp=2,tp=2", loss_fn=squares, batch=torch.randn(12, 8)).ok
    assert verify(a_column, "dp=3", loss_fn=squares, batch=torch.rand(12, 8)).ok
    wrong = Branching(lambda m, y, x: F.gaussian_nll_loss(y, x, x[:, :3].square()))
    with pytest.raises(AutoparError, match="var is of incorrect size"):
        compile(wrong, "dp=2", loss_fn=squares, batch=torch.randn(12, 8))
    model, plain = parallelize(Branching(likelihood), "dp=1", loss_fn=squares), Branching(likelihood)
    plain.load_state_dict(model.state_dict())
    batch = torch.randn(12, 8)
    loss = squares(plain, batch)
    torch.testing.assert_close(model.forward_backward(batch), loss.detach())
    with pytest.raises(ValueError, match="var has negative entry/entries"):
        model.forward_backward(batch - 4)
    torch.testing.assert_close(model.forward_backward(batch), loss.detach())


def test_a_loop_that_no_data_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "_MOST", 5)
    monkeypatch.setattr(reads, "_ROUNDS", 2)
    with pytest.raises(BatchError, match="a branch on data behind 256 others of the same step"):
        parallelize(Branching(endless), "dp=1", loss_fn=squares).forward_backward(torch.zeros(4, 8))


def test_a_branch_that_python_remembers_is_refused() -> None:
    model = Branching(remembered)
    batch = 5 * model.inner.weight.detach().sum(0).expand(12, 8).clone()  # the sum of what comes out is above 0
    with pytest.raises(BatchError, match="'flag'"):
        parallelize(model, "dp=1", loss_fn=squares).forward_backward(batch)


def test_what_is_returned_beside_the_loss_is_a_side_too() -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        value = squares(model, x)
        return value, {"kind": "large" if value > 1 else "small"}

    notes = compile(Branching(warned), "dp=2", loss_fn=loss, batch=torch.randn(12, 8)).notes
    assert any("is taken as" in note for note in notes)


class Layers(nn.Module):
    """Many layers, each with checks of its own and a range that its first call takes from the data."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        for layer in self.layers:
            layer.register_buffer("low", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            low, high = x.data.min(), x.data.max()
            if not (low.isnan().sum() == 0 and high.isnan().sum() == 0):  # as `assert`, which pytest writes anew here
                raise AssertionError("not a number")
            first = layer.low.min() > -1e-5 and layer.low.max() < 1e-5
            layer.low = layer.low + low if first else 0.9 * layer.low + 0.1 * low
        return x


def test_checks_of_many_layers_are_learned_at_the_first() -> None:
    """Not by a capture for each of them: 160 checks, of which two are guessed wrong."""
    runs: list[int] = []
    model = Layers(40)
    model.layers[0].register_forward_pre_hook(lambda *_: runs.append(1))
    compile(model, "dp=2", loss_fn=squares, batch=torch.randn(6, 8))
    assert len(runs) < 20
    assert verify(Layers(24), "dp=2", loss_fn=squares, batch=torch.randn(6, 8)).ok


def unending(m: Any, y: Tensor, x: Tensor) -> Tensor:
    z = y
    while True:
        z = 0.5 * z
        if z.abs().max() < 0.01:
            return y + z


def test_a_loop_without_a_condition_ends_where_its_data_end_it() -> None:
    assert verify(Branching(unending), "dp=2", loss_fn=squares, batch=torch.randn(6, 8)).ok
