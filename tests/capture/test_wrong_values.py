"""Values that torch refuses are refused by a step, in its first call and in a later one, on whatever mesh: a draw and
a comparison take any number."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.compiled import Compiled
from autopar.errors import AutoparError, BatchError, CaptureError
from autopar.runtime.kernels.indices import checked_values
from autopar.verification.virtual_inputs import RankPrograms, whole_inputs

nan, inf = float("nan"), float("inf")
# What a model does with rows of numbers; a row that torch takes; rows that it refuses.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[list[float]]]] = {
    "classes": (lambda x: F.one_hot(x.long(), 5), [0, 1, 4], [[0, 1, 5], [0, 1, -1]]),
    "bernoulli": (torch.bernoulli, [0, 0.5, 1], [[0, 0.5, 1.5], [-0.1, 0, 0], [nan, 0, 0]]),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(x), [0, 0.5, 1], [[0, 0.5, 1.5], [-0.1, 0, 0]]),
    "multinomial": (lambda x: x.multinomial(1), [0, 0.5, 7], [[0, 0.5, -1], [0, 0, 0], [nan, 1, 1], [inf, 1, 1]]),
    "multinomial of two": (lambda x: x.multinomial(2), [1, 0.5, 7], [[0, 0.5, -1], [nan, 1, 1]]),
    "multinomial again": (lambda x: x.multinomial(2, replacement=True), [0, 0.5, 7], [[0, 0.5, -1], [0, 0, 0]]),
    "normal": (lambda x: torch.normal(0.0, x), [0, 0.5, 7], [[0, 0.5, -1]]),
    "normal of two": (lambda x: torch.normal(x, x), [0, 0.5, 7], [[0, 0.5, -1]]),
}
WRONG_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli_": lambda x: x.clone().bernoulli_(1.5),
    "bernoulli": lambda x: torch.bernoulli(x, -0.5),
    "normal_": lambda x: x.clone().normal_(0, -1),
    "normal": lambda x: torch.normal(x, -1.0),
    "uniform_": lambda x: x.clone().uniform_(1, 0),
    "exponential_": lambda x: x.clone().exponential_(-1),
    "init.normal_": lambda x: nn.init.normal_(x.clone(), 0, -1),
    "init.uniform_": lambda x: nn.init.uniform_(x.clone(), 1, 0),
}


# What reads the labels of rows that a mask selects: h [n, 5], y [n].
LABELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "classes": lambda h, y: (F.one_hot(y, 5) * h.log_softmax(-1)).sum(),
    "gather": lambda h, y: h.gather(1, y[:, None]).sum(),
    "take_along_dim": lambda h, y: h.take_along_dim(y[:, None], 1).sum(),
    "scatter": lambda h, y: (torch.zeros_like(h).scatter(1, y[:, None], 1.0) * h.exp()).sum(),
    "losses of each": lambda h, y: F.cross_entropy(h, y, reduction="none").sum(),
    "losses of each, picked": lambda h, y: F.nll_loss(h.log_softmax(-1), y, reduction="none").sum(),
}


class Net(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.use = nn.Parameter(torch.randn(3)), use

    def forward(self, x: Tensor) -> Tensor:
        return (self.use(x).float().flatten(1).sum(-1) * (x.nan_to_num(0, 0, 0) * self.weight).sum(-1)).sum()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x)
    return loss


def rows(*last: list[float]) -> Tensor:
    """Six rows, of which the last are these."""
    good = [last[0]] * (6 - len(last))
    return torch.tensor([*good, *last])


def run(compiled: Compiled, model: nn.Module, *batch: Tensor) -> None:
    """All ranks of a compiled step, on the virtual mesh."""
    whole = whole_inputs(dict(model.named_parameters()), batch, {}, torch.tensor([0, 0]))
    RankPrograms(compiled, torch.device("cpu"), None).outputs([whole])


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,tp=3"])
@pytest.mark.parametrize("case", CASES)
def test_values_that_torch_refuses_end_the_step(case: str, mesh: str) -> None:
    use, good, wrong = CASES[case]
    model = Net(use)
    compiled = autopar.compile(model, mesh, batch=(rows(good),), loss_fn=loss_fn)
    for row in wrong:
        with pytest.raises(RuntimeError):  # torch's
            model(rows(good, row))
        with pytest.raises(BatchError, match=r"(?s)test_wrong_values\.py"):
            run(compiled, model, rows(good, row))
    run(compiled, model, rows(good))


@pytest.mark.parametrize("case", CASES)
def test_so_do_those_of_the_first_step(case: str) -> None:
    use, good, wrong = CASES[case]
    for row in wrong:
        model = autopar.parallelize(Net(use), "dp=1", loss_fn=loss_fn)
        with pytest.raises(AutoparError, match=r"(?s)test_wrong_values\.py"):
            model.forward_backward(rows(good, row))
        assert model.weight.grad is None


@pytest.mark.parametrize("case", CASES)
def test_what_torch_takes_is_as_on_one_device(case: str) -> None:
    use, good, _ = CASES[case]
    report = autopar.verify(Net(use), "dp=2,tp=3", loss_fn=loss_fn, batch=(rows(good, good[::-1]),))
    assert report.ok, report


@pytest.mark.parametrize("case", WRONG_NUMBERS)
def test_numbers_that_torch_refuses_are_refused_by_the_capture(case: str) -> None:
    model, x = Net(WRONG_NUMBERS[case]), torch.ones(6, 3)
    with pytest.raises(RuntimeError) as plain:
        copy.deepcopy(model)(x)
    with pytest.raises(CaptureError) as ours:
        autopar.compile(model, "dp=2", batch=(x,), loss_fn=loss_fn)
    assert __file__ in str(ours.value) and str(plain.value).splitlines()[0] in str(ours.value)


@pytest.mark.parametrize("case", LABELS)
def test_labels_that_a_mask_leaves_out_may_be_anything(case: str) -> None:
    """All rows are computed where a mask selects some: the others have labels that nobody reads on one device."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen = y >= 0
        return LABELS[case](model(x)[seen], y[seen])

    torch.manual_seed(0)
    batch = torch.randn(6, 4), torch.tensor([0, 1, -1, 3, -100, 4])
    report = autopar.verify(nn.Linear(4, 5), "dp=3,tp=2", loss_fn=loss, batch=batch)
    assert report.ok, report
    if case == "take_along_dim":
        return  # torch counts around there
    model = autopar.parallelize(nn.Linear(4, 5), "dp=1", loss_fn=loss)
    with pytest.raises((BatchError, RuntimeError), match=r"out of (range|bounds)"):
        model.forward_backward(batch[0], batch[1] + 2)  # 6 where it counts


def test_a_value_that_is_refused_is_named() -> None:
    x = torch.tensor([0.0, 1.0, 0.5])
    assert checked_values(x, 0.0, 1.0, "coins") is x
    for wrong, said in ((1.5, "1.5"), (nan, "nan"), (-inf, "-inf")):
        with pytest.raises(BatchError, match=rf"^coins: {said} is not\."):
            checked_values(torch.tensor([0.0, wrong, 0.5]), 0.0, 1.0, "coins")
