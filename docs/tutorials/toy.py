"""What the tutorials train: a small language model in plain PyTorch, on rows of tokens that follow a rule."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

VOCABULARY, LENGTH, WIDTH = 64, 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def dataset(rows: int = 32) -> TensorDataset:
    """Each token is 5 times the one before it, plus 3: the same rows in every run."""
    tokens = torch.arange(rows)[:, None] * torch.ones(1, LENGTH + 1, dtype=torch.long)
    for i in range(LENGTH):
        tokens[:, i + 1] = (5 * tokens[:, i] + 3) % VOCABULARY
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])
