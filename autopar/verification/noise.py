"""How far rounding alone moves what a step gives: the measure where a model allows no closer comparison.

Monte Carlo arithmetic (Parker, 1997): the plain module trains again with the result of every op off by one unit in its
last place, at random. It is asked for only where a comparison failed, so that what is right costs nothing more; and a
sample that excuses all of it is the last one.

What lies within that noise is not yet right: of a gradient that is nothing but rounding, twice as much is rounding too.
So both sides also train from weights and a batch some percent away, where the noise must leave something to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture import tables
from autopar.capture.containers import map_tensors
from autopar.ir.aliasing import is_fresh
from autopar.torch_compat import TorchDispatchMode, no_function_modes, tree_map
from autopar.verification.comparison import NOISE, Row, Table, Values

SAMPLES = 3
# Noise that leaves no more than this share of a tensor open: what a program does wrong changes more.
CLEAR = 1e-3
AWAY = 0.1  # by how much at most weights and batch shrink: 0 stays 0, and what is in [0, 1] stays there

Key = tuple[str, str]
Noise = dict[Key, float]  # by tensor
Run = Callable[[], list[Values]]  # trains from the same weights each time; what each step gave


class Rounded(TorchDispatchMode):
    """Every result of an op is off by one unit in its last place, up, down or not at all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if is_fresh(func):
            with no_function_modes():  # what is drawn here is none of the model's numbers
                tree_map(self._round, found)
        return found

    def _round(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.addcmul_(value, self._signs(value), value=torch.finfo(value.dtype).eps)

    def _signs(self, value: torch.Tensor) -> torch.Tensor:
        made = self.generators.get(value.device)
        if made is None:
            made = self.generators[value.device] = torch.Generator(value.device).manual_seed(self.seed)
        return torch.empty_like(value).random_(-1, 2, generator=made)


@dataclass(frozen=True, slots=True)
class Trained:
    """A trial whose table may be judged by noise. steps: what each step of the plain module gave. again: trains that
    once more, from the same weights."""

    table: Table
    steps: Sequence[Values]
    again: Run

    def noise(self, is_enough: Callable[[Noise], bool]) -> Noise:
        """The largest error of each tensor under rounding, of all steps. With each of the `SAMPLES` it grows, and more
        is excused: none is drawn after one with which `is_enough`."""
        found = Table(0.0)
        for sample in range(SAMPLES):
            with Rounded(sample):
                rounded = self.again()
            for expected, given in zip(self.steps, rounded, strict=True):
                found.compare(expected, given, {})
            if is_enough(found.errors):
                break
        return found.errors


def excused(rows: Sequence[Row], trained: Trained) -> tuple[Row, ...]:
    """The rows with the noise of those that are wrong, all of them right if each lies within it; if one does not, all
    stay wrong. What this excuses has to be `confirmed`."""
    tolerance, keys = trained.table.tolerance, {(row.kind, row.name) for row in rows}
    noise = trained.noise(lambda noise: all(row.ok for row in with_noise(rows, noise, keys, tolerance)))
    found = with_noise(rows, noise, keys, tolerance)
    return found if all(row.ok for row in found) else with_noise(rows, noise, set(), tolerance)


def confirmed(rows: Sequence[Row], away: Trained | None) -> tuple[Row, ...]:
    """The rows, of which those that noise excused are right if they are so from other weights and another batch too;
    None: there is no other place to look at."""
    asked = {(row.kind, row.name) for row in rows if row.noise is not None}
    right: set[Key] = set()
    if away is not None:
        noise = away.noise(lambda noise: asked <= clear_of_noise(away.table, noise, away.steps))
        right = clear_of_noise(away.table, noise, away.steps)
    return tuple(replace(row, ok=row.ok and (row.noise is None or (row.kind, row.name) in right)) for row in rows)


def moved(leaf: Any, generator: torch.Generator) -> Any:
    """A floating-point tensor whose elements shrink at random; anything else as it is."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    shares = torch.rand(leaf.shape, generator=generator, dtype=torch.float64)
    return leaf.detach() * (1 - AWAY * shares).to(leaf.device, leaf.dtype)


def move_away(model: nn.Module, batch: Any) -> Any:
    """Shrink the parameters of a module at random, in place, and give a batch that is shrunk likewise."""
    generator = torch.Generator().manual_seed(0)
    for parameter in tables.parameters(model):
        parameter.data = moved(parameter, generator)
    return map_tensors(lambda leaf: moved(leaf, generator), batch)


def clear_of_noise(table: Table, noise: Noise, steps: Sequence[Values]) -> set[Key]:
    """What agrees within the tolerance, or within noise that leaves something to compare."""
    finite = {key for key in table.errors if all(bool(step[key].isfinite().all()) for step in steps if key in step)}
    return {
        key
        for key in finite
        if table.errors[key] <= max(table.tolerance, min(NOISE * noise.get(key, 0.0), CLEAR))
        and table.replicas[key] <= table.tolerance
    }


def with_noise(rows: Sequence[Row], noise: Noise, right_away: set[Key], tolerance: float) -> tuple[Row, ...]:
    """The rows with the noise of those that are wrong; right are those within it that are right elsewhere."""
    found = []
    for row in rows:
        key = (row.kind, row.name)
        if not row.ok:
            within = row.error <= NOISE * noise.get(key, 0.0) and row.replicas <= tolerance
            row = replace(row, noise=noise.get(key), ok=within and key in right_away)
        found.append(row)
    return tuple(found)
