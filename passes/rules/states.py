"""What one axis does to a value, and to the operands and results of one call.

The search takes the mesh axes one after the other. Per axis a value is whole (None), split (dim, outer), or
partial (a kind). `outer` counts the elements-blocks that the dim has outside of the axis: a dim read as
(outer, axis, rest). It is negative where the axis is mirrored in every second block. The states of all axes compose to
a `Layout`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import VerificationError
from autopar.ir.layout import OWNED, Factor, Layout
from autopar.ir.mesh import Mesh
from autopar.passes.rules.rule import Dim, Dims, Rule
from autopar.passes.rules.splits import Choice, Split, place

State = Split | str | None


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run a call on one axis.

    `choice` is the name that is split, if any; `work` is the share of the call's operations that a rank does.
    """

    operands: tuple[State, ...]
    results: tuple[State, ...]
    choice: Choice | None = None
    work: float = 1.0

    @property
    def is_linear(self) -> bool:
        """True if partial sums go through the call."""
        return self.choice is None and any(state is not None for state in self.operands)

    def __str__(self) -> str:
        return f"{self.operands} -> {self.results}"


def may_split(rule: Rule, choice: Choice, size: int, taken: tuple[tuple[Choice, int], ...]) -> bool:
    """True if a choice is allowed by the rule, divides, and goes with the choices of earlier axes (`taken`)."""
    name, outer = choice
    if name in rule.replicated or (name in rule.indexed and outer != 1):
        return False
    if rule.owned and name == rule.owned[1] and (rule.owned[0], OWNED) in (other for other, _ in taken):
        return False  # an earlier axis split the owners: of its pieces only their rows can be
    if outer == OWNED:
        tensors = (*rule.operands, *rule.results)
        alone = all(names == (name,) for dims in tensors for names in dims if name in names)
        before = math.prod(other_size for (other, _), other_size in taken if other == name)
        if rule.owned and rule.owned[0] == name:
            others = tuple(one for one in taken if one[0] != choice)
            inside = math.prod(other_size for one, other_size in taken if one == choice)
            if not may_split(rule, (rule.owned[1], 1), size * inside, others):
                return False
        return alone and name not in rule.ordered and rule.sizes[name] % (size * before) == 0
    if name in rule.reversed and (outer > 0 or any(other == name for (other, _), _ in taken)):
        return False
    inside = 1  # earlier pieces that this axis splits further
    for (other, other_outer), other_size in taken:
        if other != name:
            continue
        if name in rule.indexed:
            return False
        other_outer = other_outer or 1  # as many for each owner, for what splits them further
        if (outer, other_outer) != (1, 1) and name in rule.neighbours:
            return False  # the pieces beside one are those of one group of ranks
        if other_outer == outer:
            inside *= other_size
        elif not _is_inside((other_outer, other_size), outer) and not _is_inside((outer, size), other_outer):
            return False
    pieces = abs(outer) * inside * size
    return rule.sizes[name] % pieces == 0 and pieces <= rule.sizes[name]


def _is_inside(split: tuple[int, int], outer: int) -> bool:
    """True if each piece of a split (outer, size) has whole blocks of another `outer`; an even number, to mirror in."""
    block = abs(split[0]) * split[1]
    return not outer % (block if outer > 0 else 2 * block)


def strategies(
    rule: Rule, candidates: dict[str, set[int]], size: int, taken: tuple[tuple[Choice, int], ...]
) -> list[Strategy]:
    """All ways to run a call on an axis of `size`: whole, split along each name, or linear in partial operands."""
    sizes = dict(rule.sizes)
    found = [Strategy((None,) * len(rule.operands), (None,) * len(rule.results))]
    for name in rule.names():
        for outer in sorted(candidates.get(name, ()), key=lambda outer: (abs(outer), -outer)):
            choice = (name, outer)
            if not may_split(rule, choice, size, taken):
                continue
            if outer == OWNED and rule.owned and rule.owned[0] == name:
                found.append(_with_owners(rule, sizes, size))
                continue
            operands: tuple[State, ...] = tuple(place(dims, choice, sizes) for dims in rule.operands)
            contracted = any(state is not None for state in operands)
            results = tuple(
                place(dims, choice, sizes) or (rule.partial if contracted else None) for dims in rule.results
            )
            found.append(Strategy(operands, results, choice, _share(outer, size, name in rule.growing)))
    for group in rule.linear:
        operands = tuple("sum" if i in group else None for i in range(len(rule.operands)))
        found.append(Strategy(operands, ("sum",) * len(rule.results)))
    return list(dict.fromkeys(found))


def _with_owners(rule: Rule, sizes: dict[str, int], size: int) -> Strategy:
    """Rows are with the ranks that have their owners: what a rank gives of them is no part of a sum."""
    assert rule.owned is not None
    rows, owners = (rule.owned[0], OWNED), (rule.owned[1], 1)

    def state(dims: Dims) -> State:
        return place(dims, rows, sizes) or place(dims, owners, sizes)

    return Strategy(tuple(map(state, rule.operands)), tuple(map(state, rule.results)), rows, 1 / size)


def _share(outer: int, size: int, grows: bool) -> float:
    """The share of a call's work that the busiest rank does, if that grows with the position: of causal attention
    1/size for mirrored pieces, up to twice that for pieces in order."""
    return (1 + (1 - 1 / size) / outer) / size if grows and outer > 0 else 1 / size


def compose(states: dict[str, State], ndim: int, mesh: Mesh) -> Layout:
    """The layout of a value from its state on each axis."""
    splits: list[list[tuple[int, int, str]]] = [[] for _ in range(ndim)]
    partial = []
    for order, axis in enumerate(mesh.names):
        state = states.get(axis)
        if isinstance(state, str):
            partial.append((axis, state))
        elif state is not None:
            splits[state[0]].append((state[1], order, axis))
    return Layout(tuple(_factors(found, mesh) for found in splits), tuple(partial))


def _factors(splits: list[tuple[int, int, str]], mesh: Mesh) -> tuple[Factor, ...]:
    factors: list[Factor] = []
    position = 1
    for outer, _, axis in sorted(splits, key=by_outer):
        if outer == OWNED:
            factors.append(OWNED)
        if abs(outer) > position:
            assert outer % position == 0, (splits, str(mesh))
            factors.append((abs(outer) // position) * (-1 if outer < 0 else 1))
            position = abs(outer)
        factors.append(axis)
        position *= mesh[axis]
    return tuple(factors)


def by_outer(cut: tuple[int, int, str]) -> tuple[int, int]:
    """Sorts (outer, order of the axis, axis): outermost first."""
    return abs(cut[0]) or 1, cut[1]


def states_of(layout: Layout, mesh: Mesh) -> dict[str, State]:
    """The state of each axis in a layout: the inverse of `compose`."""
    states: dict[str, State] = dict(layout.partial)
    for dim, factors in enumerate(layout.dims):
        position = run = 1  # axes that follow each other directly, in the order of the mesh, share their outer
        previous: Factor | None = None
        for factor in factors:
            if isinstance(factor, int):
                position *= abs(factor) or 1
            elif previous == OWNED:
                states[factor] = (dim, OWNED)
                position *= mesh[factor]
            else:
                if isinstance(previous, int):
                    run = position if previous > 0 else -position
                elif previous is not None and mesh.names.index(previous) > mesh.names.index(factor):
                    run = position
                states[factor] = (dim, run)
                position *= mesh[factor]
            previous = factor
    return states


def choices_of(dims: Dims, layout: Layout, sizes: Mapping[str, int], mesh: Mesh) -> dict[str, Choice]:
    """The name that each axis of a layout splits, of a tensor with these names: what an axis finds of a name that
    those before it have not taken to pieces. Raises VerificationError if one splits no name."""
    choices: dict[str, Choice] = {}
    for names, factors in zip(dims, layout.dims, strict=True):
        if factors and not _choose(choices, names, list(factors), sizes, mesh):
            raise VerificationError(f"{layout} of dims {dims} splits a name of {dict(sizes)} not into whole pieces")
    return choices


def _choose(
    choices: dict[str, Choice], names: Dim, factors: list[Factor], sizes: Mapping[str, int], mesh: Mesh
) -> bool:
    """Give each axis of a dim its name; False if one has none."""
    for name in names:
        position = run = 1
        previous: Factor | None = None
        while factors and position < sizes[name]:
            factor, left = factors.pop(0), sizes[name] // position
            if factor == OWNED:
                factor = factors.pop(0)
                choices[str(factor)] = name, OWNED
                position *= mesh[str(factor)]
            elif isinstance(factor, int):
                blocks = min(abs(factor), left)
                more, odd = divmod(abs(factor), blocks)
                if odd or left % blocks or (more == 1 and blocks == left and factor < 0):
                    return False
                if more > 1:
                    factors.insert(0, more if factor > 0 else -more)
                position *= blocks
                run = position if factor > 0 else -position
            else:
                if left % mesh[factor]:
                    return False
                if isinstance(previous, str) and mesh.names.index(previous) > mesh.names.index(factor):
                    run = position
                choices[factor] = name, run
                position *= mesh[factor]
            previous = factor
    return not factors
