"""A small GPT in plain PyTorch, for one device. It knows nothing of autopar.

Tensor names carry their shape:
B batch, T position, D model width, H heads, K width of a head (D = H * K), F width of the MLP, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    vocabulary: int = 128
    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.q = nn.Linear(config.width, config.width)
        self.k = nn.Linear(config.width, config.width)
        self.v = nn.Linear(config.width, config.width)
        self.o = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK = self.q(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_BHTK = self.k(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v_BHTK = self.v(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        a_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, dropout_p=dropout, is_causal=True)
        return self.o(a_BHTK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = F.gelu(self.up(x_BTD))
        return self.down(h_BTF)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attn(self.attn_norm(x_BTD)))
        return x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))


class GPT(nn.Module):
    """Learned positions, pre-norm blocks, an output head tied to the embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                # the branches add up over the depth, so their last layers start smaller (GPT-2)
                last = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.config.layers) if last else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.tokens(tokens_BT) + self.positions(positions_T))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        return logits_BTV


@torch.no_grad()
def sample(
    model: Callable[[Tensor], Tensor], prompt: list[int], length: int, shape: tuple[int, int], seed: int = 0,
    temperature: float = 0.8,
) -> list[int]:  # fmt: skip
    """Continue a prompt by `length` tokens.

    The input has the same `shape` (rows, context) at every token, so that a compiled model is compiled once:
    what is not yet written is padding, which causal attention never looks at. The rows are equal, the first counts.
    """
    rows, context = shape
    random = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        window = tokens[-context:]
        x_BT = torch.tensor([window + [0] * (context - len(window))]).repeat(rows, 1)
        logits_V = model(x_BT)[0, len(window) - 1].float().cpu()
        chances_V = F.softmax(logits_V / temperature, dim=-1)
        tokens.append(int(torch.multinomial(chances_V, 1, generator=random)))
    return tokens
