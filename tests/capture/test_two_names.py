"""One module under two names, as peft's prompt encoders, tied encoders and `ModuleList([layer, layer])` register it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.errors import CaptureError


class Prompt(nn.Module):
    """A prompt encoder that the model keeps under another name too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.base = nn.Embedding(4, 8), nn.Linear(8, 8)
        self.words, self.shared = self.embedding, self.base

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.words(torch.arange(4)).expand(len(x), -1, -1)
        again = self.embedding.weight.expand(len(x), -1, -1)
        return self.base(torch.cat([prompt, x], 1)) + self.shared(torch.cat([again, x], 1)).tanh()


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([layer, layer, layer])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Tied(nn.Module):
    """Buffers and a plain tensor under two names, beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5))
        self.encoder.scale = torch.linspace(0, 1, 8, dtype=torch.float64)
        self.decoder = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x) * self.encoder.scale).tanh() * self.decoder.scale


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make().double()


def rows() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(12, 5, 8, dtype=torch.float64)


@pytest.mark.parametrize("make", [Prompt, Repeated, Tied])
def test_the_numbers_are_those_of_one_device(make: Any) -> None:
    verified(made(make), ["dp=2,tp=2", "dp=3"], loss_fn, (rows(),))


@pytest.mark.parametrize("make", [Prompt, Repeated])
def test_in_stages_and_with_microbatches(make: Any) -> None:
    verified(made(make), ["pp=2,dp=2", "dp=3"], loss_fn, (rows(),), microbatches=2)


@pytest.mark.parametrize("make", [Prompt, Repeated, Tied])
def test_state_and_gradients_are_those_of_the_plain_model(make: Any) -> None:
    plain = made(make)
    parallel = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    for _ in range(2):
        plain.zero_grad()
        parallel.zero_grad()
        loss = loss_fn(plain, rows())
        loss.backward()
        torch.testing.assert_close(parallel.forward_backward(rows()), loss.detach())
        found = parallel.full_gradients()
        assert list(found) == [name for name, _ in plain.named_parameters()]
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad)
    state = parallel.full_state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)


def test_a_capture_leaves_the_model_as_it_was() -> None:
    model = made(Tied)
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert before == {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


def test_a_model_that_shares_a_part_with_its_teacher() -> None:
    model = made(Tied)
    teacher = nn.Sequential(model.encoder, nn.Linear(8, 8).double())

    def distil(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) - teacher(x)).square().mean()

    report = autopar.verify(model, "dp=2,tp=2", loss_fn=distil, batch=(rows(),))
    assert report.ok and report.max_error < 1e-10, report


class Replacing(Prompt):
    def forward(self, x: Tensor) -> Tensor:
        self.words.weight = nn.Parameter(self.embedding.weight.detach() * 2)
        return super().forward(x)


def test_a_parameter_that_is_replaced_under_its_second_name_is_still_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        autopar.compile(made(Replacing), "dp=2", loss_fn=loss_fn, batch=(rows(),))
    line = Replacing.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in str(caught.value)
    assert "a parameter 'embedding.weight' that is made or replaced while the model runs" in str(caught.value)
