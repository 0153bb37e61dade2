"""What changes between steps: modes, attributes, closures, globals, frozen parameters."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.journeys import models
from benchmarks.journeys.actions import action
from benchmarks.journeys.models import Scale
from benchmarks.journeys.parts import ROWS
from benchmarks.journeys.side import Side

SEEDS = st.integers(0, 5)
VALUES = st.sampled_from([0.5, 2.0, -1.0])
WHICH = st.integers(0, 20)


@action("ready", "chain", value=VALUES)
def set_gain(side: Side, value: float) -> None:
    """A float of the root, through the model that the user holds."""
    side.model.gain = value  # type: ignore[assignment]


@action("ready", "chain", "training", value=VALUES)
def anneal_gain(side: Side, value: float) -> list[Tensor]:
    """The same before each of three steps."""
    losses = []
    for i in range(3):
        side.model.gain = value + 0.1 * i  # type: ignore[assignment]
        losses.append(side.forward_backward(*side.batch(ROWS, i)))
    return losses


@action("ready", value=st.sampled_from([0.0, 0.7]))
def set_beta(side: Side, value: float) -> None:
    """A number in the closure of the loss."""
    side.built.set_beta(value)


@action("ready", value=st.sampled_from([0.2, 0.4]))
def anneal_beta(side: Side, value: float) -> list[Tensor]:
    """The same before each of four steps, as KL annealing does."""
    losses = []
    for i in range(4):
        side.built.set_beta(value * i)
        losses.append(side.forward_backward(*side.batch(ROWS, i)))
    return losses


@action("ready", which=WHICH)
def set_anchors(side: Side, which: int) -> Tensor:
    """Copies of parameters in the closure of the loss, as elastic weight consolidation has them: of some or of all, a
    part of them in a tuple with what they count."""
    named = list(side.model.named_parameters())
    for i, (name, p) in enumerate(named[which % len(named) :]):
        copy = p.detach().clone()
        side.built.anchors[name] = copy if i % 3 else (copy, copy.abs())
    return side.forward_backward(*side.batch(ROWS, 2))


@action("ready")
def move_anchors(side: Side) -> Tensor:
    """The same, as an average that follows the weights: in place, or bound anew."""
    known = dict(side.model.named_parameters())
    for i, (name, anchor) in enumerate(side.built.anchors.items()):
        at, *counts = anchor if isinstance(anchor, tuple) else (anchor,)
        if i % 2:
            at.lerp_(known[name].detach(), 0.25)
            continue
        moved = 0.75 * at + 0.25 * known[name].detach()
        side.built.anchors[name] = (moved, 0.5 * counts[0]) if counts else moved
    return side.forward_backward(*side.batch(ROWS, 3))


@action("ready", value=st.sampled_from([0.5, 2.0]))
def set_temperature(side: Side, value: float) -> Tensor:
    """A global that the loss reads."""
    models.set_temperature(value)
    return side.forward_backward(*side.batch(ROWS, 1))


@action("ready", "scale", value=VALUES)
def set_scale(side: Side, value: float) -> None:
    """A float of a submodule."""
    _first(side, Scale).scale = value


@action("ready", "scale", "training", power=st.sampled_from([0, 9, 31]))
def count_tokens(side: Side, power: int) -> list[Tensor]:
    """An integer of a submodule, which grows before each of four steps until its square has no 64 bits."""
    losses = []
    for i in range(4):
        _first(side, Scale).tokens = (i + 1) * 2**power
        losses.append(side.forward_backward(*side.batch(ROWS, i)))
    _first(side, Scale).tokens = 1
    return losses


@action("ready", "scale")
def flip(side: Side) -> None:
    """A bool that decides which code runs."""
    module = _first(side, Scale)
    module.flipped = not module.flipped


@action("ready", "scale", value=VALUES)
def rebind_table(side: Side, value: float) -> None:
    """A plain tensor attribute that is replaced."""
    module = _first(side, Scale)
    module.table = module.table * value


@action("ready", "scale")
def write_table(side: Side) -> None:
    """The same in place."""
    _first(side, Scale).table.mul_(0.5)


@action("ready", "dropout", value=st.sampled_from([0.0, 0.5]))
def set_dropout(side: Side, value: float) -> None:
    _first(side, nn.Dropout).p = value


@action("ready", "batchnorm", value=st.sampled_from([0.5, 0.01]))
def set_momentum(side: Side, value: float) -> None:
    _first(side, nn.BatchNorm1d).momentum = value


@action("ready", which=WHICH)
def freeze(side: Side, which: int) -> None:
    parameters = list(side.parameters())
    if sum(p.requires_grad for p in parameters) > 1:
        parameters[which % len(parameters)].requires_grad_(False)


@action("ready", "frozen")
def thaw(side: Side) -> None:
    side.model.requires_grad_(True)


@action("ready")
def eval_mode(side: Side) -> None:
    side.model.eval()


@action("ready", "!training")
def train_mode(side: Side) -> None:
    side.model.train()


@action("ready", "chain", which=WHICH)
def eval_of_one(side: Side, which: int) -> None:
    """As those do that fine-tune with a frozen BatchNorm."""
    blocks = side.model.blocks
    blocks[which % len(blocks)].eval()


@action("ready", "chain", "!tokens", value=st.sampled_from([0.0, 0.3]))
def write_weight(side: Side, value: float) -> None:
    """One weight, set by `nn.init` and by a number. A tied table of one number leaves gradients that are rounding."""
    with torch.no_grad():
        nn.init.constant_(side.model.head.weight, value + 0.1)
        side.mark()
        nn.init.zeros_(side.model.blocks[0].up.bias) if hasattr(side.model.blocks[0], "up") else None


def _first(side: Side, kind: type[nn.Module]) -> nn.Module:
    return next(module for module in side.model.modules() if isinstance(module, kind))
