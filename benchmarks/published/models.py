"""The models of published measurements as plain modules."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published.kernels import causal_softmax, dropout, log_softmax

DROPOUT = 0.1  # of Megatron-LM
SHORT = torch.float16  # of its attention; else `precision` says what is short


def asked_for(x: Tensor) -> Tensor:
    """x, which its gradient reads. Megatron-LM computes all of a block again, also the last product and its sum over
    ranks, which no gradient needs; behind this clamp to all numbers it is needed."""
    return F.hardtanh(x, -math.inf, math.inf)


class Dropout(nn.Module):
    """torch's own."""

    def forward(self, x: Tensor) -> Tensor:
        result, _ = dropout(x, DROPOUT)
        return result


class GPTBlock(nn.Module):
    """A block of GPT-2. is_fused: with one fused attention and no dropout; else as Megatron-LM had it in 2021.
    is_whole: where it is computed again, all of it is (`asked_for`). is_kept: with dropouts as its kernels keep them,
    each by itself, which says what is in memory; else as ours are, fused with what is beside them, which says how long
    they take."""

    def __init__(self, width: int, heads: int, is_fused: bool, is_whole: bool, is_kept: bool) -> None:
        super().__init__()
        self.heads, self.is_fused, self.is_whole = heads, is_fused, is_whole
        self.dropout = Dropout() if is_kept else nn.Dropout(0.0 if is_fused else DROPOUT)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.is_fused else self.attention(q, k, v)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        y = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + self.dropout(asked_for(y) if self.is_whole else y)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention whose logits and probabilities are written and read in full, in the dtype of products."""
        probabilities: Tensor = causal_softmax((q @ k.transpose(-1, -2)).to(SHORT), q.shape[-1] ** -0.5)
        return self.dropout(probabilities) @ v


class GPT(nn.Module):
    """GPT-2 with learned positions and tied weights."""

    def __init__(
        self, layers: int, width: int, heads: int, words: int, length: int, is_fused: bool, is_whole: bool = False,
        is_kept: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, is_fused, is_whole, is_kept) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy, in float32."""
    return F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())


def eager_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """The same, with the kernels of eager torch."""
    return F.nll_loss(log_softmax(model(ids).flatten(0, 1).float()), labels.flatten())


class Core(nn.Module):
    """Fused causal attention. is_grouped: fewer heads of keys than of queries."""

    def __init__(self, is_grouped: bool) -> None:
        super().__init__()
        self.is_grouped = is_grouped

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)


class LlamaBlock(nn.Module):
    """A block of Llama. keys: heads of keys and values, each for as many heads of queries (arXiv 2305.13245)."""

    def __init__(self, width: int, heads: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.size, self.core = width // heads, Core(keys < heads)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, keys * self.size, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.norm_1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = self.core(q, k, v)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864), halves turned against each other."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(nn.Module):
    """Llama. keys: heads of keys and values, of `heads` of queries."""

    def __init__(
        self, layers: int, width: int, heads: int, keys: int, hidden: int, words: int, length: int, tied: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, keys, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.register_buffer("cos", torch.empty(length, width // heads))
        self.register_buffer("sin", torch.empty(length, width // heads))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))
