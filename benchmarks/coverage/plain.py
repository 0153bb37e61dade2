"""Plain PyTorch models, of the kinds that transformers does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Case = tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, ...]]
BATCH, TIME, VOCABULARY, WIDTH = 6, 8, 48, 32


def ids(*shape: int, high: int = VOCABULARY) -> Tensor:
    return torch.randint(0, high, shape or (BATCH, TIME))


def next_token(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def squares(model: nn.Module, *batch: Tensor) -> Tensor:
    return F.mse_loss(model(*batch[:-1]), batch[-1])


class UNet(nn.Module):
    """Down, middle, up, with group norm and a skip at each level (Ronneberger et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 3, 1)
        self.down, self.down2 = self.block(16, 32), self.block(32, 64)
        self.middle = self.block(64, 64)
        self.up, self.up2 = self.block(128, 32), self.block(64, 16)

    @staticmethod
    def block(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        second = self.down(F.max_pool2d(first, 2))
        third = self.down2(F.max_pool2d(second, 2))
        h = torch.cat((self.middle(third), third), 1)
        h = torch.cat((F.interpolate(self.up(h), scale_factor=2, mode="nearest"), second), 1)
        h = F.interpolate(self.up2(h), scale_factor=2, mode="bilinear", align_corners=False)
        return self.leave(torch.cat((h, first), 1))


def unet() -> Case:
    x = torch.randn(BATCH, 3, 16, 16)
    return UNet(), squares, (x, torch.randn_like(x))


class DLRM(nn.Module):
    """Embedding bags of categories, a bottom and a top perceptron, and pairwise products (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode=mode) for rows, mode in ((40, "sum"), (24, "mean")))
        self.plain = nn.Embedding(30, 16)
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, bags: Tensor, category: Tensor) -> Tensor:
        h = self.bottom(dense)
        parts = [h, *(table(bags[:, i]) for i, table in enumerate(self.tables)), self.plain(category)]
        stacked = torch.stack(parts, 1)
        products = stacked @ stacked.mT
        rows, columns = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat((h, products[:, rows, columns]), 1)).squeeze(1)


def dlrm() -> Case:
    def loss(model: nn.Module, dense: Tensor, bags: Tensor, category: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(dense, bags, category), y)

    batch = torch.randn(BATCH, 8), ids(BATCH, 2, 5, high=24), ids(BATCH, high=30), torch.rand(BATCH)
    return DLRM(), loss, batch


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = kind(WIDTH, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(x))[0])


def lstm() -> Case:
    return Recurrent(nn.LSTM), next_token, (ids(), ids())


def gru() -> Case:
    return Recurrent(nn.GRU), next_token, (ids(), ids())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, key_padding_mask=padding, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(x)))


def multihead_attention() -> Case:
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    padding[::2, -2:] = True
    return Attending(), squares, (torch.randn(BATCH, TIME, WIDTH), padding, torch.randn(BATCH, TIME, WIDTH))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        return self.head(self.body(self.tokens(x), self.tokens(y), tgt_mask=mask, tgt_is_causal=True))


def transformer() -> Case:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, y[:, :-1]).flatten(0, 1), y[:, 1:].flatten())

    return Translator(), loss, (ids(), ids(BATCH, 7))


def autoencoder() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1), nn.Sigmoid(),
    )  # fmt: skip
    x = torch.rand(BATCH, 3, 16, 16)
    return model, squares, (x, x.clone())


class Graph(nn.Module):
    """Messages along edges, summed at their targets; each sample is a graph of its own edges."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.message, self.update = (
            nn.Linear(8, WIDTH),
            nn.Linear(2 * WIDTH, 64),
            nn.Linear(64 + WIDTH, WIDTH),
        )
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        rows, count, _ = nodes.shape
        h = self.enter(nodes).flatten(0, 1)
        source, target = (edges + count * torch.arange(rows)[:, None, None]).permute(2, 0, 1).flatten(1)
        for _ in range(2):
            sent = F.relu(self.message(torch.cat((h[source], h[target]), -1)))
            heard = torch.zeros(rows * count, 64, dtype=h.dtype).index_add(0, target, sent)
            h = h + torch.tanh(self.update(torch.cat((heard, h), -1)))
        return self.leave(h.unflatten(0, (rows, count)).sum(1)).squeeze(-1)


def graph() -> Case:
    return Graph(), squares, (torch.randn(BATCH, 5, 8), ids(BATCH, 12, 2, high=5), torch.randn(BATCH))


class Spectral(nn.Module):
    """FFT mixing over the sequence, and a learned filter in the frequencies (FNet; GFNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(TIME // 2 + 1, WIDTH, 2) / 4)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(self.filter), n=TIME, dim=1)
        x = self.norm(x + mixed + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return x + self.down(F.gelu(self.up(x)))


def fft() -> Case:
    return Spectral(), squares, (torch.randn(BATCH, TIME, WIDTH), torch.randn(BATCH, TIME, WIDTH))


class TwoHeads(nn.Module):
    """A trunk that both losses share, and one layer that is applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.again = nn.Linear(16, 64), nn.Linear(64, 64)
        self.classes, self.value = nn.Linear(64, 10), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.silu(self.again(F.silu(self.again(F.silu(self.trunk(x))))))
        return self.classes(h), self.value(h).squeeze(-1)


def two_losses() -> Case:
    def loss(model: nn.Module, x: Tensor, label: Tensor, value: Tensor) -> Tensor:
        logits, guess = model(x)
        return F.cross_entropy(logits, label) + 0.3 * F.smooth_l1_loss(guess, value)

    return TwoHeads(), loss, (torch.randn(BATCH, 16), ids(BATCH, high=10), torch.randn(BATCH))


class LoRA(nn.Module):
    """A frozen linear layer and a trained low-rank one beside it (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def lora() -> Case:
    model = nn.Sequential(LoRA(nn.Linear(16, 64)), nn.GELU(), LoRA(nn.Linear(64, 16)), nn.LayerNorm(16))
    return model, squares, (torch.randn(BATCH, 16), torch.randn(BATCH, 16))


class Averaging(nn.Module):
    """Buffers that the forward pass updates: a running mean and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.steps += 1
        return self.down(torch.tanh(h - self.mean))


def buffers() -> Case:
    return Averaging(), squares, (torch.randn(BATCH, 16), torch.randn(BATCH, 16))


class Clipped(torch.autograd.Function):
    """The identity, whose backward clips: a gradient that no formula of the forward gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (2 * grads[0]).clamp(-0.01, 0.01)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Clipped.apply(F.relu(self.up(x))))


def custom_function() -> Case:
    return Custom(), squares, (torch.randn(BATCH, 16), torch.randn(BATCH, 16))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 32), nn.Linear(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        return self.leave(h)


def checkpointed() -> Case:
    return Checkpointed(), squares, (torch.randn(BATCH, 16), torch.randn(BATCH, 16))


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.down(F.gelu(self.up(x)))
        return h.float()


def autocast() -> Case:
    return Autocast(), squares, (torch.randn(BATCH, 16), torch.randn(BATCH, 16))


class Towers(nn.Module):
    """Two encoders whose outputs are compared, all with all (Radford et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8))
        self.text = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        p, q = F.normalize(self.image(x), dim=-1), F.normalize(self.text(words).mean(1), dim=-1)
        return p @ q.T * self.scale.exp()


def contrastive() -> Case:
    def loss(model: nn.Module, x: Tensor, words: Tensor) -> Tensor:
        scores, own = model(x, words), torch.arange(len(x))
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

    return Towers(), loss, (torch.randn(BATCH, 16), ids())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 4))


def balanced() -> Case:
    """With the balance of a mixture's router: the share of rows that each expert has, times its mean probability."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        scores = model(x)
        p = scores.softmax(-1)
        share = F.one_hot(p.argmax(-1), 4).to(p.dtype).mean(0)
        return scores.square().mean() + 0.4 * (share * p.mean(0)).sum()

    return perceptron(), loss, (torch.randn(BATCH, 16),)


def gradient_penalty() -> Case:
    """As a critic's of WGAN-GP (Gulrajani et al. 2017)."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        z = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean() + model(x).mean()

    return perceptron(), loss, (torch.randn(BATCH, 16),)


MODELS: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        unet, dlrm, lstm, gru, multihead_attention, transformer, autoencoder, graph, fft, two_losses, lora, buffers,
        custom_function, checkpointed, autocast, contrastive, balanced, gradient_penalty,
    )
}  # fmt: skip
