"""Hooks of modules, parameters and optimizers: set, and taken away."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.errors import CaptureError
from benchmarks.journeys.actions import action
from benchmarks.journeys.parts import ROWS
from benchmarks.journeys.side import Side

WHICH = st.integers(0, 20)
FACTORS = st.sampled_from([0.5, 1.5])


@action("ready", "chain", "!hook forward", factor=FACTORS)
def forward_hook(side: Side, factor: float) -> None:
    """One that changes what a block gives."""
    side.handles["forward"] = side.model.blocks[0].register_forward_hook(lambda module, inputs, out: out * factor)


@action("ready", "chain", "!hook before", factor=FACTORS)
def forward_pre_hook(side: Side, factor: float) -> None:
    side.handles["before"] = side.model.head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * factor,))


@action("ready", "!llama", "!hook root", factor=FACTORS)
def forward_hook_of_the_root(side: Side, factor: float) -> None:
    """On the model that the user holds."""
    side.handles["root"] = side.model.register_forward_hook(lambda module, inputs, out: out * factor)


@action("ready", "chain", "!hook backward", factor=FACTORS)
def backward_hook(side: Side, factor: float) -> None:
    def change(module: nn.Module, before: Any, after: Any) -> Any:
        return tuple(g if g is None else g * factor for g in before)

    side.handles["backward"] = side.model.blocks[0].register_full_backward_hook(change)


@action("ready", "!hook gradient", which=WHICH, factor=FACTORS)
def gradient_hook(side: Side, which: int, factor: float) -> None:
    """As those write that scale the gradients of one layer."""
    parameter = _trainable(side, which)
    side.handles["gradient"] = parameter.register_hook(lambda gradient: gradient * factor)


@action("ready", "!hook accumulated", which=WHICH, factor=FACTORS)
def post_accumulate_hook(side: Side, which: int, factor: float) -> None:
    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.grad.mul_(factor)

    parameter = _trainable(side, which)
    side.handles["accumulated"] = parameter.register_post_accumulate_grad_hook(change)


@action("ready", "!hook watching", which=WHICH)
def watch_gradients(side: Side, which: int) -> None:
    """One that only logs."""

    def note(gradient: Tensor) -> None:
        side.seen.append(gradient.norm().item())

    side.handles["watching"] = _trainable(side, which).register_hook(note)


@action("ready", "chain", must_refuse=CaptureError, seed=st.integers(0, 5))
def watch_outputs(side: Side, seed: int) -> Tensor:
    """One that logs what a block gives, for one step: it reads a value, and says so."""

    seen: list[float] = []  # a step that is refused has run until it is known what the number is for

    def note(module: nn.Module, inputs: Any, out: Tensor) -> None:
        seen.append(out.detach().abs().max().item())

    handle = side.model.blocks[0].register_forward_hook(note)
    try:
        loss = side.forward_backward(*side.batch(ROWS, seed))
        side.seen += seen
        return loss
    finally:
        handle.remove()


@action("ready", "optimizer", "!hook step")
def optimizer_hook(side: Side) -> None:
    """One that decays before each step."""

    def decay(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in side.each(group["params"]):
                p.data.mul_(0.99)
        side.mark()

    assert side.optimizer is not None
    side.handles["step"] = side.optimizer.register_step_pre_hook(decay)


@action("ready", "hooks", which=WHICH)
def remove_hook(side: Side, which: int) -> None:
    names = sorted(side.handles)
    side.handles.pop(names[which % len(names)]).remove()


def _trainable(side: Side, which: int) -> nn.Parameter:
    parameters = [p for p in side.parameters() if p.requires_grad]
    return parameters[which % len(parameters)]
