"""A model in two files that tests edit: each number and each op in them decides the program or what it computes."""

MODEL = '''"""The model."""

import torch
import torch.nn.functional as F
from torch import nn

from edited_helpers import BIAS, Scaled, halved, shifted

GAIN = 1.5
POWERS = {"first": 2.0, "second": 0.5}
STEPS = [0.1, 0.2]


def make_post(amount, sign=1.0):
    def post(x):
        return x * amount - sign

    return post


class Block(nn.Module):
    slope = 0.3

    def __init__(self, size, rate=0.125, kind="gelu"):
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.rate, self.kind = rate, kind
        self.register_buffer("mask", torch.ones(size))

    @property
    def twice(self):
        return self.rate * 2.0

    def forward(self, x, offset=0.25):
        hidden = self.up(x) + offset
        if self.kind == "gelu":
            hidden = F.gelu(hidden)
        else:
            hidden = F.relu(hidden)
        return x + self.down(hidden) * self.mask * self.twice + self.slope


class Model(nn.Module):
    def __init__(self, size=4, blocks=2, amount=0.75):
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(blocks))
        self.post, self.scaled = make_post(amount), Scaled(1.25)
        self.table = torch.arange(4.0)
        self.norm = nn.LayerNorm(size, eps=1e-4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.post(self.norm(x)) * GAIN ** POWERS["first"] + POWERS["second"]
        for step in STEPS:
            x = x + step * torch.sin(x)
        return self.scaled(halved(shifted(x, 0.5))) + BIAS + self.table * 0.01


def loss_fn(model, x, y, weight=1.0):
    return weight * F.mse_loss(model(x), y) + 0.5 * model(x).abs().mean()
'''

HELPERS = '''"""What the model imports."""

BIAS = 0.0625
OFFSET = 0.03125


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by + 3.0


def halved(x, parts=2):
    return x / parts


def shifted(x, by):
    return (x + by) * 1.75 + OFFSET
'''
