"""The models that are trained, the same on every rank and side: a GPT, and a Llama of the same size."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from gpt import GPT, GPTConfig  # noqa: E402

LAYERS, HEADS, WIDTH, VOCABULARY = 4, 4, 256, 8192
KEY_HEADS, HIDDEN = 2, 704
SIZES = {
    "gpt": (16, 128),
    "llama": (16, 128),
    "llama 2k": (1, 2048),
    "llama 8k": (1, 8192),
    "llama 4x1k": (4, 1024),
    "experts 16": (16, 128),
    "experts 64": (16, 128),
}  # sequences, tokens of each
MICROBATCHES = 8  # of pipelines

Step = Callable[[], Tensor]  # trains one step and returns the loss


class Attention(nn.Module):
    """Causal, with rotary positions and two query heads a key head. Works on any part of the heads.

    attend: of queries, keys and values [b, heads, s, d]; those who write by hand put theirs in its place."""

    cos: Tensor
    sin: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __init__(self, context: int) -> None:
        super().__init__()
        self.head = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * self.head, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * self.head, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        frequencies = 10000.0 ** (-torch.arange(0, self.head, 2) / self.head)
        angles = torch.outer(torch.arange(context), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.attend = causal

    def rotate(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-right, left), dim=-1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        a = self.attend(self.rotate(q), self.rotate(k), v)
        out: Tensor = self.o(a.transpose(1, 2).flatten(2))
        return out


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention on one device, as people call it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, context: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.RMSNorm(WIDTH), Attention(context)
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """RMSNorm, rotary positions, grouped heads, SwiGLU, a head of its own. block: makes a layer."""

    def __init__(self, context: int, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(context) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h))
        return out


def model_of(name: str) -> nn.Module:
    """The same weights on every rank and side."""
    torch.manual_seed(0)
    _, context = SIZES[name]
    if name.startswith("experts"):
        from benchmarks.compare import experts

        return Llama(context, lambda length: experts.Block(length, int(name.split()[1])))
    return GPT(GPTConfig(VOCABULARY, context, LAYERS, HEADS, WIDTH)) if name == "gpt" else Llama(context)


def batch_of(name: str, device: str) -> tuple[Tensor, Tensor]:
    batch, context = SIZES[name]
    tokens = torch.randint(VOCABULARY, (batch, context + 1), generator=torch.Generator().manual_seed(1)).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    context: Callable[[], Any] = contextlib.nullcontext,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """A training step as people write it."""
    optimizer = optimizer or optimizer_of(model)

    def step() -> Tensor:
        with context():
            loss = loss_fn(model, x, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
