"""A call of the model itself leaves behind what it does on one device: random numbers and buffers move on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Ranks
from side_by_side import assert_close
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as spectral_parametrization

import autopar

pytestmark = pytest.mark.gloo


class ByRows(nn.Module):
    """Buffers that no row decides, so that micro-batches may be computed one after another: u and v of spectral norms,
    and counters that are written in place, bound anew, kept by a submodule, not saved, and counted in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = spectral_norm(nn.Linear(4, 4))
        self.last: nn.Module = spectral_parametrization(nn.Linear(4, 4))
        for name in ("calls", "rebound"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long))
        self.register_buffer("trained", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rebound = self.rebound + 2
        if self.training:
            self.trained.add_(1)
        x = self.first(x) * self.trained.cos() + self.calls
        return self.last(x.tanh()) * self.rebound  # type: ignore[no-any-return]


class Together(nn.Module):
    """The same, and statistics of the batch: BatchNorm, InstanceNorm, an average of a codebook, a running maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = ByRows(), nn.BatchNorm1d(4)
        self.instances = nn.InstanceNorm1d(2, track_running_stats=True)
        self.register_buffer("codes", torch.arange(12.0).view(3, 4) / 6 - 1)
        self.register_buffer("highest", torch.full((), -9.0))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x))
        nearest = torch.cdist(h, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(nearest, 3).to(h.dtype)
                self.codes.mul_(0.9).add_(hits.t() @ h / (hits.sum(0)[:, None] + 1), alpha=0.1)
        self.highest.copy_(torch.maximum(self.highest, h.detach().amax()))
        h = h + (self.codes[nearest] - h).detach()
        return self.instances(h.view(-1, 2, 2)).flatten(1) * self.highest  # type: ignore[no-any-return]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()  # type: ignore[no-any-return]


def _compare(rank: int, kind: type[nn.Module], mesh: str, options: dict[str, Any]) -> None:
    """Forward calls and steps in turn, in both modes, beside the plain module: each output and all buffers after it."""
    torch.manual_seed(0)
    plain = kind().double()
    model: Any = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=_loss, **options)
    for mode, calls in (("train", "ffsfs"), ("eval", "fs"), ("train", "f")):
        for module in (plain, model):
            getattr(module, mode)()
        for number, call in enumerate(calls):
            x = torch.randn(8, 4, dtype=torch.float64)
            want = plain(x) if call == "f" else _loss(plain, x)
            got = model(x) if call == "f" else model.forward_backward(x)
            assert_close({"output": got.detach()}, {"output": want.detach()}, f"{mode} {number}")
            assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), f"{mode} {number}")
            assert dict(plain.named_buffers())  # the table is there


def test_buffers_move_on_in_forward_as_on_one_device(two: Ranks) -> None:
    _compare(0, Together, "dp=1", {})
    dist.destroy_process_group()
    for kind, mesh, options in ((Together, "dp=2", {}), (ByRows, "tp=2", {}), (ByRows, "pp=2", {"microbatches": 2})):
        two.run(_compare, kind, mesh, options)


class Policy(nn.Module):
    """Samples, masks and noise, as a policy and a variational model draw them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.drop = nn.Linear(4, 4), nn.Linear(4, 6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.layer(self.first(x).tanh())
        return (
            torch.distributions.Categorical(logits=h, validate_args=False).sample(),
            self.drop(h),
            torch.randn_like(h),
        )


def _policy_loss(model: nn.Module, x: Tensor) -> Any:
    drawn = model(x)
    return drawn[1].sum(), drawn


def _draws(rank: int, mesh: str, calls: str, options: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """What is drawn in forward calls (f), steps (s), and forward calls in eval mode (e)."""
    torch.manual_seed(0)
    model: Any = autopar.parallelize(Policy().double(), mesh, loss_fn=_policy_loss, **options)
    found = []
    for call in calls:
        torch.manual_seed(7)  # torch's own generator plays no part
        model.train(call != "e")
        x = torch.ones(32, 4, dtype=torch.float64)
        if call == "s":
            model.forward_backward(x)
        drawn = model.last_aux if call == "s" else model(x)
        found.append(tuple(each.detach().clone() for each in drawn))
    assert (model.random_state.steps, model.random_state.forwards) == (calls.count("s"), len(calls) - calls.count("s"))
    return found


def _alone(calls: str) -> list[tuple[Tensor, ...]]:
    found = _draws(0, "dp=1", calls, {})
    dist.destroy_process_group()
    return found


def test_each_call_draws_anew_and_all_ranks_and_meshes_alike(two: Ranks) -> None:
    calls = "ffsfse"
    want = _alone(calls)
    for i, one in enumerate(want):
        for other in want[:i]:
            for kind, (a, b) in enumerate(zip(one, other, strict=True)):
                assert not torch.equal(a, b), f"draw {kind} is repeated"
    for mesh, options in (("dp=2", {}), ("tp=2", {}), ("pp=2", {"microbatches": 2})):
        for found in two.run(_draws, mesh, calls, options):
            for one, other in zip(want, found, strict=True):
                for a, b in zip(one, other, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_forward_calls_leave_the_masks_of_training_as_they_are() -> None:
    with_them, without = _alone("fsffs"), _alone("ss")
    for one, other in zip((with_them[1], with_them[4]), without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
