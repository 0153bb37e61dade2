"""Batches of which every rank has a part: models, losses, whole batches, and the dims that count samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 8


@dataclass(frozen=True)
class Local:
    """A whole batch, cut on `dims` of its arguments (None: every rank passes it whole). said: `batch_dims`. takes: how
    many of the arguments the model itself is given."""

    make: Callable[[], nn.Module]
    loss: Callable[..., Any] | None
    batch: tuple[Any, ...]
    dims: tuple[int | None, ...]
    said: Any = None
    takes: int = 1
    kwargs: Mapping[str, int] | None = None  # the arguments that are passed by name, by place

    def part(self, sizes: tuple[int, ...], place: int) -> tuple[Any, ...]:
        """What the ranks of a place pass, where places have so many samples."""
        return tuple(_part(x, dim, sizes, place) for x, dim in zip(self.batch, self.dims, strict=True))


def _part(value: Any, dim: int | None, sizes: tuple[int, ...], place: int) -> Any:
    if isinstance(value, dict):
        return {name: _part(each, dim, sizes, place) for name, each in value.items()}
    return value if dim is None else value.split(sizes, dim)[place].contiguous()


def double(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def square(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    return F.mse_loss(out, y), out, out.mean()


def classes(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    return F.cross_entropy(out, y, ignore_index=0), out.argmax(-1)


def weighted(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=weight)


def by_count(model: nn.Module, x: Tensor, y: Tensor, count: Tensor) -> Tensor:
    return (model(x) - y).square().sum() / count


def per_row(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return ((model(x) - y).square().mean(-1) * weight).mean()


def of_dict(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head(self.norm(self.conv(x)).relu().mean((2, 3))))


class Tokens(nn.Module):
    """A transformer over tokens, also with the sequence in front; padding [B, S], or its transpose."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=batch_first)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.layer(self.embed(ids), src_key_padding_mask=padding))


def next_token(model: nn.Module, ids: Tensor, labels: Tensor) -> Any:
    out = model(ids)
    return F.cross_entropy(out.flatten(0, 1), labels.flatten(), ignore_index=0), out


def masked(model: nn.Module, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, mask.T).flatten(0, 1), labels.flatten())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Positions(nn.Module):
    """Multimodal RoPE has ids [3, B, S]."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 6) for _ in range(3))
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        return self.layer(h + sum(table(i) for table, i in zip(self.tables, ids, strict=True)))


def positions(model: nn.Module, h: Tensor, ids: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(h, ids), y)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).T


def contrast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x, y)
    return F.cross_entropy(logits, torch.arange(len(logits)))


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = torch.relu(self.a(nodes))
        return self.c(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))


def graph(model: nn.Module, nodes: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(nodes, edges), y)


class Pooled(nn.Module):
    """The sum of the rows of each group."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x: Tensor, groups: Tensor, like: Tensor) -> Tensor:
        return torch.zeros_like(like).index_add(0, groups, self.a(x))


def pooled(model: nn.Module, x: Tensor, groups: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x, groups, y), y)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - x.mean(0))


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.places = mlp(), nn.Embedding(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.places(torch.arange(len(x))))


class OwnLoss(nn.Module):
    """As models of transformers: called by name, and with its loss beside other things."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, weight: float = 1.0) -> Any:
        out = self.net(input_ids)
        return out if labels is None else weight * F.mse_loss(out, labels)


X, Y, C = double(BATCH, 6), double(BATCH, 4, seed=1), _whole(4, BATCH, seed=2)
IDS, LABELS = _whole(11, BATCH, 5, seed=3), _whole(11, BATCH, 5, seed=4)
PADDING = torch.arange(5)[:, None] >= (torch.arange(BATCH) % 4 + 2)
SEQUENCE, TARGET = double(5, BATCH, 6, seed=5), double(5, BATCH, 6, seed=6)
ROWS = double(BATCH, seed=7).abs()
EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])

GRADED = Local(mlp, square, (X, Y), (0, 0))
LSTM = Local(Recurrent, square, (SEQUENCE, TARGET), (1, 1), said=1)
ENCODER = Local(lambda: Tokens(False), next_token, (IDS.T.contiguous(), LABELS.T.contiguous()), (1, 1), said=(1, 1))
MROPE = Local(
    Positions,
    positions,
    (double(BATCH, 5, 6), _whole(9, 3, BATCH, 5), double(BATCH, 5, 6, seed=8)),
    (0, 1, 0),
    takes=2,
)
RIGHT = {
    "mlp": GRADED,
    "classes": Local(mlp, classes, (X, C), (0, 0)),
    "class weights": Local(mlp, weighted, (X, C, double(4, seed=9).abs()), (0, 0, None), said=(0, 0, None)),
    "a count": Local(mlp, by_count, (X, Y, torch.tensor(32.0, dtype=torch.float64)), (0, 0, None)),
    "weights of rows": Local(mlp, per_row, (X, Y, ROWS), (0, 0, 0)),
    "a dict": Local(mlp, of_dict, ({"x": X, "y": Y},), (0,), takes=0),
    "a dict, said": Local(mlp, of_dict, ({"x": X, "y": Y},), (0,), said=({"x": 0, "y": -2},), takes=0),
    "batch norm": Local(Norms, classes, (double(BATCH, 2, 6, 6), C % 3), (0, 0)),
    "tokens": Local(Tokens, next_token, (IDS, LABELS), (0, 0)),
    "mask in front": Local(
        Tokens, masked, (IDS, LABELS, PADDING), (0, 0, 1), said={"ids": 0, "labels": 0, "mask": 1}, takes=0
    ),
    "mask in front, unsaid": Local(Tokens, masked, (IDS, LABELS, PADDING), (0, 0, 1), takes=0),
    "lstm": LSTM,
    "encoder": ENCODER,
    "mrope": MROPE,
    "mrope, said": replace(MROPE, said={"h": 0, "ids": 1, "y": 0}),
    "contrast, said": Local(Pair, contrast, (X, Y), (0, 0), said=0, takes=2),
    "own loss": Local(OwnLoss, None, (X, Y), (0, 0), kwargs={"input_ids": 0, "labels": 1}, takes=0),
}
