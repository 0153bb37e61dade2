"""RMSNorm as one op: torch's numbers and gradients, on meshes, and in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_brute_force import _rms_norm_backward
from torch import Tensor, nn

import autopar
from autopar.runtime.kernels.norm_kernels import fused, fused_backward, rms_norm, rms_norm_backward

D, BF16 = torch.float64, torch.bfloat16


@pytest.mark.parametrize("shape", [(8,), (6, 8), (4, 6, 8)])
@pytest.mark.parametrize("dtype,tolerance", [(D, 1e-12), (torch.float32, 1e-5), (BF16, 4e-2)], ids=str)
def test_it_is_torchs(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x, weight, grad = torch.randn(4, 6, 8, dtype=dtype), torch.randn(shape, dtype=dtype), torch.randn(4, 6, 8).to(dtype)
    wide = [each.to(D).requires_grad_() for each in (x, weight)]
    want = F.rms_norm(wide[0], shape, wide[1], 1e-3)
    want_grads = torch.autograd.grad(want, wide, grad.to(D))
    y, factor = rms_norm(x, weight, 1e-3)
    assert y.dtype == dtype and factor.dtype == (torch.float32 if dtype is BF16 else dtype)
    for got, expected in zip((y, *rms_norm_backward(grad, x, weight, factor)), (want, *want_grads), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.to(D), expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(8,), (6, 8)])
def test_the_kernels_of_a_gpu_are_given_what_they_take(shape: tuple[int, ...]) -> None:
    """torch computes the first on a CPU too, by parts; of the second there is a stub."""

    def backward(grad: Tensor, x: Tensor, sizes: list[int], rstd: Tensor, weight: Tensor, wanted: list[bool]) -> Any:
        assert tuple(sizes) == weight.shape and list(wanted) == [True, True]
        assert all(each.is_contiguous() for each in (grad, x, rstd, weight))
        return _rms_norm_backward(grad, x, sizes, rstd, weight, wanted)

    x, weight, grad = (
        torch.randn(6, 4, 8, dtype=D).transpose(0, 1),
        torch.randn(shape, dtype=D),
        torch.randn(4, 6, 8).to(D),
    )
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", backward, "CPU")
    try:
        y, factor = fused(x, weight, 1e-3)
        grads = fused_backward(grad, x, weight, factor)
    finally:
        library._destroy()
    want = rms_norm(x, weight, 1e-3)
    torch.testing.assert_close((y, factor), want)
    torch.testing.assert_close(grads, rms_norm_backward(grad, x, weight, want[1]))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def model_of(dtype: torch.dtype = D) -> nn.Module:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-3), nn.Linear(8, 4))
    for norm in (made[1], made[3]):
        nn.init.normal_(norm.weight)
    return made.to(dtype)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3"])
def test_a_norm_is_a_node_on_a_mesh(mesh: str) -> None:
    model, batch = model_of(), (torch.randn(6, 5, 8, dtype=D),)
    text = autopar.compile(model, mesh, loss_fn=square, batch=batch).text()
    assert text.count("autopar.rms_norm.default") == text.count("autopar.rms_norm_backward.default") == 2
    assert "rsqrt" not in text
    report = autopar.verify(model, mesh, loss_fn=square, batch=batch)
    assert report.ok, report


def test_under_a_precision() -> None:
    report = autopar.verify(
        model_of(torch.float32), "dp=2", loss_fn=square, batch=(torch.randn(6, 5, 8),), precision="bf16"
    )
    assert report.ok, report


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_second_derivative_goes_through(is_trained: bool) -> None:
    """A gradient penalty, as without the op."""

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    model = model_of()
    model[1].weight.requires_grad_(is_trained)
    report = autopar.verify(model, "dp=2", loss_fn=penalty, batch=(torch.randn(4, 5, 8, dtype=D),))
    assert report.ok, report


def test_a_norm_keeps_what_it_reads_and_a_number_a_row() -> None:
    from autopar.report.memory.formula import WHOLE, saved_by_module

    def kept(norms: int) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.RMSNorm(64) for _ in range(norms)))
            x = torch.empty(32, 64)
        return saved_by_module(autopar.compile(model, "dp=1", loss_fn=square, batch=(x,)), device="cuda")[WHOLE]

    assert kept(3) - kept(2) == 32 * 64 * 4 + 32 * 4
