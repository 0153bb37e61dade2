"""The models of the parity tests: small, seeded, without dropout, with data that no two ranks share.

Each function returns (model, loss_fn, batch). Batches hold 12 rows, heads are a multiple of 4, widths of 8, so
that dp=2, dp=3, tp=2 and tp=4 divide them; those named `odd_*` divide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from torch import Tensor, nn

LossFn = Callable[..., Tensor]
Case = tuple[nn.Module, LossFn | None, tuple[Any, ...]]
BATCH, TIME, VOCABULARY = 12, 8, 40


def uneven(model: nn.Module) -> nn.Module:
    """Give every vector a value of its own: ones and zeros would hide a bias added twice or a scale left out."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def tokens(rows: int = BATCH, time: int = TIME, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (rows, time))


def labels(rows: int = BATCH, time: int = TIME, vocabulary: int = VOCABULARY) -> Tensor:
    """Labels of which row i ignores about i of its `time`: each shard of the batch counts others."""
    y = torch.randint(vocabulary, (rows, time))
    for i in range(rows):
        y[i, : i * time // rows] = -100
    y[1] = -100
    return y


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def square_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def class_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def mlp() -> Case:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 8))
    return model, square_loss, (torch.randn(BATCH, 16), torch.randn(BATCH, 8) + 1)


def gpt() -> Case:
    torch.manual_seed(2)
    model = uneven(GPT(GPTConfig(VOCABULARY, TIME, layers=2, heads=4, width=32)))
    return model, token_loss, (tokens(), labels())


def short_gpt() -> Case:
    """One layer: for what does not depend on depth."""
    torch.manual_seed(2)
    model = uneven(GPT(GPTConfig(VOCABULARY, TIME, layers=1, heads=4, width=32)))
    return model, token_loss, (tokens(), labels())


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head = width // heads
        self.attn_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        h = self.attn_norm(x)
        q = self.rotate(self.q(h).view(b, t, -1, self.head).transpose(1, 2), cos, sin)
        k = self.rotate(self.k(h).view(b, t, -1, self.head).transpose(1, 2), cos, sin)
        v = self.v(h).view(b, t, -1, self.head).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int, context: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        head = width // heads
        frequencies = 10000.0 ** (-torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(context), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        h = self.tokens(x)
        for block in self.blocks:
            h = block(h, self.cos[:time], self.sin[:time])
        return self.head(self.norm(h))


def llama(kv_heads: int = 4) -> Case:
    torch.manual_seed(3)
    model = uneven(Llama(2, 64, 8, kv_heads, 48, VOCABULARY, 2 * TIME))
    return model, token_loss, (tokens(), labels())


def few_kv_heads() -> Case:
    """Fewer key heads than tp=4 has ranks."""
    return llama(kv_heads=2)


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(self.width, dim=2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """The structure of nanoGPT: fused qkv, tied head, (logits, loss) out of forward."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(TIME, width)
        self.h = nn.ModuleList(NanoBlock(width, heads) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)


def nanogpt() -> Case:
    torch.manual_seed(4)
    return uneven(NanoGPT()), lambda model, x, y: model(x, y)[1], (tokens(), labels())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding))


def padding_mask(rows: int = BATCH, time: int = TIME) -> Tensor:
    """True where row i has padding: 0 to 4 places at its end."""
    lengths = time - torch.arange(rows) % 5
    return torch.arange(time)[None, :] >= lengths[:, None]


def transformer_encoder() -> Case:
    torch.manual_seed(5)

    def loss_fn(model: nn.Module, x: Tensor, padding: Tensor, y: Tensor) -> Tensor:
        kept = ~padding
        error = (model(x, padding) - y).pow(2).mean(-1)
        return (error * kept).sum() / kept.sum()

    x, y = torch.randn(BATCH, TIME, 32), torch.randn(BATCH, TIME, 8) + 1
    return uneven(Encoder()), loss_fn, (x, padding_mask(), y)


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(h)) + self.skip(x))


def resnet() -> Case:
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Residual(8, 8, 1), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8),
    )  # fmt: skip
    scale = 1 + torch.arange(BATCH).view(-1, 1, 1, 1) / 4  # each image has statistics of its own
    return uneven(model), class_loss, (torch.randn(BATCH, 3, 16, 16) * scale, torch.randint(8, (BATCH,)))


def conv() -> Case:
    """A convolution and a BatchNorm, whose buffers a step writes: the smallest model that has both."""
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 8),
    )  # fmt: skip
    scale = 1 + torch.arange(BATCH).view(-1, 1, 1, 1) / 4  # each image has statistics of its own
    return uneven(model), class_loss, (torch.randn(BATCH, 3, 8, 8) * scale, torch.randint(8, (BATCH,)))


class ViT(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, patches: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.first.expand(h.shape[0], -1, -1), h], dim=1) + self.positions
        return self.head(self.norm(self.encoder(h))[:, 0])


def vit() -> Case:
    torch.manual_seed(7)
    return uneven(ViT()), class_loss, (torch.randn(BATCH, 3, 16, 16), torch.randint(8, (BATCH,)))
