"""A small Llama in plain PyTorch, for one device: RMSNorm, rotary positions, grouped keys, SwiGLU. It knows nothing of
autopar.

Tensor names carry their shape:
B batch, T position, D model width, H heads, K width of a head (D = H * K), C half of K, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    vocabulary: int = 128
    layers: int = 2
    heads: int = 4
    key_heads: int = 2
    head: int = 32

    @property
    def width(self) -> int:
        return self.heads * self.head


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, self.head = config.width, config.head
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, config.key_heads * config.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x_BTD: Tensor, angle_TC: Tensor) -> Tensor:
        h_BTD = self.attn_norm(x_BTD)
        q_BHTK, k_BHTK, v_BHTK = (
            project(h_BTD).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        a_BHTK = F.scaled_dot_product_attention(
            rotated(q_BHTK, angle_TC), rotated(k_BHTK, angle_TC), v_BHTK, is_causal=True, enable_gqa=True
        )
        x_BTD = x_BTD + self.o(a_BHTK.transpose(1, 2).flatten(2))
        h_BTD = self.mlp_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h_BTD)) * self.up(h_BTD))


def rotated(x_BHTK: Tensor, angle_TC: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864): pairs of channels, turned by an angle that grows with the position."""
    left, right = x_BHTK.chunk(2, -1)
    cos, sin = angle_TC.cos(), angle_TC.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.RMSNorm(config.width), nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        places_T = torch.arange(x_BT.shape[1], device=x_BT.device)
        half = self.config.head // 2
        angle_TC = places_T[:, None] / 10_000 ** (torch.arange(half, device=x_BT.device) / half)
        h_BTD = self.tokens(x_BT)
        for block in self.blocks:
            h_BTD = block(h_BTD, angle_TC)
        return self.head(self.norm(h_BTD))


def loss_fn(model: nn.Module, x_BT: Tensor, y_BT: Tensor) -> Tensor:
    return F.cross_entropy(model(x_BT).flatten(0, 1), y_BT.flatten())
