"""Ops of a user's own, for the tests of their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def define(name: str, function: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """An op `own_tests::name`; the fake kernel is the function itself if no other is given."""
    made = torch.library.custom_op(f"own_tests::{name}", function, mutates_args=())
    made.register_fake(fake or function)
    return made


def scale_(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def project_(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, w).contiguous()


def project_weight_(grad: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("...o,...i->oi", grad, x).contiguous()


def reversed_heads_(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).flip(-1).flatten(-2)


def normalised_(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def lookup_(table: Tensor, index: Tensor) -> Tensor:
    return table[index]


def biased_(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.clone() if bias is None else x + bias


def halves_(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sum(0), x.amax(0)


def averaged_(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def largest_(x: Tensor, k: int) -> Tensor:
    return x.topk(k).values


def keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def scale_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors  # once: a checkpoint gives them once
    return grad * w, (grad * x).flatten(0, -2).sum(0)


def project_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return project(grad, w.t()), project_weight(grad, x)


def averaged_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Divided by the rows, of which a piece has fewer: not the gradient, and not one that can be split over rows."""
    x, w = ctx.saved_tensors
    return grad * w / len(grad), (grad * x).sum(0)


scale = define("scale", scale_)
scale.register_autograd(scale_backward, setup_context=keep)
project = define("project", project_)
project_weight = define("project_weight", project_weight_)
project.register_autograd(project_backward, setup_context=keep)
reversed_heads = define("reversed_heads", reversed_heads_)
reversed_heads.register_autograd(
    lambda ctx, g: (reversed_heads(g, ctx.heads), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "heads", inputs[1]),
)
normalised = define("normalised", normalised_)
lookup = define("lookup", lookup_)
biased = define("biased", biased_)
halves = define("halves", halves_)
largest = define("largest", largest_)
averaged = define("averaged", averaged_)
averaged.register_autograd(averaged_backward, setup_context=keep)


def mixed_(x: Tensor, mask: Tensor | None, y: Tensor) -> Tensor:
    return x * y if mask is None else x * y * mask


mixed = define("mixed", mixed_)

LIBRARY = torch.library.Library("own_tests", "FRAGMENT")
LIBRARY.define("write_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.define("stacked(Tensor[] xs) -> Tensor")
LIBRARY.define("counted(Tensor x) -> int")
LIBRARY.define("made(int n) -> Tensor")
LIBRARY.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.define("faceless(Tensor x) -> Tensor")
LIBRARY.impl("faceless", torch.sin, "CPU")
LIBRARY.define("plain(Tensor x) -> Tensor")
LIBRARY.impl("plain", torch.sin, "CompositeExplicitAutograd")
LIBRARY.define("lonely(Tensor x) -> Tensor")

# name: (pattern, options, whether gradients are checked)
RIGHT: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "scale": ("... h, h -> ... h", {"linear": ["x", "w"]}, True),
    "project": ("... i, o i -> ... o", {"linear": ["x", "w"], "flops": "2*...*i*o"}, True),
    "project_weight": ("... o, ... i -> o i", {"linear": ["grad", "x"], "flops": "2*...*i*o"}, False),
    "reversed_heads": ("b (n d) -> b (n d)", {"size_args": {"n": "heads"}, "replicated": "d", "linear": "x"}, True),
    "normalised": ("b ... h -> b ... h", {"replicated": ["h"]}, False),
    "lookup": ("v h, n -> n h", {"replicated": "v", "linear": "table", "args": {"index": torch.int64}}, False),
    "biased": (["... h, h -> ... h", "..., - -> ..."], {"linear": [("x", "bias")]}, False),
    "largest": ("b h -> b k", {"replicated": ("h", "k"), "args": {"k": 3}}, False),
    "averaged": ("b h, h -> b h", {"replicated": "b"}, True),
}
