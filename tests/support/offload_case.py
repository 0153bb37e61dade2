"""Models whose layers keep values worth a copy, and steps of them that are compared to the bit."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from models import gpt
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.compiler.meshes import mesh_of
from autopar.ir.plan import Fixed
from autopar.machines import DEVICES, Machine, named
from autopar.verification.virtual_side import Virtual

SLOW = replace(named(DEVICES), to_host=1e6)  # no copy is hidden
LAYERS = 8


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, layers: int = LAYERS, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Gated(Deep):
    """A value that the layers of all stages read, forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.tanh(self.head(x))
        for block in self.blocks:
            x = block(x) * gate
        return x


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def deep(layers: int = LAYERS) -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Deep(layers), squares, (torch.randn(192, 16),)


def gated() -> tuple[nn.Module, Any, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Gated(4), squares, (torch.randn(192, 16),)


MADE = {"deep": deep, "shallow": partial(deep, 4), "gpt": gpt, "gated": gated}


@functools.cache
def captured(name: str, lift: torch.dtype | None = None) -> tuple[nn.Module, Captured, tuple[Tensor, ...]]:
    model, loss_fn, batch = MADE[name]()
    if lift is not None:
        model, batch = model.to(lift), tuple(x.to(lift) if x.is_floating_point() else x for x in batch)
    return model, capture(model, loss_fn, batch, {}, lift=lift), batch


def compiled(
    name: str, mesh: str, lift: torch.dtype | None = None, machine: Machine | None = None, **options: Any
) -> Compiled:
    _, found, _ = captured(name, lift)
    fixed = None if machine is None else Fixed(machine=machine)
    return Compiled.of(lower(found, mesh_of(mesh), options_of(**options), fixed))


def step(name: str, found: Compiled, lift: torch.dtype | None = None) -> dict[tuple[str, str], Tensor]:
    """Loss and gradients, whole, of a step on the virtual mesh, in the order of the program."""
    model, program, batch = captured(name, lift)
    virtual = Virtual(copy.deepcopy(model), program, found, lambda p: torch.optim.SGD(p, lr=0.1))
    values = virtual.step(batch, {}, torch.tensor([1, 2]))
    return {key: value.clone() for key, value in values.items()}
