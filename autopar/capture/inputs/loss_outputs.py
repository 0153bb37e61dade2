"""Split what a model or a loss function returned into loss and metrics, and check that it can be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.capture.ops import functions
from autopar.errors import CaptureError
from autopar.torch_compat import custom_function, no_function_modes

LossFn = Callable[..., Any]


def loss_of(result: Any) -> Any:
    """The loss in what a module returned: a scalar, the first item of a tuple, `.loss` or `["loss"]`."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, Mapping) and "loss" in result:
        return result["loss"]
    if hasattr(result, "loss"):
        return result.loss
    if isinstance(result, (tuple, list)) and result:
        found = [item for item in result if isinstance(item, torch.Tensor) and item.ndim == 0]
        return found[0] if found else result[0]
    return result


def split_result(result: Any, loss_fn: LossFn | None) -> tuple[Any, Any]:
    """The loss, and what was returned beside it: the other item of a tuple, or all others as a tuple; an object or a
    mapping that has the loss as one of its parts, as it is. None if there is nothing."""
    if isinstance(result, torch.Tensor):
        return _scalar(result), None
    is_sequence = isinstance(result, (tuple, list)) and not hasattr(result, "loss")
    if not is_sequence:
        loss = loss_of(result)
        return _scalar(loss), None if loss is result else result
    loss = loss_of(result) if loss_fn is None else next(iter(result), None)
    at = next((i for i, item in enumerate(result) if item is loss), 0)
    others = (*result[:at], *result[at + 1 :])
    return _scalar(loss), others[0] if len(others) == 1 else others or None


def _scalar(loss: Any) -> Any:
    """A loss of one element as a number, which `backward()` takes it for. It is no call of the model's."""
    if not isinstance(loss, torch.Tensor) or not loss.ndim or loss.numel() != 1:
        return loss
    with no_function_modes():
        return loss.reshape(())


def check_loss(loss: Any, loss_fn: LossFn | None, trainable: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise CaptureError for a loss of which no gradients can be taken. trainable: parameters with their names."""
    origin = "the module (loss_fn=None)" if loss_fn is None else f"loss_fn '{getattr(loss_fn, '__name__', loss_fn)}'"
    if not isinstance(loss, torch.Tensor):
        raise CaptureError(
            f"{origin} returned {type(loss).__name__}, but a training step needs a scalar loss tensor. "
            f"Return the loss, a tuple that begins with it, or an object with .loss; did the batch lack labels?"
        )
    if loss.ndim:
        raise CaptureError(
            f"{origin} returned a tensor of shape {list(loss.shape)}, but the loss must be a scalar. "
            f"Reduce it, e.g. with .mean() or .sum(). If the module returns outputs, pass loss_fn=."
        )
    if not loss.is_floating_point():
        raise CaptureError(f"{origin} returned a loss of dtype {loss.dtype}, which has no gradient: return a float.")
    if not trainable:
        raise CaptureError("the model has no parameter with requires_grad=True: there is nothing to train.")
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss of {origin} does not depend on any parameter that requires a gradient. "
            f"Look for .detach(), torch.no_grad() or .item() on its way."
        )
    frozen = [name for name, parameter in trainable if not parameter.requires_grad]
    if frozen:
        raise CaptureError(
            f"the forward pass of {origin} took requires_grad from '{frozen[0]}', which the step trains: freeze "
            f"parameters before the step, `parameter.requires_grad_(False)` behind `model = Net()`, or use "
            f"`.detach()` of them."
        )


def has_own_backward(loss: torch.Tensor) -> bool:
    """True if a custom autograd function that is not ours stands behind `loss`.

    It may run a backward pass of its own, as reentrant checkpoints do, and leave gradients that no path leads to.
    """
    known, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in known:
            continue
        custom = custom_function(node)
        if custom is not None and custom.__module__ != functions.__name__:
            return True
        known.add(node)
        pending += [parent for parent, _ in node.next_functions]
    return False
