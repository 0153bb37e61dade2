"""Tables that a model makes at its first forward and finds from then on: rotary frequencies, ALiBi, causal masks."""

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


class Rotary(nn.Module):
    """rotary-embedding-torch's: a parameter that may be trained, and a buffer that is None at first."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        self.freqs = nn.Parameter(1 / (10_000 ** (torch.arange(0, 8, 2) / 8)), requires_grad=trained)
        self.register_buffer("cached", None, persistent=False)

    def forward(self, n: int) -> Tensor:
        if self.cached is not None and len(self.cached) >= n:
            return self.cached[:n].detach()
        freqs = torch.einsum("i,j->ij", torch.arange(n, dtype=self.freqs.dtype), self.freqs)
        freqs = freqs.repeat_interleave(2, -1)
        self.cached = freqs.detach()
        return freqs


class Rotated(nn.Module):
    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        self.rotary, self.linear = Rotary(trained), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        freqs, h = self.rotary(x.shape[1]), self.linear(x)
        turned = torch.stack([-h[..., 1::2], h[..., ::2]], -1).flatten(-2)
        return h * freqs.cos() + turned * freqs.sin()


class Preallocated(nn.Module):
    """Its newest version: a part of a buffer is written, and how much of it is a number in Python. Other buffers are
    written beside it in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.freqs = nn.Parameter(1 / (10_000 ** (torch.arange(0, 8, 2) / 8)), requires_grad=False)
        self.register_buffer("cached", torch.zeros(16, 8), persistent=False)
        self.register_buffer("steps", torch.zeros(()))
        self.length, self.linear, self.norm = 0, nn.Linear(8, 8), nn.BatchNorm1d(8)

    def angles(self, n: int) -> Tensor:
        if n <= self.length:
            return self.cached[:n].detach()
        freqs = torch.outer(torch.arange(n, dtype=self.freqs.dtype), self.freqs).repeat_interleave(2, -1)
        self.cached[:n], self.length = freqs.detach(), n
        return freqs

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        h = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)
        return (h * self.angles(x.shape[1]).cos()).tanh() + x / self.steps


class Alibi(nn.Module):
    """x-transformers': a buffer that is registered anew, and read by a slice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]).view(2, 1, 1), persistent=False)
        self.register_buffer("bias", None, persistent=False)
        self.query = nn.Linear(8, 8)

    def bias_of(self, n: int, device: torch.device) -> Tensor:
        if self.bias is not None and self.bias.shape[-1] >= n:
            return self.bias[..., -n:, -n:]
        i = torch.arange(n, device=device)
        self.register_buffer("bias", -(i[None, :] - i[:, None]).abs()[None] * self.slopes, persistent=False)
        return self.bias

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
        scores = q @ q.transpose(-1, -2) + self.bias_of(x.shape[1], x.device)
        return (scores.softmax(-1) @ q).transpose(1, 2).flatten(2)


class Lengths(nn.Module):
    """An older llama's: a table on the module, and the length that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / (10_000 ** (torch.arange(0, 8, 2) / 8)))
        self.linear, self.longest, self.cosines = nn.Linear(8, 8), 0, None

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            freqs = torch.outer(torch.arange(self.longest).type_as(self.inverse), self.inverse)
            self.cosines = torch.cat([freqs, freqs], -1).cos()
        assert self.cosines is not None
        return self.linear(x) * self.cosines[: x.shape[1]]


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def rows(n: int = 5) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(12, n, 8)


MODELS = [Rotated, Preallocated, Alibi, Lengths]


@pytest.mark.parametrize("make", MODELS)
def test_the_numbers_are_those_of_one_device(make: Any) -> None:
    verified(made(make), ["dp=2,tp=2", "dp=3"], loss_fn, (rows(),))


@pytest.mark.parametrize("make", [Rotated, Alibi, Lengths])
def test_with_microbatches(make: Any) -> None:
    verified(made(make), ["dp=2", "pp=2"], loss_fn, (rows(),), microbatches=2)


@pytest.mark.parametrize("make", MODELS)
def test_training_over_several_lengths(make: Any) -> None:
    """Parameters lie on the ranks then: that the table does not change is seen without their data."""
    plain = made(make).double()
    parallel = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    state = list(plain.state_dict())
    for n in (5, 5, 7, 3, 7):
        x = rows(n).double()
        for model in (plain, parallel):
            model.zero_grad()
        loss = loss_fn(plain, x)
        loss.backward()
        torch.testing.assert_close(parallel.forward_backward(x), loss.detach(), rtol=1e-10, atol=1e-12)
        gradients = parallel.full_gradients()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)
    assert list(parallel.full_state_dict()) == state


# -- what is no table -----------------------------------------------------------------------------------------------


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.first, self.kept = nn.Linear(8, 8), True, None
        self.register_buffer("seen", torch.ones(8))
        self.register_buffer("scale", torch.rand(8))


class OnlyOnce(Kept):
    """The first step is another one for good."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.first:
            h, self.first = h * 2, False
        return h


class OfTheBatch(Kept):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = x.mean().detach()
        return self.linear(x) * self.kept


class OfATrainedWeight(Rotated):
    def __init__(self) -> None:
        super().__init__(trained=True)


class OfAWrittenBuffer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.seen * 2
        self.seen.add_(1)
        return self.linear(x) * self.kept


class OfAReplacedBuffer(Kept):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.seen * 2
        self.seen = self.seen + 1
        return self.linear(x) * self.kept


class Another(Kept):
    """What is found is not what was computed: nearly, and by the buffer's values alone."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.scale * (1 + 1e-6)
            return self.linear(x) * self.scale
        return self.linear(x) * self.kept


class CountedOnce(Kept):
    """A program would count in each step."""

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.seen.add_(1)
            self.first = False
        return self.linear(x) + self.seen


class CountedOnceAndNotRead(Kept):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.kept is None:
            self.kept = self.scale * 1
            self.seen.add_(1)
            return h * self.scale[:8]
        return h * self.kept


class InitialisedByTheBatch(Kept):
    """As ActNorm and vector quantizers do."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.first:
            self.seen.copy_(h.detach().mean((0, 1)))
            self.first = False
        return h + self.seen


class Growing(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.scale if self.kept is None else self.kept + self.scale
        return self.linear(x) * self.kept


class Alternating(Kept):
    def forward(self, x: Tensor) -> Tensor:
        self.first = not self.first
        return self.linear(x) * (2 if self.first else 1)


@pytest.mark.parametrize(
    "make",
    [OnlyOnce, OfTheBatch, OfATrainedWeight, OfAWrittenBuffer, OfAReplacedBuffer, Another, CountedOnce,
     CountedOnceAndNotRead, InitialisedByTheBatch, Growing, Alternating],
)  # fmt: skip
def test_what_differs_in_the_second_step_is_refused(make: Any) -> None:
    with pytest.raises(CaptureError, match="a second step would not be the same as the first"):
        autopar.compile(made(make), "dp=2", loss_fn=loss_fn, batch=(rows(),))


def test_how_often_a_model_with_a_table_runs() -> None:
    """The step, its second run, a first and a second run by values, the program's second one; and one that looks for
    the line of a change that a note names."""
    model, ran = made(Preallocated), []
    model.linear.register_forward_hook(lambda *_: ran.append(None))
    autopar.compile(model, "dp=2", loss_fn=loss_fn, batch=(rows(),))
    assert len(ran) == 6
