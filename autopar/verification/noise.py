"""How far rounding alone moves what a step gives: the measure where a model allows no closer comparison.

The plain module trains again with the result of every op off by one unit in its last place (see `rounding.py`). That is
asked for only where a comparison failed, so that what is right costs nothing more; and a sample that excuses all of it
is the last one. Samples in which the model meets its own checks say nothing, and the next one moves its weights alone.

What lies within that noise is right if the noise leaves something to compare: of a gradient that is nothing but
rounding, twice as much is rounding too. So where it does not, both sides also train from weights and a batch some
percent away. What is nothing but rounding there too is zero (the gradient of a bias before a normalisation, a loss that
is zero on paper), and may be off by as much as rounding gives, if that is little beside all others of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture.containers import map_tensors
from autopar.verification.comparison import Key, Row, Table, Values
from autopar.verification.rounding import Rounded, Units

SAMPLES = 3
AWAY = 0.1  # by how much at most weights and batch shrink: 0 stays 0, and what is in [0, 1] stays there
ROUNDING = 1 / 32  # noise of this share of a tensor and more: rounding is most of what it is

Noise = dict[Key, float]  # by tensor
# Trains from the same weights each time, a model that the function has changed; what each step gave.
Run = Callable[[Callable[[nn.Module], None]], list[Values]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What noise excuses. factor: how many times the noise an error may be. clear: the share of a tensor that noise may
    leave open: what a program does wrong changes more."""

    factor: float
    clear: float

    @staticmethod
    def of(dtype: torch.dtype) -> Limits:
        """Ranks add up in another order, a sum of many terms is off by several units, and a kernel of torch's rounds
        once where a program's ops round each (BatchNorm): the gradients of scales before a BatchNorm in timm's
        mobileone_s0, zero but for rounding, are off by 2 to 11 times the noise. In a short float a few units are most
        of it, and of what is wrong as well."""
        return Limits(4.0, 0.25) if dtype.itemsize < torch.float32.itemsize else Limits(32.0, 1e-3)


@dataclass(frozen=True, slots=True)
class Trained:
    """A trial whose table may be judged by noise. steps: what each step of the plain module gave. again: trains the one
    whose rounding is measured once more, from the same weights."""

    table: Table
    steps: Sequence[Values]
    again: Run
    limits: Limits

    def noise(self, is_enough: Callable[[Noise], bool]) -> Noise:
        """The largest error of each tensor under rounding, of all steps and samples, where it is finite. With each of
        the `SAMPLES` it grows, and more is excused: none is drawn after one with which `is_enough`."""
        largest: Noise = {}
        for sample in range(SAMPLES):
            found = Table(0.0, zero=self.table.zero)
            for expected, given in zip(self.steps, self._sample(sample), strict=False):
                found.compare(expected, given, {})
            for key, error in found.errors.items():
                if error < float("inf"):
                    largest[key] = max(error, largest.get(key, 0.0))
            if is_enough(largest):
                break
        return largest

    def _sample(self, seed: int) -> list[Values]:
        """What the steps give under rounding; nothing if the model takes no such numbers."""
        for mode, change in ((Rounded(seed), _nothing), (nullcontext(), Units(seed).add_to_parameters)):
            try:
                with mode:
                    return self.again(change)
            except Exception:
                continue
        return []

    def is_clear(self, key: Key, noise: Noise) -> bool:
        """True for what agrees within the tolerance, or within noise that leaves something to compare."""
        limit = min(self.limits.factor * noise.get(key, 0.0), self.limits.clear)
        return self._agrees(key, max(self.table.tolerance, limit))

    def is_zero(self, key: Key, noise: Noise) -> bool:
        """True for what is nothing but rounding, agrees within it, and is small beside the others of its kind."""
        within = self.limits.factor * noise.get(key, 0.0)
        is_small = within * self.table.shares.get(key, 1.0) <= self.limits.clear
        return noise.get(key, 0.0) >= ROUNDING and is_small and self._agrees(key, within)

    def _agrees(self, key: Key, limit: float) -> bool:
        known = [step[key] for step in self.steps if key in step]
        if not known or any(value.isfinite().double().mean() < 0.5 for value in known):  # two NaNs tell nothing
            return False
        return self.table.errors[key] <= limit and self.table.replicas[key] <= self.table.tolerance


def _nothing(_: nn.Module) -> None:
    return


def judged(rows: Sequence[Row], here: Trained, elsewhere: Callable[[], Trained | None]) -> tuple[Row, ...]:
    """The rows with the noise of those that are wrong; right are those that differ by rounding alone, here and, where
    that is all that they are here, elsewhere too. elsewhere: trains away from here, None if the model takes no other
    numbers. If one row is wrong here, all stay as they are."""
    wrong = [(row.kind, row.name) for row in rows if not row.ok]
    noise = here.noise(lambda noise: all(here.is_clear(key, noise) or here.is_zero(key, noise) for key in wrong))
    open_ = {key for key in wrong if not here.is_clear(key, noise)}
    right = set(wrong) - open_
    if all(_is_within(here, key, noise) for key in open_):
        away = elsewhere() if open_ else None
        zero = {key for key in open_ if here.is_zero(key, noise)}
        right |= zero if away is None else _right_elsewhere(open_, away)
    return tuple(
        row if row.ok else replace(row, noise=noise.get((row.kind, row.name)), ok=(row.kind, row.name) in right)
        for row in rows
    )


def _is_within(here: Trained, key: Key, noise: Noise) -> bool:
    within = here.limits.factor * noise.get(key, 0.0)
    return here.table.errors[key] <= within and here.table.replicas[key] <= here.table.tolerance


def _right_elsewhere(keys: set[Key], away: Trained) -> set[Key]:
    noise = away.noise(lambda noise: all(away.is_clear(key, noise) or away.is_zero(key, noise) for key in keys))
    return {key for key in keys if away.is_clear(key, noise) or away.is_zero(key, noise)}


def moved(leaf: Any, generator: torch.Generator) -> Any:
    """A floating-point tensor whose elements shrink at random; anything else as it is, and what holds whole numbers: a
    mask, classes, a count."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or bool((leaf == leaf.round()).all()):
        return leaf
    return _shrunk(leaf, generator)


def move_away(model: nn.Module, batch: Any, is_batch_fixed: bool = False) -> Any:
    """Shrink the parameters of a module at random, in place, and give a batch that is shrunk likewise, if it may be."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = _shrunk(parameter, generator)
    return batch if is_batch_fixed else map_tensors(lambda leaf: moved(leaf, generator), batch)


def _shrunk(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shares = torch.rand(leaf.shape, generator=generator, dtype=torch.float64)
    return leaf.detach() * (1 - AWAY * shares).to(leaf.device, leaf.dtype)
