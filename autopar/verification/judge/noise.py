"""How far rounding alone moves what a step gives: the measure where a model allows no closer comparison.

The plain module trains again with the result of every op off by one unit in its last place (see `rounding.py`). That is
asked for only where a comparison failed, so that what is right costs nothing more; and a sample that excuses all of it
is the last one. Samples in which the model meets its own checks say nothing, nor do those that are not finite (the
gradient of a maximum, which looks for what is equal to it), and the next one moves its weights alone.

What lies within that noise is not yet right: of a gradient that is nothing but rounding, twice as much is rounding too,
and where rows are equal a lost sum changes nothing. So both sides also train from weights and a batch some percent
away, where the noise must leave something to compare. What is nothing but rounding there too is zero (the gradient of a
bias before a normalisation, a loss that is zero on paper), and may be off by as much as rounding gives, if that is
little beside all others of its kind. Of what is nothing but rounding and not small nothing can be said: a longer float
has to tell, or in float64 each step by itself: what rounding changes in one step the next ones enlarge (forty
normalisations of three values, one behind the other), so both sides then begin each with the plain module's weights.

Programs of a shorter float run in float64 as well, and what is wrong with them is found there. Once they are right in
it, the short float has only its own faults left to show, which are large: a sum or a cast in another dtype, an op that
overflows. So noise excuses more then, what is small beside the others of its kind may be any rounding, whole numbers
(an argmax, a count of what is positive) may differ where rounding makes them differ, and where the plain module itself
is not finite there is nothing to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.capture.inputs import tables
from autopar.capture.inputs.containers import map_batch
from autopar.verification.judge.comparison import ComparedRow, Key, Table, Values
from autopar.verification.judge.rounding import Rounded, Units

SAMPLES = 3
AWAY = 0.1  # by how much at most weights and batch shrink: 0 stays 0, and what is in [0, 1] stays there
ROUNDING = 1 / 32  # noise of this share of a tensor and more: rounding is most of what it is

Noise = dict[Key, float]  # by tensor
# Trains from the same weights each time, a model that the function has changed, under torch.autocast if there is a
# precision and the flag says so; what each step gave.
Run = Callable[[Callable[[nn.Module], None], bool], list[Values]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What noise excuses. factor: how many times the noise an error may be. clear: the share of a tensor that noise may
    leave open: what a program does wrong changes more. is_exact: the same is right in float64."""

    factor: float
    clear: float
    is_exact: bool = False

    def after_float64(self) -> Limits:
        """What noise excuses where the same programs are right in float64."""
        return Limits(8 * self.factor, self.clear, is_exact=True)

    @staticmethod
    def of(dtype: torch.dtype) -> Limits:
        """Ranks add up in another order, a sum of many terms is off by several units, and a kernel of torch's rounds
        once where a program's ops round each (BatchNorm): the gradients of scales before a BatchNorm in timm's
        mobileone_s0, zero but for rounding, are off by 2 to 11 times the noise. In a short float a few units are most
        of it, and of what is wrong as well."""
        if dtype.itemsize < torch.float32.itemsize:
            return Limits(4.0, 0.25)
        return Limits(32.0, 1e-3) if dtype.itemsize > torch.float32.itemsize else Limits(16.0, 5e-3)


@dataclass(frozen=True, slots=True)
class Trained:
    """A trial whose table may be judged by noise. steps: what each step of the plain module gave. again: trains it once
    more, from the same weights. short: the float of the precision, if any."""

    table: Table
    steps: Sequence[Values]
    again: Run
    limits: Limits
    short: torch.dtype | None = None

    def noise(self, is_enough: Callable[[Noise], bool]) -> Noise:
        """The largest error of each tensor under rounding, of all steps and samples, where it is finite. With each of
        the `SAMPLES` it grows, and more is excused: none is drawn after one with which `is_enough`."""
        largest: Noise = {}
        for sample in range(SAMPLES):
            for found in self._errors(sample):
                for key, error in found.items():
                    if error < float("inf"):
                        largest[key] = max(error, largest.get(key, 0.0))
            if is_enough(largest):
                break
        return largest

    def _errors(self, seed: int) -> Iterator[Noise]:
        """The errors of a sample. What a model refuses to compute, or what overflows, is made up for by others."""
        for mode, change, is_short in self._ways(seed):
            table = Table(0.0, zero=self.table.zero)
            try:
                with mode:
                    rounded = self.again(change, is_short)
            except Exception:
                continue
            for expected, given in zip(self.steps, rounded, strict=True):
                table.compare(expected, given, {})
            yield table.errors
            if all(error < float("inf") for error in table.errors.values()):
                return

    def _ways(self, seed: int) -> Iterator[tuple[AbstractContextManager[Any], Callable[[nn.Module], None], bool]]:
        yield Rounded(seed), _nothing, True
        if self.short is not None:  # torch.autocast may overflow, or refuse a mask of the least float32
            yield Rounded(seed, self.short), _nothing, False
        yield nullcontext(), Units(seed).add_to_parameters, True
        if self.short is not None:
            yield nullcontext(), Units(seed, self.short).add_to_parameters, False

    def is_clear(self, key: Key, noise: Noise) -> bool:
        """True for what agrees within the tolerance, or within noise that leaves something to compare; of whole numbers
        for those of which rounding makes as many differ."""
        if key in self.table.whole:
            most = max(4 * noise.get(key, 0.0), self.limits.clear)
            return self.limits.is_exact and self._agrees(key, most)
        limit = min(self.limits.factor * noise.get(key, 0.0), self.limits.clear)
        return self._agrees(key, max(self.table.tolerance, limit))

    def is_zero(self, key: Key, noise: Noise) -> bool:
        """True for what is nothing but rounding, agrees within it, and is small beside the others of its kind."""
        if key in self.table.whole:
            return False
        share = self.table.shares.get(key, 1.0)
        within = self.limits.factor * noise.get(key, 0.0)
        is_rounding = noise.get(key, 0.0) >= ROUNDING or self.table.is_small(key)
        if self.limits.is_exact:
            return is_rounding and self._agrees(key, self.limits.clear / share)
        return is_rounding and within * share <= self.limits.clear and self._agrees(key, within)

    def is_beyond(self, key: Key) -> bool:
        """True for what the plain module has not finite itself, though float64 has it right: the float is too short."""
        return self.limits.is_exact and not all(bool(step[key].isfinite().all()) for step in self.steps if key in step)

    def is_open(self, key: Key, noise: Noise) -> bool:
        """True for what noise leaves nothing of to compare: it may be right."""
        return self.limits.factor * noise.get(key, 0.0) > self.limits.clear and self._agrees(key, float("inf"))

    def _agrees(self, key: Key, limit: float) -> bool:
        known = [step[key] for step in self.steps if key in step]
        if not any(bool(value.isfinite().any()) for value in known):  # NaN equals NaN, and tells nothing
            return False
        return self.table.errors[key] <= limit and self.table.replicas[key] <= self.table.tolerance


def _nothing(_: nn.Module) -> None:
    return


def judged(
    rows: Sequence[ComparedRow], here: Trained, elsewhere: Callable[[], Trained | None]
) -> tuple[ComparedRow, ...]:
    """The rows with the noise of those that are wrong; right are those that differ by rounding alone, here and away.
    elsewhere: trains away from here, None if the model takes no other numbers. If one row is wrong here, all are."""
    wrong = [(row.kind, row.name) for row in rows if not row.ok]
    right, noise = _right(here, wrong)
    open_: set[Key] = set()
    # What is nothing but rounding may be right, and shows only elsewhere what else it is.
    if all(key in right or here.is_open(key, noise) for key in wrong):
        open_, away = set(wrong), elsewhere()
        if away is not None:
            away = replace(away, limits=here.limits)
            right, there = _right(away, wrong)
            open_ = {key for key in wrong if away.is_open(key, there)}
    return tuple(row if row.ok else _with_noise(row, noise, right, open_) for row in rows)


def _with_noise(row: ComparedRow, noise: Noise, right: set[Key], open_: set[Key]) -> ComparedRow:
    key = (row.kind, row.name)
    return replace(row, noise=noise.get(key), ok=key in right, is_open=key in open_ - right)


def _right(trained: Trained, keys: Sequence[Key]) -> tuple[set[Key], Noise]:
    """The keys that differ by rounding alone, with the noise."""

    def are(noise: Noise) -> set[Key]:
        asked = (trained.is_clear, trained.is_zero)
        return {key for key in keys if trained.is_beyond(key) or any(is_right(key, noise) for is_right in asked)}

    noise = trained.noise(lambda noise: are(noise) == set(keys))
    return are(noise), noise


def moved(leaf: Any, generator: torch.Generator) -> Any:
    """A floating-point tensor whose elements shrink at random; anything else as it is, and what holds whole numbers: a
    mask, classes, a count."""
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or bool((leaf == leaf.round()).all()):
        return leaf
    return _shrunk(leaf, generator).requires_grad_(leaf.requires_grad)


def move_away(model: nn.Module, batch: Any, is_batch_fixed: bool = False) -> Any:
    """Shrink the parameters of a module at random, in place, and give a batch that is shrunk likewise, if it may be."""
    generator = torch.Generator().manual_seed(0)
    for parameter in tables.parameters(model):
        if parameter.is_floating_point():
            parameter.data = _shrunk(parameter, generator)
    return batch if is_batch_fixed else map_batch(lambda leaf: moved(leaf, generator), batch)


def _shrunk(leaf: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    shares = torch.rand(leaf.shape, generator=generator, dtype=torch.float64, device="cpu")
    return leaf.detach() * (1 - AWAY * shares).to(leaf.device, leaf.dtype)
