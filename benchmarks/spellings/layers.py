"""Ways to write norms and rotary positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.spellings.data import HEADS, WIDTH, places


class Normed(nn.Module):
    """A norm between two products."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.first, self.last = way, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.first(x)
        return (h + self.last(self.way(self, h))).square().mean()


RMS: Mapping[str, Any] = {
    "F.rms_norm": lambda m, x: F.rms_norm(x, (WIDTH,), m.weight, 1e-6),
    "x * rsqrt(x.pow(2).mean(-1))": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * m.weight,
    "weight * (...).to(dtype)": lambda m, x: (
        m.weight * (x * torch.rsqrt(x.double().pow(2).mean(-1, True) + 1e-6)).to(x.dtype)
    ),
    "x / sqrt(mean)": lambda m, x: x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * m.weight,
    "x / x.norm(2) * sqrt(d)": lambda m, x: x / (x.norm(2, dim=-1, keepdim=True) + 1e-6) * WIDTH**0.5 * m.weight,
    "torch.linalg.vector_norm": lambda m, x: (
        x / (torch.linalg.vector_norm(x, dim=-1, keepdim=True) / WIDTH**0.5 + 1e-6) * m.weight
    ),
    "F.normalize(x) * sqrt(d)": lambda m, x: F.normalize(x, dim=-1) * WIDTH**0.5 * m.weight,
    "square().sum() / d": lambda m, x: x * (x.square().sum(-1, keepdim=True) / WIDTH + 1e-6).rsqrt() * m.weight,
    "(x * x).mean(-1).unsqueeze(-1)": lambda m, x: x * torch.rsqrt((x * x).mean(-1).unsqueeze(-1) + 1e-6) * m.weight,
    "einsum('...d,...d')": lambda m, x: (
        x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] / WIDTH + 1e-6) * m.weight
    ),
    "(1 + weight)": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + m.weight),
    "x @ x by bmm": lambda m, x: x * torch.rsqrt((x[..., None, :] @ x[..., None])[..., 0] / WIDTH + 1e-6) * m.weight,
    "** -0.5": lambda m, x: m.weight * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5),
}
LAYER: Mapping[str, Any] = {
    "F.layer_norm": lambda m, x: F.layer_norm(x, (WIDTH,), m.weight, m.bias),
    "(x - mean) / sqrt(var + eps)": lambda m, x: (
        (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * m.weight + m.bias
    ),
    "(x - mean) / (std + eps)": lambda m, x: (
        m.weight * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-6) + m.bias
    ),
    "torch.var_mean": lambda m, x: (lambda v, mean: (x - mean) * torch.rsqrt(v + 1e-5) * m.weight + m.bias)(
        *torch.var_mean(x, -1, correction=0, keepdim=True)
    ),
    "E[x^2] - E[x]^2": lambda m, x: (
        (x - x.mean(-1, True)) * torch.rsqrt(x.square().mean(-1, True) - x.mean(-1, True).square() + 1e-5) * m.weight
        + m.bias
    ),
    "F.layer_norm, weights apart": lambda m, x: F.layer_norm(x, (WIDTH,)) * m.weight + m.bias,
    "torch.addcmul": lambda m, x: torch.addcmul(m.bias, F.layer_norm(x, x.shape[-1:]), m.weight),
    "F.group_norm of one group": lambda m, x: F.group_norm(x.flatten(0, 1), 1, m.weight, m.bias).view_as(x),
    "F.batch_norm of rows": lambda m, x: (
        F.batch_norm(x.flatten(0, 1).mT[None], None, None, training=True)[0].mT.view_as(x) * m.weight + m.bias
    ),
    "deviations by hand": lambda m, x: (lambda c: c / (c.pow(2).mean(-1, True) + 1e-5).sqrt() * m.weight + m.bias)(
        x - x.sum(-1, keepdim=True) / WIDTH
    ),
    "channels first": lambda m, x: F.layer_norm(x.mT.mT, (WIDTH,), m.weight, m.bias),
}


# -- rotary positions


class Rotated(nn.Module):
    """Causal attention of queries and keys that a way rotates."""

    def __init__(self, way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.project, self.out = way, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        half = WIDTH // HEADS // 2
        angle = places()[:, None] / 100.0 ** (torch.arange(half) / half)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        q, k = self.way(q, cos, sin), self.way(k, cos, sin)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().mean()


def halves(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def written_pairs(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    found = torch.empty_like(x)
    found[..., ::2] = x[..., ::2] * c - x[..., 1::2] * s
    found[..., 1::2] = x[..., ::2] * s + x[..., 1::2] * c
    return found


ROTARY: Mapping[str, Any] = {
    "rotate_half by chunk": lambda x, c, s: x * torch.cat((c, c), -1) + halves(x) * torch.cat((s, s), -1),
    "rotate_half by slices": lambda x, c, s: (
        x * c.repeat(1, 2) + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * s.repeat(1, 2)
    ),
    "halves, put together": lambda x, c, s: (lambda a, b: torch.cat((a * c - b * s, a * s + b * c), -1))(
        *x.chunk(2, -1)
    ),
    "halves by split": lambda x, c, s: (lambda a, b: torch.cat((a * c - b * s, b * c + a * s), -1))(
        *x.split(x.shape[-1] // 2, -1)
    ),
    "halves by unflatten and unbind": lambda x, c, s: (
        lambda a, b: torch.stack((a * c - b * s, a * s + b * c), -2).flatten(-2)
    )(*x.unflatten(-1, (2, -1)).unbind(-2)),
    "pairs by ::2 and stack": lambda x, c, s: x * c.repeat_interleave(2, -1) + pairs(x) * s.repeat_interleave(2, -1),
    "pairs by unflatten": lambda x, c, s: (
        lambda p: torch.stack((p[..., 0] * c - p[..., 1] * s, p[..., 0] * s + p[..., 1] * c), -1)
    )(x.unflatten(-1, (-1, 2))).flatten(-2),
    "pairs written into a tensor": written_pairs,
    "view_as_complex": lambda x, c, s: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(c, s)
    ).flatten(-2),
    "torch.polar": lambda x, c, s: torch.view_as_real(
        torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(c), torch.atan2(s, c))
    ).flatten(3),
    "a matrix of each position": lambda x, c, s: torch.einsum(
        "bhtpi,tpij->bhtpj", x.unflatten(-1, (-1, 2)), torch.stack((c, s, -s, c), -1).unflatten(-1, (2, 2))
    ).flatten(-2),
    "roll and a sign": lambda x, c, s: (
        x * torch.cat((c, c), -1) + x.roll(x.shape[-1] // 2, -1) * torch.cat((-s, s), -1)
    ),
    "positions second": lambda x, c, s: (
        x.transpose(1, 2) * torch.cat((c, c), -1)[:, None] + halves(x.transpose(1, 2)) * torch.cat((s, s), -1)[:, None]
    ).transpose(1, 2),
    "cos looked up by position": lambda x, c, s: (
        x * torch.cat((c, c), -1)[places()] + halves(x) * torch.cat((s, s), -1)[places()]
    ),
    "F.embedding of cos": lambda x, c, s: (
        x * F.embedding(places()[None], torch.cat((c, c), -1))[:, None]
        + halves(x) * F.embedding(places()[None], torch.cat((s, s), -1))[:, None]
    ),
    "index_select of cos": lambda x, c, s: (
        x * torch.cat((c, c), -1).index_select(0, places())
        + halves(x) * torch.cat((s, s), -1).index_select(0, places())
    ),
}
