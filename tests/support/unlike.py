"""Models of many nodes of which few are alike: recurrent steps that read their own time, dense convolutions, gated
blocks of unlike widths. The search has as many classes as they have nodes, whatever they compute.

`unlike` gives (model, loss_fn, batch) in float64, in which torch spells out the steps of an LSTM (in float32 it
has one op for all of them). Batches hold 12 rows, widths are multiples of 4.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import BATCH, Case, square_loss
from torch import Tensor, nn


class UnrolledGRU(nn.Module):
    """A GRU as a loop in Python, whose steps have a width of their own each, and whose states are all read."""

    def __init__(self, width: int, steps: int, outputs: int) -> None:
        super().__init__()
        self.width, self.steps = width, steps
        self.inputs = nn.Linear(outputs, 3 * width)
        self.states = nn.Linear(width, 3 * width)
        self.heads = nn.ModuleList(nn.Linear(width, outputs + 4 * step) for step in range(steps))
        self.head = nn.Linear(sum(outputs + 4 * step for step in range(steps)), outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.width)
        seen = []
        for step in range(self.steps):
            reset, update, new = self.inputs(x[:, step]).chunk(3, -1)
            reset_h, update_h, new_h = self.states(h).chunk(3, -1)
            gate = torch.sigmoid(update + update_h)
            candidate = torch.tanh(new + torch.sigmoid(reset + reset_h) * new_h)
            h = gate * h + (1 - gate) * candidate
            seen.append(self.heads[step](h))
        return self.head(torch.cat(seen, -1))


def unrolled_gru(steps: int = 20) -> Case:
    torch.manual_seed(61)
    model = UnrolledGRU(16, steps, 8)
    return model, square_loss, (torch.randn(BATCH, steps, 8), torch.randn(BATCH, 8))


class DualPath(nn.Module):
    """Segments of a signal, a recurrent layer within each and one across them, by turns (arXiv 1910.06379)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.within = nn.ModuleList(nn.LSTM(width, width, batch_first=True, bidirectional=True) for _ in range(blocks))
        self.across = nn.ModuleList(nn.LSTM(width, width, batch_first=True, bidirectional=True) for _ in range(blocks))
        self.first = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(2 * blocks))
        self.encoder = nn.Conv1d(1, width, 4, 2)
        self.decoder = nn.ConvTranspose1d(width, 1, 4, 2)

    def forward(self, x: Tensor, segment: int) -> Tensor:
        h = F.relu(self.encoder(x))
        b, c, t = h.shape
        h = h.unfold(-1, segment, segment).transpose(2, 3)  # b c segment count
        count = h.shape[-1]
        for i, (within, across) in enumerate(zip(self.within, self.across, strict=True)):
            rows = h.permute(0, 3, 2, 1).reshape(b * count, segment, c)
            rows = self.first[i](within(rows)[0]).reshape(b, count, segment, c).permute(0, 3, 2, 1)
            h = h + self.norms[2 * i](rows)
            rows = h.permute(0, 2, 3, 1).reshape(b * segment, count, c)
            rows = self.second[i](across(rows)[0]).reshape(b, segment, count, c).permute(0, 3, 1, 2)
            h = h + self.norms[2 * i + 1](rows)
        return self.decoder(h.transpose(2, 3).reshape(b, c, t))


def dual_path(blocks: int = 2, segment: int = 6, count: int = 6) -> Case:
    torch.manual_seed(62)
    samples = 2 * segment * count + 2
    model = DualPath(8, blocks)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x, segment), y)

    return model, loss, (torch.randn(BATCH, 1, samples), torch.randn(BATCH, 1, samples))


class GatedResidual(nn.Module):
    """The block of which a temporal fusion transformer is made (arXiv 1912.09363, section 4.1)."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.gate = nn.Linear(outputs, 2 * outputs)
        self.skip = nn.Linear(inputs, outputs) if inputs != outputs else nn.Identity()
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.skip(x) + F.glu(self.gate(self.second(F.elu(self.first(x)))), -1))


class Selection(nn.Module):
    """One block a variable, of a width of its own, and their sum by weights that all of them decide."""

    def __init__(self, variables: int, width: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Linear(1 + i % 3, width) for i in range(variables))
        self.blocks = nn.ModuleList(GatedResidual(width, width + 4 * i, width) for i in range(variables))
        self.weights = GatedResidual(variables * width, width, variables)

    def forward(self, x: Tensor) -> Tensor:
        embedded = [layer(x[..., i : i + 1 + i % 3]) for i, layer in enumerate(self.embeddings)]
        weights = self.weights(torch.cat(embedded, -1)).softmax(-1)
        found = torch.stack([block(one) for block, one in zip(self.blocks, embedded, strict=True)], -1)
        return (found * weights.unsqueeze(-2)).sum(-1)


class TemporalFusion(nn.Module):
    """Selected variables, an LSTM over the past and one over the future, attention, all behind gated blocks."""

    def __init__(self, variables: int, width: int) -> None:
        super().__init__()
        self.past, self.future = Selection(variables, width), Selection(variables // 2, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.decoder = nn.LSTM(width, width, batch_first=True)
        self.enriched = GatedResidual(width, 2 * width, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.last = GatedResidual(width, 4 * width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, past: Tensor, future: Tensor) -> Tensor:
        before, state = self.encoder(self.past(past))
        after, _ = self.decoder(self.future(future), state)
        h = self.enriched(torch.cat([before, after], 1))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.head(self.last(h))[:, before.shape[1] :]


def temporal_fusion(variables: int = 12, past: int = 8, future: int = 4) -> Case:
    torch.manual_seed(63)
    model = TemporalFusion(variables, 16)
    x, known = torch.randn(BATCH, past, variables + 3), torch.randn(BATCH, future, variables)
    batch = (x, known, torch.randn(BATCH, future, 3))

    def loss(model: nn.Module, x: Tensor, known: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(model(x, known), y)

    return model, loss, batch


class Snake(nn.Module):
    """x + sin(a x)^2 / a, with an `a` for each channel (arXiv 2006.08195)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class Codec(nn.Module):
    """Down by strides, up again, with dilated residual units of weight-normalised convolutions (arXiv 2306.06546)."""

    def __init__(self, width: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        layers: list[nn.Module] = [norm(nn.Conv1d(1, width, 7, padding=3))]
        for stride in strides:
            layers += [*self.units(width), Snake(width)]
            layers.append(norm(nn.Conv1d(width, 2 * width, 2 * stride, stride, padding=(stride + 1) // 2)))
            width *= 2
        for stride in reversed(strides):
            padding, more = (stride + 1) // 2, stride % 2
            up = nn.ConvTranspose1d(width, width // 2, 2 * stride, stride, padding=padding, output_padding=more)
            layers += [Snake(width), norm(up)]
            width //= 2
            layers += self.units(width)
        layers += [Snake(width), norm(nn.Conv1d(width, 1, 7, padding=3)), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    @staticmethod
    def units(width: int) -> list[nn.Module]:
        return [Unit(width, dilation) for dilation in (1, 3, 9)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Unit(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.block = nn.Sequential(
            Snake(width), norm(nn.Conv1d(width, width, 7, dilation=dilation, padding=3 * dilation)),
            Snake(width), norm(nn.Conv1d(width, width, 1)),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def codec(strides: tuple[int, ...] = (2, 4, 8, 8)) -> Case:
    torch.manual_seed(64)
    samples = 2 * 512
    return Codec(8, strides), square_loss, (torch.randn(BATCH, 1, samples), torch.randn(BATCH, 1, samples))


class DenseNet(nn.Module):
    """Each convolution reads all before it: no two see as many channels (arXiv 1608.06993)."""

    def __init__(self, layers: tuple[int, ...], growth: int) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for count in layers:
            self.blocks.append(nn.ModuleList(self.layer(channels + i * growth, growth) for i in range(count)))
            channels += count * growth
            fewer = nn.Conv2d(channels, channels // 8 * 4, 1)
            self.transitions.append(nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), fewer, nn.AvgPool2d(2)))
            channels = channels // 8 * 4
        self.head = nn.Linear(channels, 8)

    @staticmethod
    def layer(channels: int, growth: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, 4 * growth, 1, bias=False),
                             nn.BatchNorm2d(4 * growth), nn.ReLU(),
                             nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            for layer in block:
                h = torch.cat([h, layer(h)], 1)
            h = transition(h)
        return self.head(h.mean((2, 3)))


def dense_net(layers: tuple[int, ...] = (6, 12, 16)) -> Case:
    torch.manual_seed(65)
    return DenseNet(layers, 8), square_loss, (torch.randn(BATCH, 3, 16, 16), torch.randn(BATCH, 8))


UNLIKE: dict[str, Callable[..., Case]] = {
    "unrolled_gru": unrolled_gru,
    "dual_path": dual_path,
    "temporal_fusion": temporal_fusion,
    "codec": codec,
    "dense_net": dense_net,
}


def unlike(name: str, *sizes: int) -> Case:
    """A model by its name."""
    model, loss_fn, batch = UNLIKE[name](*sizes)
    return model.double(), loss_fn, tuple(x.double() for x in batch)
