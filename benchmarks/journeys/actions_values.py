"""Whole values: `full_tensor()`, `state_dict`, what is taken out of a parallel model and put into it."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.journeys.actions import action
from benchmarks.journeys.models import build
from benchmarks.journeys.side import Side, parallel


@action("ready")
def whole_weights(side: Side) -> dict[str, Tensor]:
    return {name: side.whole(p.detach()) for name, p in side.model.named_parameters(remove_duplicate=False)}


@action("ready")
def state_dict_values(side: Side) -> dict[str, Tensor]:
    return {name: side.whole(value) for name, value in side.model.state_dict().items()}


@action("ready")
def state_dict_round_trip(side: Side) -> None:
    """Out, changed weights, and back in."""
    state = {name: value.clone() for name, value in side.model.state_dict().items()}
    with torch.no_grad():
        for p in side.each(side.model.parameters()):
            p.add_(1.0)
    side.mark()
    side.model.load_state_dict(state)


@action("ready")
def full_state_dict(side: Side) -> dict[str, Tensor]:
    """Whole values in a plain model of rank 0; the keys are those of the plain module."""
    state = parallel(side).full_state_dict() if side.is_parallel else dict(side.model.state_dict())
    if side.is_writer:
        fresh = build(side.setup).model
        fresh.load_state_dict(state)
        torch.save(fresh.state_dict(), side.path("full.pt"))
    if side.is_parallel and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
    return torch.load(side.path("full.pt"))


@action("ready")
def load_plain(side: Side) -> None:
    """The state dict of a plain model into this one."""
    state = build({**side.setup, "seed": 7}).model.state_dict()
    side.model.load_state_dict(state)
