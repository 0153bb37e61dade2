"""What a layer of a Llama launches on a GPU, and the bytes that it moves, on the meta device: they only fall."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.torch_compat import tree_flatten


class Block(nn.Module):
    """RMSNorm, grouped heads, SwiGLU."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.head, narrow = width // heads, width // heads * groups
        self.one, self.two = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.two(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


PRODUCTS = ("mm", "einsum", "attention", "matmul")


class Launches(TorchDispatchMode):
    """Counts the ops that compute something, all but views and empty tensors; and the bytes that go in and out of those
    that are no products, for which memory is all."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shows = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        nothing = ("empty", "_unsafe_view")  # a view, though its schema says otherwise
        result = func(*args, **(kwargs or {}))
        if not shows and not any(name in str(func) for name in nothing):
            self.count += 1
            if not any(name in str(func) for name in PRODUCTS):
                self.bytes += sum(
                    leaf.nbytes for leaf in tree_flatten((args, kwargs, result))[0] if isinstance(leaf, Tensor)
                )
        return result


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def launches(layers: int, options: dict[str, Any]) -> Launches:
    return step(nn.Sequential(*(Block(64, 8, 2, 96) for _ in range(layers))), torch.randn(2, 32, 64), options)


def step(plain: nn.Module, x: Tensor, options: dict[str, Any]) -> Launches:
    model = autopar.parallelize(plain, "dp=1", device="meta", loss_fn=square, **options)
    model.prepare(x)
    with Launches() as seen:
        model.forward_backward(x)
    return seen


@pytest.mark.parametrize(("options", "most"), [({}, 46), ({"precision": "bf16"}, 55)], ids=["fp32", "bf16"])
def test_kernels_a_layer(options: dict[str, Any], most: int) -> None:
    assert launches(3, options).count - launches(2, options).count <= most


@pytest.mark.parametrize(("options", "most"), [({}, 11.0), ({"precision": "bf16"}, 9.2)], ids=["fp32", "bf16"])
def test_bytes_a_layer_of_llama_3_8b(options: dict[str, Any], most: float) -> None:
    """In GB, of 8,192 tokens: GPU_PATH.md (C5) allows 22."""
    found = []
    for layers in (2, 3):
        with torch.device("meta"):
            plain = nn.Sequential(*(Block(4096, 32, 8, 14336) for _ in range(layers)))
        found.append(step(plain, torch.empty(1, 8192, 4096), options).bytes)
    assert found[1] - found[0] <= most * 1e9
