"""Small random modules: a list of steps drawn from a seed, each on a tensor of shape (rows, ...) with the batch first.

A step is a module of its own, so that a failing program prints as what it does. Widths are multiples of 4 now and
then, and odd ones else; what cannot be split must then stay replicated.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 12
Shape = tuple[int, ...]  # without the batch


class Step(nn.Module):
    """One step: a function of the tensor and of the step's own weights."""

    def __init__(self, text: str, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.text, self.function = text, function
        self.inner = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.inner)

    def extra_repr(self) -> str:
        return self.text


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "x + 1": lambda x: x + 1,
    "2 * x": lambda x: 2 * x,
    "x * x": lambda x: x * x,
    "x - half of the mean of rows": lambda x: x - x.mean(0) / 2,  # the mean would leave zeros to normalise
    "where": lambda x: torch.where(x > 0, x, 0.1 * x.square()),
    "clamp": lambda x: x.clamp(-1.5, 1.5),
    "x / (1 + x.abs())": lambda x: x / (1 + x.abs()),
    "sigmoid gate": lambda x: x * torch.sigmoid(x.detach()),
    "x + sum of the last": lambda x: x + 0.1 * x.sum(-1, keepdim=True),
    "x * max of the last": lambda x: x * x.detach().amax(-1, keepdim=True).clamp(-2, 2),
    "cumsum of the last": lambda x: x + 0.1 * x.cumsum(-1),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax of rows": lambda x: x + x.softmax(0),
    "normalise": lambda x: F.normalize(x + 0.1, dim=-1),
}


def pointwise(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    name = draw.choice(sorted(POINTWISE))
    return Step(name, POINTWISE[name]), shape


def linear(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    width, bias = draw.choice([4, 6, 8, 12, 16, 5, 7]), draw.random() < 0.7
    made = nn.Linear(shape[-1], width, bias=bias)
    return Step(f"linear to {width}", lambda x, f: f(x), made), (*shape[:-1], width)


def mlp(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    hidden = draw.choice([8, 16, 24])
    up, down = nn.Linear(shape[-1], hidden), nn.Linear(hidden, shape[-1])
    return Step(f"residual mlp {hidden}", lambda x, f, g: x + g(F.gelu(f(x))), up, down), shape


def norm(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    kind = draw.choice(["layer", "rms", "batch"])
    if kind == "batch" and len(shape) == 1:
        return Step("batch norm", lambda x, f: f(x), nn.BatchNorm1d(shape[-1])), shape
    made = nn.RMSNorm(shape[-1]) if kind == "rms" else nn.LayerNorm(shape[-1])
    return Step(f"{kind} norm", lambda x, f: f(x), made), shape


def fold(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    """Split the last dim in two, or merge the last two."""
    if len(shape) > 1 and draw.random() < 0.6:
        return Step("merge the last dims", lambda x: x.flatten(-2)), (*shape[:-2], shape[-2] * shape[-1])
    parts = [n for n in (2, 3, 4) if shape[-1] % n == 0]
    if not parts or len(shape) > 2:
        return Step("merge with the batch and back", lambda x: (x.flatten(0, -2) * 2).view(x.shape)), shape
    n = draw.choice(parts)
    return Step(f"split the last dim by {n}", lambda x: x.unflatten(-1, (n, -1))), (*shape[:-1], n, shape[-1] // n)


def turn(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    if len(shape) < 2:
        return pointwise(draw, shape)
    return Step("transpose", lambda x: x.transpose(-1, -2)), (*shape[:-2], shape[-1], shape[-2])


def pieces(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    """Chunks that are put together again in another way."""
    width = shape[-1]
    kind = draw.choice(["swap", "product", "doubled", "slice", "fused"])
    if kind == "fused":
        made = nn.Linear(width, 3 * width)

        def gate(x: Tensor, f: nn.Module) -> Tensor:
            a, b, c = f(x).chunk(3, -1)
            return a * torch.sigmoid(b) + c

        return Step("linear in thirds", gate, made), shape
    if kind == "slice" and width > 2:
        return Step("drop the first and last", lambda x: x[..., 1:-1]), (*shape[:-1], width - 2)
    if kind == "doubled":
        return Step("cat with itself", lambda x: torch.cat([x, -x], -1)), (*shape[:-1], 2 * width)
    if width % 2:
        return Step("stack", lambda x: torch.stack([x, x.square()], -1).sum(-1)), shape
    if kind == "swap":
        return Step("swap halves", lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)), shape
    return Step("product of halves", lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1]), (*shape[:-1], width // 2)


def product(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    """Products of activations with each other."""
    if len(shape) < 2:
        return Step("outer product with itself", lambda x: (x.unsqueeze(-1) @ x.unsqueeze(-2)).mean(-1)), shape
    return Step("attention over itself", lambda x: (x @ x.transpose(-1, -2)).softmax(-1) @ x), shape


def reduce(draw: random.Random, shape: Shape) -> tuple[Step, Shape]:
    if len(shape) < 2:
        return pointwise(draw, shape)
    dim = draw.choice([-1, -2])
    name = draw.choice(["sum", "mean", "amax", "logsumexp"])
    kept = shape[:-2] + ((shape[-2],) if dim == -1 else (shape[-1],))
    return Step(f"{name} over {dim}", lambda x: getattr(torch, name)(x, dim)), kept


STEPS = (pointwise, pointwise, linear, linear, mlp, norm, fold, turn, pieces, product, reduce)
LIMIT = 64  # elements a row


class Program(nn.Module):
    """A start (features, or tokens of an embedding), then the steps; ends in three numbers a row."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.embedding: nn.Embedding | None = None
        shape: Shape = (draw.choice([8, 12, 16, 6]),)
        if draw.random() < 0.4:
            self.embedding = nn.Embedding(draw.choice([8, 10, 20]), shape[0])
            shape = (draw.choice([2, 3, 4]), *shape)
        self.start, steps = shape, []
        for _ in range(draw.randint(3, 8)):
            make = draw.choice(STEPS)
            step, new = make(draw, shape)
            if torch.Size(new).numel() > LIMIT:
                continue
            steps.append(step)
            shape = new
        self.steps = nn.ModuleList(steps)
        self.head = nn.Linear(torch.Size(shape).numel(), 4)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim < 2:
                    parameter += 0.3 * torch.randn_like(parameter)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Rows of sizes of their own, so that no two shards are alike."""
        y = torch.randn(ROWS, 4)
        if self.embedding is not None:
            return torch.randint(self.embedding.num_embeddings, (ROWS, self.start[0])), y
        return torch.randn(ROWS, *self.start) * (1 + torch.arange(ROWS).view(-1, *[1] * len(self.start)) / 6), y

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.embedding is None else self.embedding(x)
        for step in self.steps:
            h = step(h)
        return self.head(h.flatten(1))
