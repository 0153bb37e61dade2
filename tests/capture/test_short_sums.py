"""Means and statistics of short floats: added up in float32, as torch's kernels do, and rounded once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autopar

LARGE = 40.0  # 40 * 64 * 64 is beyond float16


class Means(nn.Module):
    """A mean of many large elements, taken as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        norms = {"batch": nn.BatchNorm2d(3), "instance": nn.InstanceNorm2d(3, affine=True, track_running_stats=True)}
        self.norm = norms.get(kind, nn.Identity())
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.conv(x) + LARGE)
        pooled = hidden.flatten(2).mean(-1) if self.kind == "flat" else hidden.mean((2, 3))
        return self.head(pooled - (LARGE if self.kind in ("dims", "flat") else 0.0))


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).float(), y)


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().double()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["dims", "flat", "batch", "instance"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_short_floats_do_not_overflow(kind: str, dtype: torch.dtype, training: bool) -> None:
    torch.manual_seed(0)
    model = Means(kind).to(dtype).train(training)
    x, y = torch.randn(4, 2, 64, 64).to(dtype), torch.tensor([0, 1, 1, 0])
    plain = copy.deepcopy(model)
    loss = loss_fn(plain, x, y)
    loss.backward()
    ours = autopar.parallelize(model, "dp=1", loss_fn=loss_fn)
    assert abs(ours.forward_backward(x, y).item() - loss.item()) < 0.02 * loss.item()
    unit = torch.finfo(dtype).eps
    for name in ("head.weight", "head.bias"):
        expected, given = plain.get_parameter(name).grad, dict(ours.named_parameters())[name].grad
        assert expected is not None and given is not None and expected.dtype == given.dtype
        torch.testing.assert_close(whole(given), expected.double(), rtol=16 * unit, atol=16 * unit)
    for name, buffer in plain.named_buffers():
        given = dict(ours.named_buffers())[name]
        assert given.dtype == buffer.dtype
        torch.testing.assert_close(whole(given), buffer.double(), rtol=4 * unit, atol=4 * unit)


def test_a_mean_of_integers_in_a_short_float_is_whole() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.float16)
    ours = autopar.parallelize(
        model, "dp=1", loss_fn=lambda model, x: (model.weight * x.mean(dtype=torch.float16)).sum()
    )
    loss = ours.forward_backward(torch.full((4, 50_000), 2.0))
    weight = whole(dict(ours.named_parameters())["weight"])
    assert loss.item() == pytest.approx(2.0 * float(weight), rel=1e-2)
