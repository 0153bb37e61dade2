"""A few torch functions, raised to semantic ops while a model is traced.

Each entry of `RAISED` takes the arguments of its torch function and returns a result with the same value and
gradients, or `NotImplemented` to leave the call to torch (right all the same, only less can be split).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autopar.capture.functions import Attention, BatchNorm, Contract, CrossEntropy, Dropout, Embedding
from autopar.capture.location import Locator
from autopar.errors import CaptureError
from autopar.ir.ops import op

Tensor = torch.Tensor
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Raise(TorchFunctionMode):
    """Raises functions, and tells the locator of every call; without one, only random ops are raised.

    `seed` feeds the random ops. `lift` is a dtype that all floating-point casts in the model go to instead of
    their own (see `verify`).
    """

    def __init__(
        self, locator: Locator | None = None, seed: Tensor | None = None, lift: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.locator = locator
        self.seed = seed
        self.lift = lift
        self.random_ops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.lift is not None:
            func, args, kwargs = _lifted(func, args, kwargs, self.lift)
        place = self.locator.mark() if self.locator else None
        result: Any = NotImplemented
        if func in _RANDOM:
            result = _RANDOM[func](self, *args, **kwargs)
        elif func in RAISED and self.locator:
            result = RAISED[func](*args, **kwargs)
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if self.locator and place:
            self.locator.adopt(result, place)
        return result

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Dropout of the counter-based generator."""
        if not training or p == 0.0:
            return x
        if self.locator and self.locator.phase == "backward":
            raise CaptureError("dropout inside torch.utils.checkpoint cannot be captured yet: set its p to 0.")
        assert self.seed is not None
        self.random_ops += 1
        result = Dropout.apply(x, self.seed, self.random_ops, float(p))
        return x.copy_(result) if inplace else result


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CASTS = (Tensor.half, Tensor.bfloat16, Tensor.float, Tensor.double)


def _lifted(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """The same call with every floating-point dtype in it replaced."""
    if func in _CASTS:
        return Tensor.to, (args[0], dtype), {}
    args = tuple(dtype if isinstance(a, torch.dtype) and a in _FLOATS else a for a in args)
    return func, args, {k: dtype if isinstance(v, torch.dtype) and v in _FLOATS else v for k, v in kwargs.items()}


def _dropout(mode: Raise, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return mode.dropout(x, p, training, inplace)


def _torch_dropout(mode: Raise, x: Tensor, p: float, train: bool) -> Any:
    return mode.dropout(x, p, train)


def _attention(
    mode: Raise, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    q, k, v = query, key, value
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0]):
        return NotImplemented
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1] or (q.shape[1] != k.shape[1] and not enable_gqa):
        return NotImplemented
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = _autocast(q, k, v)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if mode.locator and dropout_p == 0.0 and not (attn_mask is not None and attn_mask.requires_grad):
        return Attention.apply(q, k, v, attn_mask, is_causal, float(scale))
    if dropout_p == 0.0 and not mode.locator:
        return NotImplemented
    return _plain_attention(mode, q, k, v, attn_mask, dropout_p, is_causal, float(scale))


def _plain_attention(
    mode: Raise, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, causal: bool, scale: float
) -> Tensor:
    """Attention spelled out, for what the semantic op does not do: dropout, and a mask that is trained."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    scores = Contract.apply(q, k, "abcd,abed->abce") * scale
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = mode.dropout(torch.softmax(scores, -1), dropout_p)
    return Contract.apply(weights, v, "abce,abed->abcd")


_RANDOM: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    F.scaled_dot_product_attention: _attention,
}


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the operands of a matmul."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _contract(a: Tensor, b: Tensor, equation: str) -> Any:
    if not (a.is_floating_point() and b.is_floating_point()):
        return NotImplemented
    return Contract.apply(*_autocast(a, b), equation)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.ndim != 2 or input.ndim < 1:
        return NotImplemented
    batch = _LETTERS[2 : input.ndim + 1]
    result = _contract(input, weight, f"{batch}a,ba->{batch}b")
    if result is NotImplemented or bias is None:
        return result
    return result + bias.to(result.dtype)


def _matmul(input: Tensor, other: Tensor) -> Any:
    a, b = input, other
    if a.ndim < 2 or b.ndim < 2:
        return NotImplemented
    if a.ndim > 2 and b.ndim > 2:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    names = _LETTERS[3 : max(a.ndim, b.ndim) + 1]
    left, right = (names if x.ndim > 2 else "" for x in (a, b))
    return _contract(a, b, f"{left}ab,{right}bc->{names}ac")


def _rmatmul(input: Tensor, other: Tensor) -> Any:
    return _matmul(other, input)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    product = _matmul(mat1, mat2)
    if product is NotImplemented:
        return product
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return product + (input if beta == 1 else input * beta).to(product.dtype)


def _einsum(equation: str, *operands: Any) -> Any:
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if not isinstance(equation, str) or len(operands) != 2:
        return NotImplemented
    equation = equation.replace(" ", "")
    left, arrow, result = equation.partition("->")
    if not arrow or "." in equation or left.count(",") != 1:
        return NotImplemented
    a, b = left.split(",")
    if any(len(set(names)) != len(names) for names in (a, b, result)):
        return NotImplemented
    if any((name in a) + (name in b) + (name in result) < 2 for name in set(a + b + result)):
        return NotImplemented
    sizes: dict[str, int] = {}
    for names, operand in zip((a, b), operands, strict=True):
        for name, size in zip(names, operand.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                return NotImplemented
    return _contract(*operands, equation)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    legacy = size_average is not None or reduce is not None
    if legacy or weight is not None or label_smoothing or target.is_floating_point():
        return NotImplemented
    x = input.movedim(1, -1) if input.ndim > 2 else input
    if torch.is_autocast_enabled(x.device.type):
        x = x.float()
    losses = CrossEntropy.apply(x, op("checked_index")(target, x.shape[-1], ignore_index))
    return _reduce_valid(losses, target != ignore_index, reduction)


def _nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    if size_average is not None or reduce is not None or weight is not None or input.ndim < 2:
        return NotImplemented
    x = input.movedim(1, -1)
    valid = target != ignore_index
    target = op("checked_index")(target, x.shape[-1], ignore_index)
    safe = torch.where(valid, target, 0)
    losses = -x.gather(-1, safe.unsqueeze(-1)).squeeze(-1)
    return _reduce_valid(losses, valid, reduction)


def _reduce_valid(losses: Tensor, valid: Tensor, reduction: str) -> Any:
    """The mean is a sum over a count, so that unevenly spread ignored labels weigh the same on any mesh."""
    losses = torch.where(valid, losses, 0.0)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / valid.sum().to(total.dtype)


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    if max_norm is not None or scale_grad_by_freq or sparse or weight.ndim != 2:
        return NotImplemented
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Embedding.apply(weight, op("checked_index")(input, weight.shape[0], None), padding)


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    if not training:
        assert running_mean is not None and running_var is not None
        shape = [input.shape[1] if dim == 1 else 1 for dim in range(input.ndim)]
        y = (input - running_mean.reshape(shape)) * (running_var + eps).rsqrt().reshape(shape)
        y = y if weight is None else y * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)
    y, mean, variance = BatchNorm.apply(input, weight, bias, eps)
    if running_mean is not None and running_var is not None:
        count = input.numel() // input.shape[1]
        with torch.no_grad():
            running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
            running_var.copy_(running_var * (1 - momentum) + variance * (momentum * count / (count - 1)))
    return y


def _with_reduction(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """An elementwise loss: computed unreduced, then summed or averaged."""

    def raised(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.pop("reduction", "mean")
        legacy = kwargs.get("size_average") is not None or kwargs.get("reduce") is not None
        if args or legacy or reduction not in ("mean", "sum"):
            return NotImplemented
        losses = function(input, target, **kwargs, reduction="none")
        return losses.sum() / losses.numel() if reduction == "mean" else losses.sum()

    return raised


def _mha(
    query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int, in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None, add_zero_attn: bool, dropout_p: float,
    out_proj_weight: Tensor, out_proj_bias: Tensor | None, training: bool = True,
    key_padding_mask: Tensor | None = None, need_weights: bool = True, attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Any = None, k_proj_weight: Any = None,
    v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:  # fmt: skip
    """`F.multi_head_attention_forward` for a packed projection, [seq, batch, embed] in and out."""
    unusual = bias_k is not None or add_zero_attn or use_separate_proj_weight or static_k is not None
    if unusual or need_weights or in_proj_weight is None or query.ndim != 3 or (dropout_p and training):
        return NotImplemented
    embed, batch = query.shape[-1], query.shape[1]
    biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))
    if query is key and key is value:
        parts = list(_linear(query, in_proj_weight, in_proj_bias).chunk(3, -1))
    else:
        weights = in_proj_weight.chunk(3)
        parts = [_linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
    q, k, v = (x.unflatten(-1, (num_heads, embed // num_heads)).permute(1, 2, 0, 3) for x in parts)
    mask = _merge_masks(attn_mask, key_padding_mask, batch, num_heads, q.dtype)
    out = Attention.apply(q, k, v, mask, is_causal and mask is None, 1.0 / math.sqrt(embed // num_heads))
    return _linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), None


def _merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one additive mask [batch or 1, heads or 1, s or 1, t]; a True in a bool mask is left out."""
    masks = []
    if attn_mask is not None:
        shaped = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (batch, heads))
        masks.append(shaped)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    merged: Tensor | None = None
    for mask in masks:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
        merged = mask if merged is None else merged + mask
    return merged


_LOSSES = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
           F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.kl_div)  # fmt: skip

RAISED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.bmm: _matmul,
    Tensor.bmm: _matmul,
    torch.mm: _matmul,
    Tensor.mm: _matmul,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.einsum: _einsum,
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.embedding: _embedding,
    F.batch_norm: _batch_norm,
    F.multi_head_attention_forward: _mha,
    **{loss: _with_reduction(loss) for loss in _LOSSES},
}
