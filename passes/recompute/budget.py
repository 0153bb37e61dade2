"""Choose what all layers together keep, within a number of bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from autopar.errors import PlanError
from autopar.passes.offload.choose_moves import spread
from autopar.passes.recompute.min_cut import CutChoice, LayerProblem, frontier
from autopar.passes.recompute.policies import PolicyRule


@dataclass(frozen=True, slots=True)
class Layer:
    """What is decided for one group of the backward pass. calls: those of the problem, in its order. is_core: only the
    attention core may be computed again."""

    group: str
    calls: tuple[fx.Node, ...]
    problem: LayerProblem
    is_core: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """From one choice of a layer to the next smaller one."""

    layer: int
    target: CutChoice
    bytes_: int  # that are not kept any more
    time: int  # that it takes


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Values may also wait in the host's memory. most: the bytes, or the part of what is kept, that may do so. stays:
    the bytes that cannot. forward, backward: ns of the passes, which hide copies; byte: of a copy, one way. waits: ns
    that calls wait for the copies of so many bytes, as they would be placed."""

    most: int | float
    stays: int
    forward: float
    backward: float
    byte: float
    waits: Callable[[int], float] = lambda moved: 0.0

    def room(self, kept: int) -> int:
        """How many of the bytes that are kept may move."""
        most = int(self.most * kept) if isinstance(self.most, float) else self.most
        return max(0, min(most, kept - self.stays))

    def time(self, moved: int) -> float:
        """What the copies of so many bytes, out and back, lack to be hidden."""
        least = sum(max(0.0, moved * self.byte - hides) for hides in (self.forward, self.backward))
        return max(least, self.waits(moved)) if moved else 0.0


def within(
    budget: int, kept: int, layers: Iterable[Layer], rule: PolicyRule, full: Callable[[], int],
    elsewhere: Elsewhere | None = None,
) -> Iterator[tuple[Layer, CutChoice]]:  # fmt: skip
    """The choices of the layers with the least time under which no more than `budget` bytes are kept, where `kept` are
    if nothing is computed again.

    Each layer's choices lie on a convex curve, so the steps that cost least time for a byte come first; equal layers
    take a step one after the other, spread over the depth. The result exceeds what the budget needs by less than the
    last step, of one layer. A larger budget takes fewer of the same steps, so that it never costs more time.

    elsewhere: what is over the budget may move, if that takes less time than to compute it again. So many steps are
    taken that both together take the least; to take all of them, or none, is among the choices.

    Raises PlanError if the least that can be kept is more than the budget.
    """
    layers = list(layers)
    frontiers: dict[LayerProblem, tuple[CutChoice, ...]] = {}
    for layer in layers:
        if layer.problem not in frontiers:
            frontiers[layer.problem] = frontier(layer.problem)
    steps = _ordered(layers, frontiers)
    count = _steps_within(budget, kept, steps, elsewhere)
    if count is None:
        raise PlanError(_impossible(budget, kept, kept - sum(step.bytes_ for step in steps), rule, full(), elsewhere))
    chosen = {step.layer: step.target for step in steps[:count]}
    for place, point in sorted(chosen.items()):
        yield layers[place], point


def _steps_within(budget: int, kept: int, steps: list[_Step], elsewhere: Elsewhere | None) -> int | None:
    """How many steps to take, such that what is left keeps to the budget, or may move as far as it does not, in the
    least time; None if no number does."""
    best, least, time, left = None, math.inf, 0, kept
    for count, step in enumerate([None, *steps]):
        if step is not None:
            time, left = time + step.time, left - step.bytes_
        over = max(0, left - budget)
        if over > (0 if elsewhere is None else elsewhere.room(left)):
            continue
        cost = time + (elsewhere.time(over) if elsewhere is not None else 0.0)
        if cost < least:
            best, least = count, cost
        if over == 0:
            break
    return best


def _ordered(layers: list[Layer], frontiers: dict[LayerProblem, tuple[CutChoice, ...]]) -> list[_Step]:
    """The steps of all layers, those first that cost least for a byte."""
    alike: dict[LayerProblem, list[int]] = {}
    for place, layer in enumerate(layers):
        alike.setdefault(layer.problem, []).append(place)
    found: list[tuple[float, int, _Step]] = []
    for problem, places in alike.items():
        points = frontiers[problem]
        for before, after in itertools.pairwise(points):
            bytes_, time = before.bytes_ - after.bytes_, after.time - before.time
            for turn, place in enumerate(spread(places)):
                found.append((time / bytes_, turn, _Step(place, after, bytes_, time)))
    found.sort(key=lambda entry: entry[0])  # stable: equal layers in their turn, a layer's own steps in their order
    return [step for _, _, step in found]


def _impossible(budget: int, kept: int, left: int, rule: PolicyRule, full: int, elsewhere: Elsewhere | None) -> str:
    asked = f"{rule.text} ({budget} of {kept} bytes)" if isinstance(rule.policy, float) else rule.text
    least = left if elsewhere is None else left - elsewhere.room(left)
    if elsewhere is not None:
        return (
            f"{asked}: a rank has to keep at least {least} bytes of the forward pass on the device, which neither "
            f"offload= moves nor recompute= computes again under a budget. Allow {least} bytes or more"
            + (", or let offload= move more." if left - least < left - elsewhere.stays else ".")
        )
    return (
        f"{asked}: a rank has to save at least {least} bytes of the forward pass, {least / kept:.2f} of what 'none' "
        f"saves, since under a budget neither products nor collectives are computed again. Allow {least} bytes or "
        f'more, or write recompute="full", which computes whole layers again and saves {full} bytes.'
    )
