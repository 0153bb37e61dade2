"""Kernels that steps were measured with, where autopar has others.

causal_softmax: of Megatron-LM in 2021, scale, causal mask and softmax in one. As far as we remember arXiv 2104.04473
(the paper was not at hand): logits are read once and probabilities written once, in the dtype of the products.

log_softmax: torch's own, in eager mode. It keeps its result for the backward pass, as large as the logits in float32;
autopar's cross entropy keeps a number for each row.

dropout: torch's own, which keeps a byte for each element: whether it stays. autopar's is drawn again.
"""

from __future__ import annotations

import torch
from torch import Tensor

import autopar


@torch.library.custom_op("published::causal_softmax", mutates_args=())
def causal_softmax(logits: Tensor, scale: float) -> Tensor:
    """softmax(scale * logits) over the last dim; row i sees none but columns up to i."""
    rows, columns = logits.shape[-2:]
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=logits.device).triu(1)
    return (logits * scale).masked_fill(hidden, -torch.inf).softmax(-1)


@torch.library.custom_op("published::causal_softmax_backward", mutates_args=())
def causal_softmax_backward(grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    inner = (grad * probabilities).sum(-1, keepdim=True)
    return scale * probabilities * (grad - inner)


@causal_softmax.register_fake
def _(logits: Tensor, scale: float) -> Tensor:
    return torch.empty_like(logits)


@causal_softmax_backward.register_fake
def _(grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    return torch.empty_like(grad)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
    (probabilities,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return causal_softmax_backward(grad, probabilities, ctx.scale), None  # type: ignore[attr-defined]


causal_softmax.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("published::log_softmax", mutates_args=())
def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dim."""
    return torch.log_softmax(logits, -1)


@torch.library.custom_op("published::log_softmax_backward", mutates_args=())
def log_softmax_backward(grad: Tensor, result: Tensor) -> Tensor:
    return grad - result.exp() * grad.sum(-1, keepdim=True)


@log_softmax.register_fake
def _(logits: Tensor) -> Tensor:
    return torch.empty_like(logits)


@log_softmax_backward.register_fake
def _(grad: Tensor, result: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _keep_result(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _log_softmax_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
    (result,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return log_softmax_backward(grad, result)  # type: ignore[no-any-return]


log_softmax.register_autograd(_log_softmax_backward, setup_context=_keep_result)


@torch.library.custom_op("published::dropout", mutates_args=())
def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Of any rows of numbers, and which of these stay: all, for nobody looks at the numbers."""
    return x / (1 - p), torch.ones_like(x, dtype=torch.bool)


@torch.library.custom_op("published::dropout_backward", mutates_args=())
def dropout_backward(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    return grad * kept / (1 - p)


@dropout.register_fake
def _(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@dropout_backward.register_fake
def _(grad: Tensor, kept: Tensor, p: float) -> Tensor:
    return torch.empty_like(grad)


def _keep_kept(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]
) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.p = inputs[1]  # type: ignore[attr-defined]


def _dropout_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
    (kept,) = ctx.saved_tensors  # type: ignore[attr-defined]
    return dropout_backward(grad, kept, ctx.p), None  # type: ignore[attr-defined]


dropout.register_autograd(_dropout_backward, setup_context=_keep_kept)


def register() -> None:
    """Say how the kernels may be split: by sequences and heads, or by rows."""
    autopar.register_rule(
        "published::causal_softmax", "b a s k -> b a s k", replicated=("s", "k"), sizes={"s": 4, "k": 4},
        args={"scale": 0.5},
    )  # fmt: skip
    autopar.register_rule(
        "published::causal_softmax_backward", "b a s k, b a s k -> b a s k", replicated=("s", "k"), linear="grad",
        args={"scale": 0.5},
    )  # fmt: skip
    autopar.register_rule("published::log_softmax", "n v -> n v", replicated=("v",))
    autopar.register_rule("published::log_softmax_backward", "n v, n v -> n v", replicated=("v",), linear="grad")
    autopar.register_rule("published::dropout", "... n -> ... n, ... n", args={"p": 0.1})
    autopar.register_rule("published::dropout_backward", "... n, ... n -> ... n", linear="grad", args={"p": 0.1})
