"""Numbers that change at every step, beside the plain module: inputs of one program, or compiled for each value."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Ranks
from side_by_side import assert_close
from torch import Tensor, nn

import autopar
from autopar.errors import RankError


@dataclass
class Config:
    beta: float = 0.5
    inner: dict[str, Any] = field(default_factory=lambda: {"betas": [0.5, 1.0], "pair": (0.5, 1.0)})


class Slotted:
    __slots__ = ("beta",)

    def __init__(self) -> None:
        self.beta = 0.5


BETA: Any = 0.5
STEP = 1
TABLE: dict[str, Any] = {"beta": 0.5}
CONFIG, SLOTTED = Config(), Slotted()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.beta: Any = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)) * self.beta)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor * 2, None


Loss = Callable[[nn.Module, Tensor, Tensor], Any]


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def by_global(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) * BETA


def by_item(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) + TABLE["beta"] * model(x).abs().mean()


def by_config(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x) * (1 - CONFIG.beta) + y * CONFIG.beta
    return F.mse_loss(out * CONFIG.inner["betas"][0], y * SLOTTED.beta)


def by_default(model: nn.Module, x: Tensor, y: Tensor, beta: float = 0.5, *, gamma: float = 0.5) -> Tensor:
    return F.mse_loss(model(x) * beta, y) * gamma


def by_function(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return Twice.apply(F.mse_loss(model(x), y), BETA)  # type: ignore[no-any-return]


def by_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y) * (0.9**STEP) + model(x).sum() * STEP / 100


def put_global(value: float, _: nn.Module) -> None:
    globals()["BETA"] = value


def put_item(value: float, _: nn.Module) -> None:
    globals()["TABLE"] = {"beta": value}  # another dict each time


def put_config(value: float, _: nn.Module) -> None:
    CONFIG.beta, CONFIG.inner["betas"][0], SLOTTED.beta = value, value / 2, value * 2


def put_default(value: float, _: nn.Module) -> None:
    by_default.__defaults__, by_default.__kwdefaults__["gamma"] = (value,), value * 3


def put_attribute(value: float, model: nn.Module) -> None:
    model.beta = value


def put_step(value: float, _: nn.Module) -> None:
    globals()["STEP"] = round(value * 10)


class Annealed:
    """A loss whose number stands in the cell of a closure."""

    def __init__(self, use: Callable[[Tensor, Tensor, Any], Tensor]) -> None:
        beta: Any = 0.5

        def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return use(model(x), y, beta)

        def put(value: float, _: nn.Module) -> None:
            nonlocal beta
            beta = value

        self.loss_fn, self.put = loss_fn, put


def anneal(
    loss_fn: Any, put: Callable[[float, nn.Module], None], dtype: torch.dtype = torch.float64, mesh: str = "dp=1",
    steps: int = 6, **options: Any,
) -> autopar.ParallelModule:  # fmt: skip
    """Steps on both models with another number at each; loss and gradients stay the same, with their dtypes."""
    torch.manual_seed(0)
    plain = Model().to(dtype)
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss_fn, device="cpu", **options)
    x, y = torch.randn(4, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for step in range(steps):
        for target in (plain, model):
            target.zero_grad()
            put(0.5 + step / 10, target)
        loss = loss_fn(plain, x, y)
        loss.backward()
        got = model.forward_backward(x, y)
        torch.testing.assert_close(got, loss.detach(), rtol=tolerance, atol=tolerance)
        found = model.full_gradients()
        if dist.get_rank() == 0:
            assert_close(found, {n: p.grad for n, p in plain.named_parameters()}, f"step {step}", tolerance)
    return model


PLACES: dict[str, tuple[Any, Any]] = {
    "global": (by_global, put_global),
    "item of a dict that is replaced": (by_item, put_item),
    "config, list in a dict, slot": (by_config, put_config),
    "default arguments": (by_default, put_default),
    "attribute of the model": (mse, put_attribute),
    "in an autograd function": (by_function, put_global),
    "int": (by_step, put_step),
}

ARITHMETIC: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "loss * beta": lambda out, y, beta: F.mse_loss(out, y) * beta,
    "beta / 2 + loss": lambda out, y, beta: -beta / 2 + F.mse_loss(out, y) ** 2,
    "numbers": lambda out, y, beta: F.mse_loss(out, y * (beta * 2 + 1 - beta**2)) * abs(0.5 - beta),
    "power": lambda out, y, beta: (out.abs() ** beta).mean() + (beta**out).mean(),
    "lerp": lambda out, y, beta: torch.lerp(out, y, beta).square().mean(),
    "where": lambda out, y, beta: torch.where(out > beta - 0.5, out, beta).mean(),
    "clamp": lambda out, y, beta: out.clamp(min=-beta).square().mean(),
    "where of losses": lambda out, y, beta: torch.where(y > 0, out.sum(), beta).mean(),
    "masked_fill": lambda out, y, beta: out.masked_fill(y > 0, beta).square().mean(),
    "compare": lambda out, y, beta: (out * (y > beta)).square().mean() + (out.square() * (beta <= y)).mean(),
    "in place": lambda out, y, beta: (out * 1.0).mul_(beta).sub_(beta).square().mean(),
    "integers": lambda out, y, beta: (out * (torch.arange(8) * beta)).square().mean(),
    "quotients": lambda out, y, beta: (out / beta + beta / (out.square() + 1)).square().mean(),
    "in Python": lambda out, y, beta: F.mse_loss(out, y) * (1 / beta + 3 // beta % 2 + round(beta, 1) + 10**-beta),
    "rounded": lambda out, y, beta: F.mse_loss(out, y) * (round(beta * 10) // 2 + math.floor(beta * 9) % 4 + 1),
    "tensors divided whole": lambda out, y, beta: ((out.detach() // beta) + (out % beta) * out).square().mean(),
    "many": lambda out, y, beta: F.mse_loss(out, y) * powers(beta),
    "full": lambda out, y, beta: F.mse_loss(out, torch.full(y.shape, beta, dtype=y.dtype)),
    "tensor": lambda out, y, beta: F.mse_loss(out, y) * torch.tensor(beta, dtype=y.dtype),
    "tensor of a list": lambda out, y, beta: (out * torch.tensor([beta] * 8, dtype=y.dtype)).square().mean(),
    "like another": lambda out, y, beta: F.mse_loss(
        out, torch.full_like(y, beta) + y.new_full((8,), beta) * y.new_tensor(beta)
    ),
    "full by name": lambda out, y, beta: F.mse_loss(out, torch.full(fill_value=beta, size=y.shape, dtype=y.dtype)),
    "isinstance": lambda out, y, beta: out.square().mean() * (beta if isinstance(beta, float) else 7.0),
}

FALLBACKS: dict[str, Callable[[Tensor, Tensor, Any], Tensor]] = {
    "if": lambda out, y, beta: F.mse_loss(out, y) * (beta if beta > 0.65 else 2.0),
    "math": lambda out, y, beta: F.mse_loss(out, y) * math.exp(beta),
    "size": lambda out, y, beta: out[:, : int(beta * 8)].square().mean(),
    "option": lambda out, y, beta: F.smooth_l1_loss(out, y, beta=beta),
    "smoothing": lambda out, y, beta: F.cross_entropy(out, y.argmax(1), label_smoothing=beta / 4),
    "alpha": lambda out, y, beta: torch.add(out, y, alpha=beta).square().mean(),
    "dropout": lambda out, y, beta: F.dropout(out, beta, training=False).square().mean(),
    "text": lambda out, y, beta: out.square().mean() * float(f"{beta}"),
    "a complex number": lambda out, y, beta: (out * (beta - 2) ** 0.5).abs().square().mean(),
    "a tensor that is read": lambda out, y, beta: F.mse_loss(out, y) * (torch.ones(2) * beta + 1).numpy()[0],
    "a number that is read": lambda out, y, beta: F.mse_loss(out, y) * float(beta * torch.ones((), dtype=y.dtype) + 1),
    "error that the user catches": lambda out, y, beta: out.square().mean() * caught(beta),
}


def powers(beta: Any) -> Any:
    """A number of 2,000 steps, of which each has two of the one before: nothing may go through them by recursion."""
    total = beta
    for _ in range(1000):
        total = total * 0.25 + total * (beta / 4)
    return total


def caught(beta: Any) -> float:
    try:
        return float(beta)
    except Exception:
        return 1.0


@pytest.mark.parametrize("name", PLACES)
def test_numbers_that_change_at_every_step_are_inputs_of_one_program(name: str) -> None:
    loss_fn, put = PLACES[name]
    assert len(anneal(loss_fn, put, steps=10).programs) <= 3


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32), ids=str)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_that_of_python_numbers(name: str, dtype: torch.dtype) -> None:
    annealed = Annealed(ARITHMETIC[name])
    assert len(anneal(annealed.loss_fn, annealed.put, dtype, steps=5).programs) == 3


@pytest.mark.parametrize("name", FALLBACKS)
def test_other_uses_are_compiled_for_each_value(name: str, caplog: pytest.LogCaptureFixture) -> None:
    annealed = Annealed(FALLBACKS[name])
    with caplog.at_level(logging.WARNING, "autopar"):
        assert len(anneal(annealed.loss_fn, annealed.put, steps=5).programs) == 5
    notes = [r.getMessage() for r in caplog.records if "changed twice" in r.getMessage()]
    assert len(notes) == 1 and "cannot be an input" in notes[0], notes


def test_the_note(caplog: pytest.LogCaptureFixture) -> None:
    annealed = Annealed(ARITHMETIC["loss * beta"])
    with caplog.at_level(logging.WARNING, "autopar"):
        anneal(annealed.loss_fn, annealed.put)
    line = annealed.loss_fn.__code__.co_firstlineno
    where = f"'beta' (test_scalars.py:{line}, closure of loss_fn)"
    assert [r.getMessage() for r in caplog.records if r.getMessage().startswith("'beta'")] == [
        f"{where} was 0.5 and is 0.6: compiling again",
        f"{where} was 0.6 and is 0.7: compiling again",
        f"{where} changed twice: it is an input of the program from now on",
    ]


def on_ranks(rank: int, mesh: str, options: dict[str, Any]) -> None:
    del rank
    annealed = Annealed(ARITHMETIC["numbers"])
    assert len(anneal(annealed.loss_fn, annealed.put, mesh=mesh, steps=5, **options).programs) == 3


def on_one_rank(rank: int) -> None:
    annealed = Annealed(ARITHMETIC["loss * beta"])
    model = anneal(annealed.loss_fn, annealed.put, mesh="dp=2")
    annealed.put(2.0 + rank, model)
    model.forward_backward(torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64))


def refused_once(rank: int) -> int:
    """A call that ranks do not agree on, at the second change of a number, and two changes after it."""
    annealed = Annealed(ARITHMETIC["loss * beta"])
    model = anneal(annealed.loss_fn, annealed.put, mesh="dp=2", steps=2)
    batch = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    annealed.put(7.0, model)
    with pytest.raises(RankError):
        model.forward_backward(*batch) if rank else model.full_state_dict()
    annealed.put(8.0, model)
    model.forward_backward(*batch)
    return len(model.programs)


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "options"), [("dp=2", {"zero": 3}), ("pp=2", {"microbatches": 2})])
def test_numbers_on_ranks(two: Ranks, mesh: str, options: dict[str, Any]) -> None:
    two.run(on_ranks, mesh, options)


@pytest.mark.gloo
def test_another_number_on_one_rank_is_a_rank_error(two: Ranks) -> None:
    for outcome in two.attempt(on_one_rank):
        assert outcome.error is not None
        assert outcome.error.startswith("RankError: ranks disagree on the batch and modes")
        assert "closure of loss_fn) = 3.0' where the others have" in outcome.error


@pytest.mark.gloo
def test_a_refused_call_counts_no_change(two: Ranks) -> None:
    """Or one rank would make the number an input where the others do not."""
    assert len(set(two.run(refused_once))) == 1


def test_forward_and_signatures_share_what_is_known() -> None:
    torch.manual_seed(0)
    plain = Model().double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=mse, device="cpu")
    x = torch.randn(4, 8, dtype=torch.float64)
    for step, size in enumerate((4, 4, 4, 4, 2, 2, 2)):
        plain.beta = model.beta = step / 4
        with torch.no_grad():
            torch.testing.assert_close(model(x[:size]), plain(x[:size]), rtol=1e-10, atol=1e-12)
    assert len(model.programs) == 4  # of which the last is for the other size
    plain.beta = model.beta = 2  # of another type
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-12)
    assert model.beta == 2 and len(model.programs) == 5


def test_numbers_stay_what_they_are_for_the_user() -> None:
    annealed = Annealed(FALLBACKS["if"])
    cell = annealed.loss_fn.__closure__
    anneal(annealed.loss_fn, annealed.put)
    assert cell is not None and any(type(c.cell_contents) is float for c in cell)


# -- numbers among the arguments of a call ---------------------------------------------------------------------------


def given(model: nn.Module, x: Tensor, y: Tensor, weight: Any) -> Tensor:
    beta = weight["beta"] if isinstance(weight, dict) else weight
    return F.mse_loss(model(x), y) * (1 - beta) + beta * model(x).abs().mean()


def given_size(model: nn.Module, x: Tensor, y: Tensor, size: int) -> Tensor:
    return F.mse_loss(model(x)[:, :size], y[:, :size])


PASSED: dict[str, Callable[[Any, Any, Tensor, Tensor, float], Tensor]] = {
    "positional": lambda call, model, x, y, beta: call(*model, x, y, beta),
    "keyword": lambda call, model, x, y, beta: call(*model, weight=beta, x=x, y=y),
    "in a dict": lambda call, model, x, y, beta: call(*model, x, y, {"beta": beta, "unused": round(beta * 10)}),
}


def anneal_argument(pass_: Any, loss_fn: Any, numbers: list[Any], mesh: str = "dp=1") -> autopar.ParallelModule:
    """Steps on both models with another number among the arguments; loss and gradients stay the same."""
    torch.manual_seed(0)
    plain = Model().double()
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss_fn, device="cpu")
    for step, number in enumerate(numbers):
        x, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
        plain.zero_grad(), model.zero_grad()
        loss = pass_(loss_fn, [plain], x, y, number)
        loss.backward()
        got = pass_(model.forward_backward, [], x, y, number)
        torch.testing.assert_close(got.detach(), loss.detach(), rtol=1e-10, atol=1e-12)
        found = model.full_gradients()
        if dist.get_rank() == 0:
            assert_close(found, {n: p.grad for n, p in plain.named_parameters()}, f"step {step}", 1e-10)
    return model


@pytest.mark.parametrize("name", PASSED)
def test_numbers_that_are_passed_become_inputs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        assert len(anneal_argument(PASSED[name], given, [0.1, 0.2, 0.3, 0.4, 0.1, 0.7]).programs) == 3
    notes = [r.getMessage() for r in caplog.records if "changed twice" in r.getMessage()]
    where = {"positional": "argument 2", "keyword": "argument weight", "in a dict": "argument 2['beta']"}[name]
    assert f"'{where}' changed twice: it is an input of the program from now on" in notes


def test_two_values_that_take_turns_have_a_program_each() -> None:
    assert len(anneal_argument(PASSED["positional"], given, [0.1, 0.2, 0.1, 0.2, 0.1]).programs) == 2


def test_a_size_that_is_passed_is_compiled_for_each_value(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        assert len(anneal_argument(PASSED["positional"], given_size, [3, 4, 5, 6, 3, 5]).programs) == 4
    notes = [r.getMessage() for r in caplog.records if "changed twice" in r.getMessage()]
    assert len(notes) == 1 and "'argument 2' changed twice, but cannot be an input" in notes[0], notes


def argument_on_ranks(rank: int, differs: bool) -> int:
    model = anneal_argument(PASSED["keyword"], given, [0.1, 0.2, 0.3, 0.4], mesh="dp=2")
    x, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    model.forward_backward(weight=0.5 + rank * differs, x=x, y=y)
    return len(model.programs)


@pytest.mark.gloo
def test_another_number_passed_on_one_rank_is_a_rank_error(two: Ranks) -> None:
    assert two.run(argument_on_ranks, False) == [3, 3]
    for outcome in two.attempt(argument_on_ranks, True):
        assert outcome.error is not None
        assert outcome.error.startswith("RankError: ranks disagree on the batch and modes")
        assert "argument weight 1.5" in outcome.error, outcome.error
