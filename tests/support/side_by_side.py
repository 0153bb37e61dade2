"""A parallel model and its plain twin, trained with the same loop; everything they hold compared in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import models
import torch
import torch.distributed as dist
from models_special import ZOO
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import autopar
from autopar.torch_compat import tree_map

TOLERANCE = 1e-10
ROUNDED = 3e-6  # transformers computes norms and the loss in float32 whatever the model's dtype
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

SMALL = {make.__name__: make for make in (models.short_gpt, models.conv)}  # each rank compiles what it trains


def double(value: Any) -> Any:
    """The floating-point tensors of any nesting, in float64."""
    is_float = lambda x: isinstance(x, Tensor) and x.is_floating_point()  # noqa: E731
    return tree_map(lambda x: x.double() if is_float(x) else x, value)


def case(name: str) -> tuple[nn.Module, Any, tuple[Any, ...], dict[str, Any]]:
    """(model, loss_fn, args, kwargs) of the zoo or of the small ones, in float64.

    `hf_llama` returns its own loss of keyword tensors.
    """
    model, loss_fn, args = {**ZOO, **SMALL}[name]()
    if name == "hf_llama":
        return model.double(), None, (), double(args[0])
    return model.double(), loss_fn, double(args), {}


def plain_loss(model: nn.Module, loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return loss_fn(model, *args, **kwargs) if loss_fn is not None else model(*args, **kwargs).loss


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def momentum(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def assert_close(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], what: str, tolerance: float = TOLERANCE
) -> None:
    """The same names in the same order, and values equal to rounding, norm-wise per tensor."""
    assert list(got) == list(want), (what, list(got), list(want))
    scale = max((float(w.double().norm()) for w in want.values()), default=0.0)
    for name, value in want.items():
        other = got[name]
        assert (other.shape, other.dtype, other.device.type) == (value.shape, value.dtype, "cpu"), (what, name)
        error = float((other.double() - value.double()).norm())
        norm = max(float(value.double().norm()), 1e-5 * scale)  # one that is zero but for rounding
        assert error <= tolerance * max(norm, 1e-300), f"{what} '{name}': off by {error:.2e}, norm {norm:.2e}"


def is_first() -> bool:
    return dist.get_rank() == 0


def assert_same_state(model: autopar.ParallelModule, plain: nn.Module, what: str, tolerance: float = TOLERANCE) -> None:
    """Weights and buffers. Every rank calls it; rank 0 compares."""
    whole = model.full_state_dict()
    if is_first():
        assert_close(whole, plain.state_dict(), what, tolerance)
    else:
        assert whole == {}


def assert_same_gradients(
    model: autopar.ParallelModule, plain: nn.Module, what: str, tolerance: float = TOLERANCE
) -> None:
    whole = model.full_gradients()
    if is_first():
        assert_close(whole, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}, what, tolerance)
    else:
        assert whole == {}


def train_both(
    name: str,
    mesh: Any,
    optimizer: Optimizer = adamw,
    *,
    steps: int = 2,
    accumulate: int = 1,
    set_to_none: bool = True,
    clip: float | None = 0.5,
    schedule: bool = False,
    **options: Any,
) -> autopar.ParallelModule:
    """The user's loop on both; asserts equal losses, gradients, norms, weights and buffers at every step."""
    plain, loss_fn, args, kwargs = case(name)
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss_fn, **options)
    pair, tolerance = (model, plain), ROUNDED if name.startswith("hf_") else TOLERANCE
    optimizers = [optimizer(m.parameters()) for m in pair]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers] if schedule else []
    for step in range(steps):
        for _ in range(accumulate):
            loss = model.forward_backward(*args, **kwargs)
            want = plain_loss(plain, loss_fn, args, kwargs)
            want.backward()
            assert loss.ndim == 0 and loss.requires_grad == want.requires_grad
            loss = loss.detach()
            torch.testing.assert_close(loss, want.detach(), rtol=tolerance, atol=0)
        assert_same_gradients(model, plain, f"step {step} gradient", tolerance)
        if clip is not None:
            norms = [clip_grad_norm_(m.parameters(), clip) for m in pair]
            assert float(norms[1]) > clip, "the gradients are not clipped: the test tests nothing"
            torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=tolerance, atol=0)
        for each in (*optimizers, *schedules):
            each.step()
        for each in optimizers:
            each.zero_grad(set_to_none=set_to_none)
        assert_same_state(model, plain, f"step {step} weight", tolerance)
    return model


__all__ = ["TOLERANCE", "adamw", "assert_close", "case", "double", "models", "momentum", "plain_loss", "train_both"]
