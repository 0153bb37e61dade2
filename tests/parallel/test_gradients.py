"""Around a step: what autograd is asked for is what one device gives, or refused with what to write instead."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def make() -> autopar.ParallelModule:
    return autopar.parallelize(net(), "dp=1", loss_fn=loss_fn)


X = torch.linspace(-1, 1, 48).view(6, 8)
THROUGH = "backward() through the output of a parallel model: model(*batch) computes no gradients."
OFF = "forward_backward() computes gradients, but was called under torch.no_grad() or torch.inference_mode()."


def _step(mode: Any) -> None:
    model = make()
    with mode():
        model.forward_backward(X)


def _mixed() -> None:
    """A sum with another model's loss: one device trains both."""
    (nn.Linear(4, 1)(make()(X)).sum()).backward()


def _grad() -> None:
    model = make()
    torch.autograd.grad(model(X).sum(), list(model.parameters()))


def _input() -> None:
    model = make().requires_grad_(False)
    x = X.clone().requires_grad_()
    model(x).sum().backward()


def _penalty(x: Tensor) -> None:
    loss = make().training_loss(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def _inference() -> None:
    with torch.inference_mode():
        make()


def _twice() -> None:
    module = net()
    for _ in range(2):
        autopar.parallelize(module, "dp=1", loss_fn=loss_fn)


REFUSED: dict[str, tuple[type[AutoparError], str, Callable[[], Any]]] = {
    "backward of an output": (AutoparError, THROUGH, lambda: make()(X).sum().backward()),
    "grad of an output": (AutoparError, THROUGH, _grad),
    "an output in another loss": (AutoparError, THROUGH, _mixed),
    "an argument that wants a gradient": (AutoparError, THROUGH, _input),
    "a gradient of the gradient of one": (
        AutoparError, "a backward pass through a gradient of training_loss(): a step has the gradients of its batch",
        lambda: _penalty(X.clone().requires_grad_()),
    ),
    "a step under no_grad": (AutoparError, OFF, lambda: _step(torch.no_grad)),
    "a step under inference_mode": (AutoparError, OFF, lambda: _step(torch.inference_mode)),
    "made under inference_mode": (
        AutoparError, "parallelize makes parameters to train: call it outside of torch.inference_mode().", _inference),
    "a module made parallel twice": (
        AutoparError, "'0.weight' is a DTensor already: this module, or one that shares it, was given", _twice),
    "a parallel model made parallel": (
        AutoparError, "this is a parallel model already: autopar.parallelize was called on what it returned. Leave out "
        "one of the two calls. A second loss of one model is a branch of its loss_fn, by an argument of yours",
        lambda: autopar.parallelize(make(), "dp=1"),
    ),
    "a parallel model inside": (
        AutoparError, "'0' is a parallel model already, and the module around it cannot be one as well.",
        lambda: autopar.parallelize(nn.Sequential(make()), "dp=1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_to_write(name: str) -> None:
    """Red before: a gradient that was silently none, or a RuntimeError of torch's."""
    error, text, do = REFUSED[name]
    with pytest.raises(error, match=re.escape(text)):
        do()


def test_an_output_requires_a_gradient_where_one_devices_does() -> None:
    model, plain = make(), net()
    for each in (model, plain):
        out = each(X)
        assert type(out) is Tensor and out.requires_grad
        out[0, 0] = 3.0
        out.div_(2.0)
        assert float(out.detach()[0, 0]) == 1.5 and out.argmax().item() == int(out.argmax())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not each(X).requires_grad and each(X).numpy().shape == (6, 4)
        each.requires_grad_(False)
        assert not each(X).requires_grad and each(X).numpy().shape == (6, 4)


def test_a_loss_refuses_a_second_backward_pass() -> None:
    """It is read as one device's is after backward()."""
    loss = make().forward_backward(X)
    assert loss.requires_grad and loss.detach().numpy().shape == () and f"{loss:.3f}" == f"{loss.item():.3f}"
    for again in (loss, loss / 2, loss + loss):
        with pytest.raises(
            AutoparError, match=r"run the backward pass already, and .grad has the gradients. Leave bac"
        ):
            again.backward()


def test_a_model_that_is_compiled_under_inference_mode_trains() -> None:
    model, plain = make(), net()
    with torch.inference_mode():
        torch.testing.assert_close(model(X), plain(X))
    pairs = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, plain)]
    for _ in range(2):
        for each, optimizer in pairs:
            if each is model:
                model.forward_backward(X)
            else:
                loss_fn(plain, X).backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, want), got in zip(plain.state_dict().items(), model.full_state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, msg=name)


def test_a_batch_that_was_made_under_inference_mode() -> None:
    with torch.inference_mode():
        x = X.clone()
    model, plain = make(), net()
    torch.testing.assert_close(model.forward_backward(x), loss_fn(copy.deepcopy(plain), X).detach())


def penalised(model: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    (slope,) = torch.autograd.grad(loss, [model[0].weight], create_graph=True)
    return loss + slope.square().sum()


def test_a_hook_on_what_the_step_itself_takes_a_gradient_of_is_refused() -> None:
    """One device runs it on that gradient, too. A hook on another parameter is run, on both."""
    model, plain = autopar.parallelize(net(), "dp=1", loss_fn=penalised), net()
    hooks = [each.get_parameter("2.weight").register_hook(lambda g: 2 * g) for each in (model, plain)]
    model.forward_backward(X)
    penalised(plain, X).backward()
    for (name, p), got in zip(plain.named_parameters(), model.full_gradients().values(), strict=True):
        torch.testing.assert_close(got, p.grad, msg=name)
    hooks.append(model.get_parameter("0.weight").register_hook(lambda g: g.clamp(-0.01, 0.01)))
    text = "'0.weight' has a hook on its gradient (register_hook), and the step takes a gradient of it itself"
    with pytest.raises(AutoparError, match=re.escape(text)):
        model.forward_backward(X)
    hooks.pop().remove()
    model.forward_backward(X)
