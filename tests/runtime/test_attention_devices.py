"""Attention as a device computes it, against plain products in float64: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.runtime.attention.attention_kernels import kernel_for
from autopar.runtime.attention.attention_plain import plain, plain_backward
from autopar.runtime.attention.attention_whole import attention, attention_backward
from autopar.runtime.attention.blocks import AttentionCall

D, BF16, F16, F32 = torch.float64, torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {F32: 1e-4, F16: 1e-2, BF16: 6e-2}
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def operands(device: str, dtype: torch.dtype, h: int, hk: int, s: int, t: int, d: int, e: int) -> list[Tensor]:
    """grad, q, k, v with the strides that a model has."""
    shapes = ((h, s, e), (h, s, d), (hk, t, d), (hk, t, e))
    return [torch.randn(2, n, heads, width).to(device, dtype).transpose(1, 2) for heads, n, width in shapes]


def mask_of(kind: str, s: int, t: int, device: str, dtype: torch.dtype) -> Tensor | None:
    seen = torch.rand(s, t, device=device) > 0.3
    seen[1] = False  # a row that sees nothing
    match kind:
        case "bool":
            return seen
        case "keys":
            return seen[2].expand(2, 1, 1, t)
        case "additive":
            return torch.randn(4, s, t, device=device, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return None


@devices
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "keys", "additive"])
@pytest.mark.parametrize(
    ("hk", "s", "t", "d", "e"), [(4, 128, 128, 64, 64), (2, 100, 100, 20, 20), (1, 37, 70, 64, 64), (4, 70, 37, 48, 16)]
)
def test_a_device_computes_attention(
    device: str, dtype: torch.dtype, causal: bool, kind: str, hk: int, s: int, t: int, d: int, e: int
) -> None:
    grad, q, k, v = operands(device, dtype, 4, hk, s, t, d, e)
    mask, scale = mask_of(kind, s, t, device, dtype), d**-0.5
    wide = [x.to(D) for x in (grad, q, k, v)]
    wide_mask = mask.to(D) if mask is not None and mask.is_floating_point() else mask
    want = plain(*wide[1:], AttentionCall(wide_mask, causal, scale))
    want_grads = plain_backward(*wide, *want, AttentionCall(wide_mask, causal, scale))
    out, lse = attention(q, k, v, mask, causal, scale)
    grads = attention_backward(grad, q, k, v, mask, out, lse, causal, scale)
    assert kernel_for(q, k, v, AttentionCall(mask, causal, scale)).name != "plain"
    for got, expected in zip((out, lse, *grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(got.to(D), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    if kind in ("bool", "additive"):
        assert out[:, :, 1].abs().max() == 0 and lse[:, :, 1].abs().max() == 0 and grads[0][:, :, 1].abs().max() == 0


@devices
def test_a_device_computes_what_no_fused_kernel_takes(device: str) -> None:
    grad, q, k, v = operands(device, D, 4, 2, 37, 70, 20, 12)
    out, lse = attention(q, k, v, None, True, 0.4)
    want = plain(q, k, v, AttentionCall(None, True, 0.4))
    torch.testing.assert_close((out, lse), want)
    torch.testing.assert_close(
        attention_backward(grad, q, k, v, None, out, lse, True, 0.4),
        plain_backward(grad, q, k, v, *want, AttentionCall(None, True, 0.4)),
    )
