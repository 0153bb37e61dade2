"""Refuse, in words of ours, what autograd is asked for around a step and cannot give.

A step gives the gradients of parameters, and no others: it is one program, of which autograd sees nothing. So what a
forward pass returns requires a gradient wherever one device's would, and says what to write instead when it is asked
for one; without that a sum with another model's loss would train the other one only. The loss of `forward_backward`
requires one too, as after one device's `backward()`, and says that its backward pass has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError


def check_enabled(call: str) -> None:
    """Raise AutoparError where the user turned gradients off."""
    if not torch.is_grad_enabled():
        raise AutoparError(
            f"{call}() computes gradients, but was called under torch.no_grad() or torch.inference_mode(). Call it "
            f"outside; for the output alone call the model itself: model(*batch)."
        )


def guarded(outputs: Iterable[Any], leaves: Iterable[Any], parameters: Iterable[nn.Parameter]) -> list[Any]:
    """The outputs of a forward pass, which refuse a backward pass where one device's would have one."""
    sources = [tensor for tensor in (*leaves, *parameters) if _requires(tensor)]
    if not torch.is_grad_enabled() or not sources:
        return list(outputs)
    is_float = lambda x: isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())  # noqa: E731
    return [_NoBackward.apply(_OUTPUT, x, *sources) if is_float(x) else x for x in outputs]  # type: ignore[no-untyped-call]


def finished(loss: torch.Tensor) -> torch.Tensor:
    """The loss of a step, which refuses another backward pass."""
    return _NoBackward.apply(_LOSS, loss, torch.empty(0, device=loss.device, requires_grad=True))  # type: ignore[no-untyped-call, no-any-return]


_OUTPUT = (
    "backward() through the output of a parallel model: model(*batch) computes no gradients. Give the loss to "
    "autopar.parallelize(..., loss_fn=...) and call model.forward_backward(*batch), which adds to .grad and "
    "returns the loss; if no gradient is wanted here, use model(*batch) under torch.no_grad(), or .detach()."
)
_LOSS = (
    "backward() of what forward_backward() returned: it has run the backward pass already, and .grad has the "
    "gradients. Leave backward() out; what scales or adds to the loss belongs in loss_fn. To log the loss use .item(). "
    'A GradScaler goes too: precision="fp16" scales the loss, and skips steps that overflow.'
)


class _NoBackward(torch.autograd.Function):
    """The same memory, with a history. (A `detach` is no view to autograd, so that it may be written to.)"""

    @staticmethod
    def forward(ctx: Any, message: str, output: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.message = message
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AutoparError(ctx.message)


def _requires(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
