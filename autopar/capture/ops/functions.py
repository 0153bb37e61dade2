"""Semantic ops with their gradients, as autograd functions over the ops of `autopar.ir.ops.ops`.

A backward pass that is itself differentiated (`autograd.grad(..., create_graph=True)`, a gradient penalty) runs with
gradients enabled. The ops have none of their own, so it goes through the functions, or is refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from autopar.capture.refusals.constructs import Construct
from autopar.capture.refusals.explain_failure import refusal
from autopar.capture.refusals.location import user_frame
from autopar.ir.ops.ops import op

Tensor = torch.Tensor
Move = Callable[[Tensor, Tensor], None]  # writes running statistics: mean and variance


_CAST_BY_AUTOCAST = (torch.float32, torch.float16, torch.bfloat16)


def _once(name: str) -> None:
    """Refuse a second derivative: it would be zero without a word."""
    if torch.is_grad_enabled():
        construct = Construct(
            f"a gradient with create_graph=True that goes through {name}, whose second derivative is not supported",
            f"Take the gradient of a part without it, or write {name} in elementwise functions and matmul.",
        )
        raise refusal(construct, user_frame(sys._getframe(1)))


def _as_product(operand: Tensor) -> Tensor:
    """What torch.autocast makes of an operand of a product; it looks into none of ours."""
    kind = operand.device.type
    if not torch.is_autocast_enabled(kind) or operand.dtype not in _CAST_BY_AUTOCAST:
        return operand
    return operand.to(torch.get_autocast_dtype(kind))


class OneResult(Function):
    """A function of one result. Where no gradient comes to it, as from a Function of the user's that gives None, none
    goes on, as of torch's own functions: zeros would be a gradient, by which an optimizer steps."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward, backward = cls.forward, cls.backward

        def forward_alone(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            return forward(ctx, *args)

        def backward_if_any(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads) if grads[0] is not None else (None,) * len(ctx.needs_input_grad)

        cls.forward, cls.backward = staticmethod(forward_alone), staticmethod(backward_if_any)  # type: ignore[method-assign]


class Einsum(OneResult):
    """Einsum of two operands; every name stands in at least two of the three tensors."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, equation: str) -> Tensor:
        a, b = (_as_product(operand) for operand in (a, b))
        need_a, need_b, _ = ctx.needs_input_grad  # what no gradient asks for may be written meanwhile, as in torch
        ctx.save_for_backward(a if need_b else None, b if need_a else None)
        ctx.equation = equation
        return op("einsum")(a, b, equation)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        a, b = ctx.saved_tensors
        left, result = ctx.equation.split("->")
        names_a, names_b = left.split(",")
        need_a, need_b, _ = ctx.needs_input_grad
        einsum: Any = Einsum.apply if torch.is_grad_enabled() else op("einsum")
        grad_a = einsum(grad, b, f"{result},{names_b}->{names_a}") if need_a else None
        grad_b = einsum(grad, a, f"{result},{names_a}->{names_b}") if need_b else None
        return grad_a, grad_b, None


class Attention(OneResult):
    """softmax(q k^T scale + mask) v (Vaswani et al. 2017) with the logsumexp kept for the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        out, lse = op("attention")(q, k, v, mask, causal, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.rest, ctx.mask = (causal, scale), mask
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        q, k, v, mask, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_attention_backward(grad, q, k, v, ctx.mask, *ctx.rest), None, None, None  # a constant as it is
        grad_q, grad_k, grad_v = op("attention_backward")(grad, q, k, v, mask, out, lse, *ctx.rest)
        return grad_q, grad_k, grad_v, None, None, None


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of attention with its probabilities [b,h,s,t] written out, of which a second derivative is taken.
    Shapes: as of the op."""
    each = k.shape[1], q.shape[1] // k.shape[1]  # heads that share keys
    qs, ks, vs, grads = widened(q).unflatten(1, each), widened(k), widened(v), widened(grad).unflatten(1, each)
    scores = Einsum.apply(qs, ks, "bngsd,bntd->bngst") * scale
    kept: Any = True
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, each)
        kept, scores = (mask, scores) if mask.dtype == torch.bool else (mask != -math.inf, scores + mask)
    if causal:
        s, t = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
        kept = (s.unsqueeze(1) >= t) & kept
    if kept is not True:  # a row of which nothing is kept has no share of anything
        scores = torch.where(kept, scores, torch.finfo(scores.dtype).min)
    p = LogSoftmax.apply(scores).exp()
    p = p if kept is True else torch.where(kept, p, 0.0)
    by_share = Einsum.apply(grads, vs, "bngse,bnte->bngst")
    by_score = p * (by_share - (by_share * p).sum(-1, keepdim=True)) * scale
    found = (
        Einsum.apply(by_score, ks, "bngst,bntd->bngsd").flatten(1, 2),
        Einsum.apply(by_score, qs, "bngst,bngsd->bntd"), Einsum.apply(p, grads, "bngst,bngse->bnte"),
    )  # fmt: skip
    grad_q, grad_k, grad_v = (one.to(x.dtype) for one, x in zip(found, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


class DroppedAttention(OneResult):
    """Attention with dropout of its probabilities, by a mask that is drawn again for the backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seed: Tensor, causal: bool, scale: float,
        key: int, p: float,
    ) -> Tensor:  # fmt: skip
        shape = [*q.shape[:3], k.shape[2]]
        ctx.rest = (causal, scale, key, p, shape, shape, [0] * 4)
        out, lse = op("dropped_attention")(q, k, v, mask, seed, *ctx.rest)
        ctx.save_for_backward(q, k, v, mask, out, lse, seed)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _once("attention")
        (grad,) = grads
        grad_q, grad_k, grad_v = op("dropped_attention_backward")(grad, *ctx.saved_tensors, *ctx.rest)
        return grad_q, grad_k, grad_v, None, None, None, None, None, None


class CrossEntropy(OneResult):
    """-log softmax(x)[index] over the last dim: logsumexp(x) - x[index], both partial if the classes are split
    (vocabulary-parallel loss, arXiv 1909.08053 section 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        lse = op("logsumexp")(x)
        ctx.save_for_backward(x, lse, index)
        return (lse - op("pick")(x, index)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, lse, index = ctx.saved_tensors
        return _cross_entropy_backward(grad, x, lse, index, grad), None


class SmoothedCrossEntropy(OneResult):
    """-sum_c q_c log softmax(x)_c over the last dim, where q = near * onehot(index) + share * w (arXiv 1512.00567).

    w is one if None. All that is summed over the classes is partial if they are split, and one value a row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, w: Tensor | None, near: Tensor | float, share: float) -> Tensor:
        lse = op("logsumexp")(x)
        total: Any = x.shape[-1] if w is None else w.sum()
        if w is None:
            spread = x.sum(-1, dtype=torch.float32 if x.dtype.itemsize == 2 else None).to(lse.dtype) * share
        else:
            names = "abcdefgh"[: x.ndim]
            spread = op("einsum")(x, w * share, f"{names},{names[-1]}->{names[:-1]}")
        both = near + total * share
        ctx.save_for_backward(x, lse, index, w, *((near, both) if w is not None else ()))
        ctx.near, ctx.both, ctx.share = (near, both, share) if w is None else (None, None, share)
        exact = near.to(lse.dtype) if isinstance(near, Tensor) else near  # lse times the sum of what the rest has
        return (lse * (exact + total * share) - (op("pick")(x, index).to(lse.dtype) * exact + spread)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, lse, index, w, *scales = ctx.saved_tensors
        near, both = scales or (ctx.near, ctx.both)
        grad_x = _cross_entropy_backward(grad * both, x, lse, index, grad * near)
        spread = (grad * ctx.share).unsqueeze(-1)
        return grad_x - (spread if w is None else spread * w), None, None, None, None


def _cross_entropy_backward(grad: Tensor, x: Tensor, lse: Tensor, index: Tensor, near: Tensor) -> Tensor:
    """grad * softmax(x) - near * onehot(index), of which a second derivative is taken where gradients are enabled."""
    if not torch.is_grad_enabled():
        given = (grad, x, lse, index) if near is grad else (grad, x, lse, index, near)
        found: Tensor = op("cross_entropy_backward")(*given)
        return found
    spread = grad.unsqueeze(-1) * LogSoftmax.apply(widened(x)).exp()
    return (spread - PickBackward.apply(near, index, x.shape[-1])).to(x.dtype)


class Pick(OneResult):
    """x[index] over the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = x.shape[-1]
        return op("pick")(x, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (index,) = ctx.saved_tensors
        return PickBackward.apply(grad, index, ctx.size), None


class PickBackward(OneResult):
    """The gradient of `Pick`: each value in the place of its index, among zeros."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        found: Tensor = op("pick_backward")(grad, index, size)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Pick.apply(grads[0], *ctx.saved_tensors), None, None


class LogSoftmax(OneResult):
    """x - logsumexp(x) over the last dim, which may be split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        lse = op("logsumexp")(x).unsqueeze(-1)
        near = lse.to(x.dtype)  # lse as two numbers of x's dtype, so that none of x's size is wider
        y = x - near if near.dtype == lse.dtype else x - near - (lse - near).to(x.dtype)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (y,) = ctx.saved_tensors
        return grad - y.exp() * grad.sum(-1, keepdim=True)


class Embedding(OneResult):
    """weight[index]; the gradient of row `padding` is left out if padding >= 0."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.padding = weight.shape[0], padding
        return op("embedding")(weight, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (index,) = ctx.saved_tensors
        return EmbeddingBackward.apply(grad, index, ctx.rows, ctx.padding), None, None


class EmbeddingBackward(OneResult):
    """The gradient of `Embedding`: the sums of the rows of each index."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, index: Tensor, rows: int, padding: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.padding = padding
        found: Tensor = op("embedding_backward")(grad, index, rows, padding)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (index,) = ctx.saved_tensors
        rows = Embedding.apply(grads[0], index, -1)
        if ctx.padding >= 0:
            rows = torch.where((index == ctx.padding).unsqueeze(-1), 0.0, rows)
        return rows, None, None, None


class ExpertMM(OneResult):
    """Row i of x [s,k] times matrix index[i] of w [g,k,n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, index)
        return op("expert_mm")(x, w, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        _once("grouped_mm")
        x, w, index = ctx.saved_tensors
        need_x, need_w, _ = ctx.needs_input_grad
        grad_x = op("expert_mm")(grad, w.transpose(1, 2), index) if need_x else None
        if not need_w:
            return grad_x, None, None
        is_turned = w.stride(1) < w.stride(2)  # then the gradient lies as what w is a view of: none copies it
        pair = (grad, x) if is_turned else (x, grad)
        grad_w = op("expert_mm_backward")(*pair, index, w.shape[0])
        return grad_x, grad_w.transpose(1, 2) if is_turned else grad_w, None


class CTCLoss(OneResult):
    """-log p of each target; with `zero_infinity`, one that cannot be has no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
    ) -> Tensor:
        ctx.save_for_backward(x, targets, lengths, target_lengths)
        ctx.rest = (blank, zero_infinity)
        return op("ctc_loss")(x, targets, lengths, target_lengths, blank)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _once("ctc_loss")
        grad_x = op("ctc_loss_backward")(grads[0], *ctx.saved_tensors, *ctx.rest)
        return grad_x, None, None, None, None, None


class Dropout(OneResult):
    """x * keep / (1 - p), keep a function of (seed, key, index of the element) alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, key: int, p: float) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.rest = (key, p)
        return _dropout(x, seed, key, p)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (seed,) = ctx.saved_tensors
        return Dropout.apply(grad, seed, *ctx.rest), None, None, None


def _dropout(x: Tensor, seed: Tensor, key: int, p: float) -> Tensor:
    shape = list(x.shape)
    return op("dropout")(x, seed, key, p, shape, shape, [0] * len(shape))


class RMSNorm(OneResult):
    """x / sqrt(mean(x^2) + eps) * weight over the dims of the weight (arXiv 1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, factor = op("rms_norm")(x, weight, eps)
        ctx.save_for_backward(x, weight, factor)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight, factor = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *op("rms_norm_backward")(grad, x, weight, factor), None
        dims, rows = list(range(-weight.ndim, 0)), list(range(x.ndim - weight.ndim))
        factor = (x.square().mean(dims, keepdim=True) + ctx.eps).rsqrt()  # hangs on x
        normal, scaled = x * factor, grad * weight
        grad_x = factor * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))
        return grad_x, (grad * normal).sum(rows) if rows else grad * normal, None


class BatchNorm(OneResult):
    """Normalisation over all dims but 1 with the statistics of the whole batch (arXiv 1502.03167).

    Sums and element counts are apart, so that a split batch sums right. Short floats are computed in float32 and
    rounded once, as torch's kernels do: a sum of many would overflow in float16, and one rounded mean is an error of
    the same sign in all rows. move: takes mean and biased variance, before anything is saved: there a checkpoint that
    computes this again may end, and torch's kernels have written running statistics by then.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, move: Move) -> Tensor:
        shape, wide = _per_channel(x)[1], widened(x)
        mean, variance, rstd, normal = _normalised(wide, eps)
        y = normal
        if weight is not None:
            y = y * weight.reshape(shape)
        if bias is not None:
            y = y + bias.reshape(shape)
        move(mean, variance)
        # What is kept of a short float is short.
        ctx.save_for_backward(*((x, mean) if x.dtype != wide.dtype else (normal, None)), rstd, weight, x)
        ctx.has_bias, ctx.eps = bias is not None, eps
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept, mean, rstd, weight, x = ctx.saved_tensors
        dims, shape, count = _per_channel(x)
        grad = widened(grads[0])
        if torch.is_grad_enabled():
            *_, rstd, normal = _normalised(widened(x), ctx.eps)  # hang on x
        else:
            normal = kept if mean is None else (widened(kept) - mean.reshape(shape)) * rstd.reshape(shape)
        grad_bias = grad.sum(dims)
        grad_weight = (grad * normal).sum(dims)
        scale = rstd if weight is None else rstd * weight
        inner = grad - (grad_bias / count).reshape(shape) - normal * (grad_weight / count).reshape(shape)
        grad_x = (inner * scale.reshape(shape)).to(grads[0].dtype) if ctx.needs_input_grad[0] else None
        if weight is None:
            return grad_x, None, None, None, None
        grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, grad_bias.to(weight.dtype) if ctx.has_bias else None, None, None


class GroupedBatchNorm(OneResult):
    """Normalisation with statistics of each group of samples, as those of a micro-batch.

    The counts that sums are divided by are those of a batch that is one group. synced: as of `in_groups`. move: as of
    `BatchNorm`, of mean and unbiased variance with the dims of `in_groups`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, synced: bool, move: Move
    ) -> Tensor:
        grouped = op("in_groups")(widened(x), synced)
        dims, shape, count = _per_channel_of_group(grouped)
        mean = grouped.sum(dims, keepdim=True) / count
        centred = grouped - mean
        squares = (centred * centred).sum(dims, keepdim=True)
        rstd = (squares / count + eps).rsqrt()
        unbiased = squares / (count - 1)
        y = normal = centred * rstd
        if weight is not None:
            y = y * weight.reshape(shape)
        if bias is not None:
            y = y + bias.reshape(shape)
        move(mean, unbiased)
        kept = normal if x.dtype == grouped.dtype else x  # of a short float what is short
        ctx.save_for_backward(kept, grouped, mean, rstd, weight)
        ctx.has_bias, ctx.synced, ctx.shape = bias is not None, synced, list(x.shape)
        return y.reshape(x.shape).to(x.dtype, copy=True)  # no view: an activation may write into it

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _once("batch norm")
        kept, grouped, mean, rstd, weight = ctx.saved_tensors
        dims, shape, count = _per_channel_of_group(grouped)
        is_normal = kept.ndim == grouped.ndim
        normal = kept if is_normal else (op("in_groups")(widened(kept), ctx.synced, grouped) - mean) * rstd
        grad = op("in_groups")(widened(grads[0]), ctx.synced, grouped)
        total, along = grad.sum(dims, keepdim=True), (grad * normal).sum(dims, keepdim=True)
        scale = rstd if weight is None else rstd * weight.reshape(shape)
        inner = (grad - total / count - normal * (along / count)) * scale
        grad_x = inner.reshape(ctx.shape).to(grads[0].dtype) if ctx.needs_input_grad[0] else None
        if weight is None:
            return grad_x, None, None, None, None, None
        others = [dim for dim in range(grouped.ndim) if dim != _CHANNEL]
        grad_weight, grad_bias = along.sum(others).to(weight.dtype), total.sum(others).to(weight.dtype)
        return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None, None, None


class InMicrobatches(OneResult):
    """The rows of a tensor as [count, rows of each micro-batch, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.shape = list(x.shape)
        rows: Tensor = op("in_microbatches")(x, count)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].reshape(ctx.shape), None


def widened(x: Tensor) -> Tensor:
    """A short float in float32, in which torch's kernels add and normalise; any other tensor as it is."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize < torch.float32.itemsize else x


def _per_channel(x: Tensor) -> tuple[list[int], list[int], int]:
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [x.shape[1] if dim == 1 else 1 for dim in range(x.ndim)]
    return dims, shape, x.numel() // x.shape[1]


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The mean, the biased variance and the reciprocal of the deviation of each channel, and what is normalised."""
    dims, shape, count = _per_channel(x)
    mean = x.sum(dims) / count
    centred = x - mean.reshape(shape)
    variance = (centred * centred).sum(dims) / count
    rstd = (variance + eps).rsqrt()
    return mean, variance, rstd, centred * rstd.reshape(shape)


_CHANNEL = 3  # behind the dims of `in_groups`


def _per_channel_of_group(x: Tensor) -> tuple[list[int], list[int], int]:
    dims = [0, 2, *range(_CHANNEL + 1, x.ndim)]  # all but groups and channels
    shape = [x.shape[dim] if dim == _CHANNEL else 1 for dim in range(x.ndim)]
    return dims, shape, math.prod(x.shape[dim] for dim in dims)
