"""Choose what all layers together keep, within a number of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from autopar.errors import PlanError
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


def within(
    budget: int, kept: int, layers: Iterable[Layer], rule: PolicyRule, full: Callable[[], int]
) -> Iterator[tuple[Layer, CutChoice]]:
    """The choices of the layers with the least time under which no more than `budget` bytes are kept, where `kept` are
    if nothing is computed again.

    Each layer's choices lie on a convex curve, so the steps that cost least time for a byte come first; equal layers
    take a step one after the other, spread over the depth. The result exceeds what the budget needs by less than the
    last step, of one layer. A larger budget takes fewer of the same steps, so that it never costs more time.

    Raises PlanError if the least that can be kept is more than the budget.
    """
    layers = list(layers)
    frontiers: dict[LayerProblem, tuple[CutChoice, ...]] = {}
    for layer in layers:
        if layer.problem not in frontiers:
            frontiers[layer.problem] = frontier(layer.problem)
    chosen: dict[int, CutChoice] = {}
    left = kept
    for step in _ordered(layers, frontiers):
        if left <= budget:
            break
        chosen[step.layer] = step.target
        left -= step.bytes_
    if left > budget:
        raise PlanError(_impossible(budget, kept, left, rule, full()))
    for place, point in sorted(chosen.items()):
        yield layers[place], point


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
            for turn, place in enumerate(_spread(places)):
                found.append((time / bytes_, turn, _Step(place, after, bytes_, time)))
    found.sort(key=lambda entry: entry[0])  # stable: equal layers in their turn, a layer's own steps in their order
    return [step for _, _, step in found]


def _spread(places: list[int]) -> list[int]:
    """The same places in an order of which every beginning is spread over all of them (bits reversed)."""
    width = max(len(places) - 1, 1).bit_length()
    turn = {place: int(f"{i:0{width}b}"[::-1], 2) for i, place in enumerate(places)}
    return sorted(places, key=turn.__getitem__)


def _impossible(budget: int, kept: int, least: int, rule: PolicyRule, full: int) -> str:
    asked = f"{rule.text} ({budget} of {kept} bytes)" if isinstance(rule.policy, float) else rule.text
    return (
        f"{asked}: a rank has to save at least {least} bytes of the forward pass, {least / kept:.2f} of what 'none' "
        f"saves, since under a budget neither products nor collectives are computed again. Allow {least} bytes or "
        f'more, or write recompute="full", which computes whole layers again and saves {full} bytes.'
    )
