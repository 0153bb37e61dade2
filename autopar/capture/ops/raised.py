"""Which torch functions are raised to semantic ops while a model is traced.

Each entry of `RAISED` takes the arguments of its torch function and returns a result with the same value and
gradients, or `NotImplemented` to leave the call to torch (right all the same, only less can be split).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autopar.capture.ops.raised_attention import attention, multi_head_attention
from autopar.capture.ops.raised_experts import grouped_mm
from autopar.capture.ops.raised_lookups import (
    clamp,
    combinations,
    embedding_bag,
    fill_diagonal_,
    one_hot,
    put,
    setitem,
    take,
    tensor_split,
    where,
    where_self,
)
from autopar.capture.ops.raised_losses import (
    cross_entropy,
    ctc_loss,
    embedding,
    gaussian_nll_loss,
    linear_cross_entropy,
    log_softmax,
    nll_loss,
    rms_norm,
    smooth_l1_loss,
    with_reduction,
)
from autopar.capture.ops.raised_products import (
    addmm,
    bilinear,
    corrcoef,
    cov,
    einsum,
    linear,
    matmul,
    rmatmul,
    with_bias_apart,
)
from autopar.capture.ops.raised_random import RANDOM
from autopar.capture.ops.raised_recurrent import RECURRENT
from autopar.capture.ops.raised_windows import as_strided, average_pool_of, istft, stft
from autopar.capture.ops.validation import check_by_torch
from autopar.torch_compat import GROUPED_MM, backward_in_mode, gradients_in_mode

Tensor = torch.Tensor


def _gradients(mode: Any, outputs: tuple[Any, ...], inputs: tuple[Any, ...], **options: Any) -> Any:
    """Compute gradients inside of a step, and note of what."""
    mode.differentiated += inputs
    return gradients_in_mode(mode, outputs, inputs, **options)


# Raised also where the plain module is run for comparison: what draws random numbers, or may, as a checkpoint that runs
# again inside of a gradient, and what torch cannot compute in float64.
ALWAYS: dict[Any, Callable[..., Any]] = {
    **RANDOM,
    **RECURRENT,
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head_attention,
    GROUPED_MM: grouped_mm,
    torch.autograd.grad: _gradients,
    **dict.fromkeys((torch.autograd.backward, Tensor.backward), backward_in_mode),
}

RAISED: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    torch.matmul: matmul,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: rmatmul,
    torch.bmm: matmul,
    Tensor.bmm: matmul,
    torch.mm: matmul,
    Tensor.mm: matmul,
    torch.addmm: addmm,
    Tensor.addmm: addmm,
    torch.einsum: einsum,
    **dict.fromkeys((F.bilinear, torch.bilinear), bilinear),
    **dict.fromkeys((torch.cov, Tensor.cov), cov),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), corrcoef),
    torch.combinations: combinations,
    **dict.fromkeys((torch.take, Tensor.take), take),
    **dict.fromkeys((torch.put, Tensor.put), put),
    **dict.fromkeys((torch.clamp, Tensor.clamp, torch.clip, Tensor.clip), clamp),
    Tensor.fill_diagonal_: fill_diagonal_,
    Tensor.__setitem__: setitem,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    **dict.fromkeys((F.ctc_loss, torch.ctc_loss), ctc_loss),
    getattr(F, "linear_cross_entropy", None): linear_cross_entropy,  # torch 2.13 has it
    **dict.fromkeys((F.log_softmax, torch.log_softmax, Tensor.log_softmax), log_softmax),
    F.adaptive_avg_pool1d: average_pool_of(1),
    F.adaptive_avg_pool2d: average_pool_of(2),
    F.adaptive_avg_pool3d: average_pool_of(3),
    **dict.fromkeys((torch.stft, Tensor.stft), stft),
    **dict.fromkeys((torch.istft, Tensor.istft), istft),
    torch.as_strided: as_strided,
    Tensor.as_strided: as_strided,
    F.one_hot: one_hot,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    torch.where: where,
    Tensor.where: where_self,
    **dict.fromkeys((F.rms_norm, torch.rms_norm), rms_norm),
    **{function: with_bias_apart(function) for function in (
        torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d,
        torch.conv_transpose3d)},
    F.smooth_l1_loss: smooth_l1_loss,
    # each is a number a row, or an element
    **{loss: with_reduction(loss) for loss in (
        F.mse_loss, F.l1_loss, F.huber_loss, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.kl_div, F.multi_margin_loss,
        F.multilabel_margin_loss)},
}  # fmt: skip

# Those that read values: each takes what runs a call of torch's as if the model made it.
READING: dict[Any, Callable[..., Any]] = {
    F.gaussian_nll_loss: gaussian_nll_loss,
    **dict.fromkeys((torch.tensor_split, Tensor.tensor_split), tensor_split),
}


def raised(run: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    """What the raised form of a function gives; NotImplemented where it has none. run: calls as the model does."""
    if function in RAISED:
        check_by_torch(function, args, kwargs)
        return RAISED[function](*args, **kwargs)
    return READING[function](run, *args, **kwargs) if function in READING else NotImplemented
