"""CUDA's attention ops on a CPU: what they promise, computed plainly, and an error for what they do not take.

The gradients are computed from the output and the logsumexp that are handed over, as the kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def stubbed() -> Iterator[list[str]]:
    """Register the stubs meanwhile; gives the names of those that were called."""
    called: list[str] = []
    library = torch.library.Library("aten", "IMPL")
    for function in (cudnn, cudnn_backward, flash, flash_backward, efficient, efficient_backward):
        name = f"_scaled_dot_product_{function.__name__.replace('_backward', '')}_attention"
        name += "_backward" if function.__name__.endswith("_backward") else ""
        library.impl(name, _noting(function, called), "CPU")
    try:
        yield called
    finally:
        library._destroy()


def _noting(function: Any, called: list[str]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        called.append(function.__name__)
        return function(*args, **kwargs)

    return run


def flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0, causal: bool = False, debug: bool = False, *, scale: float
) -> Any:
    _check_rows(q, k, v)
    assert q.shape[3] == k.shape[3] == v.shape[3] <= 256 and p == 0 and not debug
    group = q.shape[1] // k.shape[1]
    out, lse = _forward(q, _each(k, group), _each(v, group), None, _lower(q, k, last=True) if causal else None, scale)
    empty = torch.empty(0)
    return out, lse, None, None, q.shape[2], k.shape[2], empty, empty, empty


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: None, cum_k: None, max_q: int,
    max_k: int, p: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
) -> Any:  # fmt: skip
    _check_rows(grad, q, k, v, out)
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and p == 0 and lse.shape == q.shape[:3]
    group = q.shape[1] // k.shape[1]
    seen = _lower(q, k, last=True) if causal else None
    dq, dk, dv = _backward(grad, q, _each(k, group), _each(v, group), None, seen, out, lse, scale)
    return dq, dk.unflatten(1, (-1, group)).sum(2), dv.unflatten(1, (-1, group)).sum(2)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, p: float = 0, causal: bool = False,
    debug: bool = False, *, scale: float,
) -> Any:  # fmt: skip
    _check_rows(q, k, v)
    _check_bias(bias, q, k)
    assert q.shape[3] == k.shape[3] == v.shape[3] <= 128 and wants_lse and p == 0 and not debug
    group = q.shape[1] // k.shape[1]
    seen = _lower(q, k, last=False) if causal else None
    out, lse = _forward(q, _each(k, group), _each(v, group), bias, seen, scale)
    empty = torch.empty((), dtype=torch.int64)
    return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], empty, empty, None


def cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor | None, cum_q: None, cum_k: None, max_q: int, max_k: int, p: float, causal: bool, *, scale: float,
) -> Any:  # fmt: skip
    _check_rows(grad, q, k, v, out)
    _check_bias(bias, q, k)
    assert (max_q, max_k) == (q.shape[2], k.shape[2]) and p == 0 and lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous() and seed.ndim == offset.ndim == 0
    group = q.shape[1] // k.shape[1]
    seen = _lower(q, k, last=False) if causal else None
    dq, dk, dv = _backward(grad, q, _each(k, group), _each(v, group), bias, seen, out, lse.squeeze(-1), scale)
    return dq, dk.unflatten(1, (-1, group)).sum(2), dv.unflatten(1, (-1, group)).sum(2)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, wants_lse: bool, p: float = 0, causal: bool = False, *,
    scale: float,
) -> Any:  # fmt: skip
    _check_rows(q, k, v)
    _check_bias(bias, q, k)
    assert q.shape[1] == k.shape[1] == v.shape[1] and wants_lse and p == 0
    out, lse = _forward(q, k, v, bias, _lower(q, k, last=False) if causal else None, scale)
    padded = torch.full((*lse.shape[:2], math.ceil(lse.shape[2] / 32) * 32), torch.inf, dtype=lse.dtype)
    padded[:, :, : lse.shape[2]] = lse
    return out, padded, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)


def efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
    offset: Tensor, p: float, wanted: list[bool], causal: bool = False, *, scale: float,
) -> Any:  # fmt: skip
    _check_rows(grad, q, k, v)
    _check_bias(bias, q, k)
    assert out.transpose(1, 2).is_contiguous(), "it reads no strides of rows"
    s = q.shape[2]
    assert lse.shape[2] % 32 == 0 and lse.stride(-1) == 1 and lse[:, :, s:].eq(torch.inf).all()
    assert list(wanted) == [True, True, True, False] and p == 0 and seed.ndim == offset.ndim == 0
    seen = _lower(q, k, last=False) if causal else None
    return (*_backward(grad, q, k, v, bias, seen, out, lse[:, :, :s], scale), None)


def _check_rows(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.ndim == 4 and x.shape[3] % 8 == 0 and x.stride(3) == 1, (x.shape, x.stride())
        assert x.storage_offset() % 8 == 0 and all(stride % 8 == 0 for stride in x.stride()[:3]), x.stride()


def _check_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]) and bias.dtype == q.dtype and bias.stride(3) == 1
        assert all(stride % 16 == 0 for stride in bias.stride()[:3]), bias.stride()
        assert bias.isfinite().all(), "what comes of a row that sees nothing is not known"


def _each(x: Tensor, group: int) -> Tensor:
    return x.repeat_interleave(group, 1)


def _lower(q: Tensor, k: Tensor, last: bool) -> Tensor:
    s, t = q.shape[2], k.shape[2]
    return torch.ones(s, t, dtype=torch.bool).tril(t - s if last else 0)


def _probabilities(
    q: Tensor, k: Tensor, bias: Tensor | None, seen: Tensor | None, scale: float, lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bhsd,bhtd->bhst", q.to(wide), k.to(wide)) * scale
    scores = scores if bias is None else scores + bias
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse[..., None]).exp(), lse


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    weights, lse = _probabilities(q, k, bias, seen, scale, None)
    out = torch.einsum("bhst,bhte->bshe", weights, v.to(weights.dtype))
    return out.to(q.dtype).contiguous().transpose(1, 2), lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None, out: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weights, _ = _probabilities(q, k, bias, seen, scale, lse)
    dtype, wide = q.dtype, weights.dtype
    grad, q, k, v, out = (x.to(wide) for x in (grad, q, k, v, out))
    slope = weights * (torch.einsum("bhse,bhte->bhst", grad, v) - (grad * out).sum(-1, keepdim=True)) * scale
    dq, dk = torch.einsum("bhst,bhtd->bhsd", slope, k), torch.einsum("bhst,bhsd->bhtd", slope, q)
    dv = torch.einsum("bhst,bhse->bhte", weights, grad)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
