"""What a training loop changes between steps, beside the plain module: seen by the compiled program, or refused."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side import assert_close
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError


@dataclass
class Nested:
    weights: list[float] = field(default_factory=lambda: [1.0, 2.0])


@dataclass
class Config:
    beta: float = 0.5
    inner: Nested = field(default_factory=Nested)


CONFIG = Config()
TABLE = {"beta": 0.5, "unused": 1}
ARGS = SimpleNamespace(kind="relu", steps=0)
FACTOR = 0.5
MASK = torch.linspace(0.1, 1, 8, dtype=torch.float64)


def activation(x: Tensor) -> Tensor:
    return torch.relu(x)


class Scale(nn.Module):
    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.sign, self.act, self.options = 1.0, F.relu, {"power": 2, "list": [1.0]}
        self.mask, self.plan = torch.linspace(0.5, 1, 8), Nested()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x) * self.sign * self.gain * self.mask
        return x.pow(self.options["power"]) * self.options["list"][0] * self.plan.weights[1]


class Model(nn.Module):
    beta = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.one, self.scale, self.norm, self.drop = nn.Linear(8, 8), Scale(), nn.RMSNorm(8, eps=1e-5), nn.Dropout(0.0)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(self.norm(self.scale(self.one(x)))) - 0.5) * self.beta


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


Change = Callable[[nn.Module], Any]


def train_beside(loss_fn: Any, change: Change, undo: Change | None = None, make: Callable[[], nn.Module] = Model,
                 mesh: str = "dp=1", again: int | None = None, **options: Any) -> autopar.ParallelModule:  # fmt: skip
    """A step, `change`, two steps, `undo`, a step, on both models; they stay the same, and the change is seen.

    `change` is called once for each model. again: the programs that there must be at the end.
    """
    torch.manual_seed(0)
    plain = make().double()
    for module in plain.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                setattr(module, name, value.double())
    untouched = copy.deepcopy(plain)
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss_fn, device="cpu", **options)
    x, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    sgd = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]

    def step(what: str) -> Tensor:
        for optimizer in sgd:
            optimizer.zero_grad()
        loss = loss_fn(plain, x, y)
        loss.backward()
        torch.testing.assert_close(model.forward_backward(x, y), loss.detach(), rtol=1e-10, atol=1e-12, msg=what)
        found = model.full_gradients()
        if dist.get_rank() == 0:
            assert_close(found, grads_of(plain), f"gradient {what}")
        for optimizer in sgd:
            optimizer.step()
        return loss.detach()

    first = step("before")
    for target in (plain, model):
        change(target)
    changed = copy.deepcopy(untouched)
    change(changed)
    assert loss_fn(changed, x, y) != first, "the change must matter"
    step("after the change")
    step("after the change, again")
    if undo is not None:
        for target in (plain, model):
            undo(target)
        step("after it was undone")
    if again is not None:
        assert len(model.programs) == again
    return model


def plain_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def put(path: str, value: Any) -> Change:
    """Set an attribute, through the parallel model where it is its own."""

    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner) if owner else model, name, value)

    return change


def item(path: str, key: Any, value: Any) -> Change:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        getattr(model.get_submodule(owner), name)[key] = value

    return change


ATTRIBUTES = {
    "on the root, of the class before": (put("beta", 0.3), None),
    "of a submodule": (put("scale.sign", 0.5), put("scale.sign", 1.0)),
    "of the class of a submodule": (put("scale.gain", 3.0), None),
    "a function": (put("scale.act", F.gelu), put("scale.act", F.relu)),
    "an item of a dict": (item("scale.options", "power", 3), item("scale.options", "power", 2)),
    "a list in a dict": (put("scale.options", {"power": 2, "list": [3.0]}), None),
    "a plain object": (put("scale.plan", Nested([1.0, 5.0])), put("scale.plan", Nested())),
    "dropout": (put("drop.p", 1.0), put("drop.p", 0.0)),
    "a slope": (put("act.negative_slope", 0.5), put("act.negative_slope", 0.1)),
    "eps": (put("norm.eps", 0.5), put("norm.eps", 1e-5)),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes(name: str) -> None:
    change, undo = ATTRIBUTES[name]
    train_beside(plain_loss, change, undo, again=2)  # what was undone is found again


def test_momentum_of_batch_norm() -> None:
    """It shows in the buffers alone."""
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=plain_loss)
    x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    for momentum in (0.1, 0.7, 0.1):
        for target in (plain, model):
            target.get_submodule("1").momentum = momentum
        plain_loss(plain, x, y).backward()
        model.forward_backward(x, y)
        assert_close(model.full_state_dict(), plain.state_dict(), f"state at {momentum}")
    assert len(model.programs) == 2


# -- what functions read --------------------------------------------------------------------------------------------


def test_a_number_of_the_enclosing_function_is_named(caplog: pytest.LogCaptureFixture) -> None:
    beta = 0.5

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain_loss(model, x, y) * beta

    def change(_: nn.Module) -> None:
        nonlocal beta
        beta = 0.25

    def undo(_: nn.Module) -> None:
        nonlocal beta
        beta = 0.5

    with caplog.at_level(logging.WARNING, logger="autopar"):
        train_beside(loss_fn, change, undo, again=2)
    found = [r.getMessage() for r in caplog.records if "compiling again" in r.getMessage()]
    line = loss_fn.__code__.co_firstlineno
    text = f"'beta' (test_guards.py:{line}, closure of loss_fn) was 0.5 and is 0.25: compiling again"
    assert found == [text]


def set_globals(**values: Any) -> Change:
    def change(_: nn.Module) -> None:
        globals().update(values)

    return change


def by_global(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain_loss(model, x, y) * FACTOR


def by_config(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain_loss(model, x, y) * CONFIG.beta * CONFIG.inner.weights[0]


def by_table(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain_loss(model, x, y) * TABLE["beta"]


def by_text(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(getattr(F, ARGS.kind)(model(x)), y)


def by_function(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain_loss(model, activation(x), y)


def by_default(model: nn.Module, x: Tensor, y: Tensor, config: Any = Nested()) -> Tensor:  # noqa: B008
    return plain_loss(model, x, y) * config.weights[0]


def by_tensor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return plain_loss(model(x) * MASK, x, y) if False else F.mse_loss(model(x) * MASK, y)


class Criterion:
    def __init__(self) -> None:
        self.weight, self.calls = 1.0, 0

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return plain_loss(model, x, y) * self.weight

    def method(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self(model, x, y)


def write_config(beta: float, weight: float) -> Change:
    def change(_: nn.Module) -> None:
        CONFIG.beta, CONFIG.inner.weights[0] = beta, weight

    return change


def write(target: Any, name: str, value: Any) -> Change:
    return lambda _: setattr(target, name, value)


criterion, module_criterion = Criterion(), nn.HuberLoss(delta=0.1)
READ: dict[str, tuple[Any, Change, Change]] = {
    "a global": (by_global, set_globals(FACTOR=0.1), set_globals(FACTOR=0.5)),
    "a dataclass in a dataclass": (by_config, write_config(0.5, 3.0), write_config(0.5, 1.0)),
    "a dict": (by_table, lambda _: TABLE.update(beta=0.1), lambda _: TABLE.update(beta=0.5)),
    "a text": (by_text, write(ARGS, "kind", "tanh"), write(ARGS, "kind", "relu")),
    "a function": (by_function, set_globals(activation=torch.tanh), set_globals(activation=activation)),
    "a default argument": (by_default, lambda _: by_default.__defaults__[0].weights.__setitem__(0, 3.0),
                           lambda _: by_default.__defaults__[0].weights.__setitem__(0, 1.0)),
    "a callable object": (criterion, write(criterion, "weight", 2.0), write(criterion, "weight", 1.0)),
    "a method": (criterion.method, write(criterion, "weight", 2.0), write(criterion, "weight", 1.0)),
    "a criterion module": (lambda m, x, y: module_criterion(m(x), y), write(module_criterion, "delta", 0.5),
                           write(module_criterion, "delta", 0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_a_loss_function_reads(name: str) -> None:
    loss_fn, change, undo = READ[name]
    train_beside(loss_fn, change, undo, again=2)


SIGN = -1.0


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * SIGN


def by_reversal(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = Reversal.apply(model(x))
    out.register_hook(lambda g: g * FACTOR)
    return F.mse_loss(out, y)


def test_what_a_backward_pass_reads() -> None:
    plain = nn.Linear(8, 8).double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=by_reversal)
    x, y = torch.randn(4, 8).double(), torch.randn(4, 8).double()
    for values in ({"SIGN": -1.0}, {"SIGN": -2.0}, {"SIGN": -1.0, "FACTOR": 0.25}, {"FACTOR": 0.5}):
        globals().update(values)
        plain.zero_grad()
        model.zero_grad()
        by_reversal(plain, x, y).backward()
        model.forward_backward(x, y)
        assert_close(model.full_gradients(), grads_of(plain), f"gradients with {values}")
    assert len(model.programs) == 3


def test_what_nobody_reads_compiles_nothing() -> None:
    model = autopar.parallelize(Model(), "dp=1", loss_fn=by_config)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    for step in range(3):
        ARGS.steps, TABLE["unused"], criterion.calls = step, step, step
        model.epoch = step
        CONFIG.inner = Nested(list(CONFIG.inner.weights))  # another object with the same insides
        model.forward_backward(x, y)
    assert len(model.programs) == 1


def test_eval_and_back_is_found_again() -> None:
    model = autopar.parallelize(Model(), "dp=1", loss_fn=plain_loss)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    for _ in range(2):
        for is_training in (True, False):
            model.drop.train(is_training)
            for beta in (1.0, 0.5):
                model.beta = beta
                model.forward_backward(x, y)
    assert len(model.programs) == 4


# -- modules --------------------------------------------------------------------------------------------------------


STRUCTURE: dict[str, tuple[Change, str]] = {
    "a submodule": (lambda m: setattr(m, "one", nn.Linear(8, 8)), "'one' was replaced after autopar.parallelize"),
    "a module of a submodule": (lambda m: setattr(m.scale, "more", nn.Linear(8, 8)), "'scale.more' was added after"),
    "a parameter": (lambda m: setattr(m.one, "bias", None), "'one.bias' was replaced after"),
    "a parameter less": (lambda m: delattr(m.one, "bias"), "'one.bias' was removed after"),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_other_modules_and_parameters_are_refused_by_name(name: str) -> None:
    change, text = STRUCTURE[name]
    model = autopar.parallelize(Model(), "dp=1", loss_fn=plain_loss)
    change(model.original)
    with pytest.raises(AutoparError, match=text):
        model.forward_backward(torch.randn(4, 8), torch.randn(4, 8))


def tanh_forward(self: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(self.one(x))


def test_another_method_on_the_object_and_on_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_object(model: nn.Module) -> None:
        target = getattr(model, "original", model)
        target.forward = tanh_forward.__get__(target)

    train_beside(plain_loss, of_object, again=2)
    torch.manual_seed(0)
    plain = Model()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=plain_loss)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    model.forward_backward(x, y)
    monkeypatch.setattr(Model, "forward", tanh_forward)
    torch.testing.assert_close(model.forward_backward(x, y), plain_loss(plain, x, y).detach())


class Inherits(nn.Linear):
    """Computes what its base does."""


class Doubles(Inherits):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Tripled(Doubles):
    """Inherits a method that a loop overrides later."""


def test_a_class_that_comes_to_override_a_method() -> None:
    """Red where only those methods were looked at that had run."""
    torch.manual_seed(0)
    plain, x = Tripled(4, 4).double(), torch.randn(4, 4, dtype=torch.float64)
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=lambda m, x: m(x).square().mean())
    try:
        for _ in range(2):
            assert torch.allclose(model.forward_backward(x), plain(x).square().mean())
            Tripled.forward = lambda self, x: 3 * Doubles.forward(self, x)  # type: ignore[method-assign]
    finally:
        del Tripled.forward
    assert torch.allclose(model.forward_backward(x), plain(x).square().mean())
