"""The model as a module: calls of it between steps, its methods, and its plain self for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.journeys.actions import action
from benchmarks.journeys.actions_steps import SEEDS
from benchmarks.journeys.parts import ROWS
from benchmarks.journeys.side import Side, parallel

METHODS: Mapping[str, Callable[[Any, Tensor], Any]] = {
    "on a layer": lambda model, x: model.features(x),
    "on the model": lambda model, x: model.predict(x),
    "a property": lambda model, x: model.largest,
    "a count": lambda model, x: torch.tensor([model.count(), len(model)]),
    "asked for": lambda model, x: torch.tensor([hasattr(model, "no_weight_decay"), hasattr(model, "generate")]),
}


@action("ready", weight=3, seed=SEEDS, calls=st.integers(1, 3))
def roll_out(side: Side, seed: int, calls: int) -> list[Tensor]:
    """Calls of the model in its own mode: draws move on, and so do statistics."""
    found = []
    for i in range(calls):
        side.mark()
        with torch.no_grad():
            found.append(side.forward(side.batch(ROWS, seed + i)[0]))
    return found


@action("ready", "chain", "!local", weight=2, seed=SEEDS, kind=st.sampled_from(sorted(METHODS)))
def method(side: Side, seed: int, kind: str) -> Tensor:
    with side.in_mode(False), torch.no_grad():
        found = METHODS[kind](side.model, side.batch(ROWS, seed)[0])
        side.forwards += kind == "on the model"
        return side.whole(found)


@action("ready", weight=3, write=st.booleans(), on_one=st.booleans())
def gather(side: Side, write: bool, on_one: bool) -> None:
    """Change all parameters of the plain module inside of the block."""
    if not side.is_parallel:
        if write:
            _shrink(side.model)
        return
    with parallel(side).gathered(write=write, rank=0 if on_one else None) as plain:
        if plain is not None:
            _shrink(plain)


@torch.no_grad()
def _shrink(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.9)
