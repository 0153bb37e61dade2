"""Gradients, checkpoints and Functions of the user's inside of the forward pass, and each inside of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import autopar


class Nothing(torch.autograd.Function):
    """Gives no gradient on, which is not the same as zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


class Model(nn.Module):
    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.each = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        self.register_buffer("count", torch.zeros(()))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.autograd.grad(function(x).pow(2).sum(), x, create_graph=True)[0]


def norm_in_checkpoint(model: Model, x: Tensor) -> Tensor:
    return model.down(checkpoint(lambda a: model.norm(model.up(a)), x, use_reentrant=False))


def instance_norm_in_checkpoint(model: Model, x: Tensor) -> Tensor:
    return checkpoint(lambda a: model.each(model.up(a).view(-1, 2, 3)).view(-1, 6), x, use_reentrant=False)


def backward_in_a_function(model: Model, x: Tensor) -> Tensor:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return model.up(x).tanh()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            inner = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = checkpoint(lambda a: model.up(a).tanh(), inner, use_reentrant=False)
            y.backward(grads[0])
            return inner.grad

    return Reversed.apply(model.down(x))


def gradient_in_checkpoint(model: Model, x: Tensor) -> Tensor:
    return checkpoint(lambda a: slope(lambda b: model.down(b).sin(), a), model.up(x), use_reentrant=False)


def gradient_through_checkpoint(model: Model, x: Tensor) -> Tensor:
    def body(a: Tensor) -> Tensor:
        model.count += 1
        return F.dropout(model.down(a), 0.5).sin()

    return slope(lambda a: checkpoint(body, a, use_reentrant=False), model.up(x))


def checkpoint_in_reentrant(model: Model, x: Tensor) -> Tensor:
    """The inner one runs again inside of the backward pass that the outer one runs."""
    h = model.up(x)
    inner = checkpoint(lambda a: checkpoint(model.down, a, use_reentrant=False), h, use_reentrant=True)
    return inner + checkpoint(model.down, h, use_reentrant=False)


def hook_that_leads_to_no_parameter(model: Model, x: Tensor) -> Tensor:
    def hook(g: Tensor) -> None:
        model.count.add_(g.detach().sum())

    leaf = x.detach().requires_grad_()
    h = leaf * 2
    h.register_hook(hook)
    return model.down(h.sin()) + model.up(x)


def gradient_with_a_hook(model: Model, x: Tensor) -> Tensor:
    h = model.up(x)
    h.register_hook(lambda g: F.dropout(F.linear(g, model.down.weight), 0.5))
    (g,) = torch.autograd.grad(h.pow(2).sum(), model.up.weight, create_graph=True)
    return model.down(h) + g.mean(0)


def many_gradients(model: Model, x: Tensor) -> Tensor:
    h = model.up(x).tanh()
    rows = torch.eye(h.numel(), dtype=h.dtype).view(-1, *h.shape)
    (g,) = torch.autograd.grad(h, model.up.weight, rows, is_grads_batched=True, create_graph=True)
    return model.down(h) + g.pow(2).mean()


def jacobian(model: Model, x: Tensor) -> Tensor:
    found: Any = torch.autograd.functional.jacobian(
        lambda a: model.up(a).tanh().sum(0), x, create_graph=True, vectorize=True
    )
    return model.down(found.sum(0))


def gradient_of_each_row(model: Model, x: Tensor) -> Tensor:
    """With a view of a weight that the transform has made before the model does."""
    each = torch.func.vmap(torch.func.grad(lambda a: model.up(a).pow(3).sum()))(x)
    return each.clone() + x @ model.up.weight.t()


def forward_mode(model: Model, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        found = forward_ad.unpack_dual(model.down(model.up(dual).tanh()))
    return found.primal + found.tangent.sin()


def no_gradient(model: Model, x: Tensor) -> Tensor:
    return model.down(x) + Nothing.apply(model.up(x))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


BODIES = (
    norm_in_checkpoint, instance_norm_in_checkpoint, backward_in_a_function, gradient_in_checkpoint,
    gradient_through_checkpoint, checkpoint_in_reentrant, hook_that_leads_to_no_parameter, gradient_with_a_hook,
    many_gradients, jacobian, gradient_of_each_row, forward_mode, no_gradient,
)  # fmt: skip


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
@pytest.mark.parametrize("body", BODIES)
def test_steps_are_as_on_one_device(body: Callable[[Model, Tensor], Tensor], mesh: str) -> None:
    torch.manual_seed(0)
    model, x = Model(body).double(), torch.randn(4, 6, dtype=torch.float64)
    report = autopar.verify(model, mesh, loss_fn=square, batch=x)
    assert report.ok, report


@pytest.mark.parametrize("body", [norm_in_checkpoint, instance_norm_in_checkpoint])
def test_statistics_of_ranks_in_a_checkpoint_are_those_of_each_rank(body: Callable[[Model, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Model(body).double(), torch.randn(4, 6, dtype=torch.float64)
    report = autopar.verify(model, "dp=2", loss_fn=square, batch=x, batch_statistics="rank")
    assert report.ok, report
