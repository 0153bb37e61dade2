"""The rows that the pieces of a call need of each other, as collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.mesh import Mesh, group_name
from autopar.ir.program import TensorType
from autopar.passes.rules.rule import Dims, Halo, Rule

Cut = tuple[int, int, str]  # (outer within the name, order of the axis, axis)


@dataclass(frozen=True, slots=True)
class Edges:
    """The rows that an exchange adds to every run of a dim. args: of the op `halo`, and of its transpose.

    more: by how many rows the runs of all ranks are longer.
    """

    args: tuple[str, int, int, int, int] | tuple[str, int, int, int, int, bool]
    more: int

    def longer(self, type_: TensorType) -> TensorType:
        """The type of a value with these rows."""
        dim = self.args[1]
        return TensorType((*type_.shape[:dim], type_.shape[dim] + self.more, *type_.shape[dim + 1 :]), type_.dtype)

    @property
    def reason(self) -> str:
        before, after = self.args[3:5]
        return f"a row is computed of the {before} before it and the {after} after it, too"


@dataclass(frozen=True, slots=True)
class Halos:
    """The edges that a call's operands are given, and those that its results have, by position."""

    operands: Mapping[int, list[Edges]]
    results: Mapping[int, list[Edges]]


def halos_of(rule: Rule, cuts: Mapping[str, Sequence[Cut]], mesh: Mesh) -> Halos:
    """What the pieces of a call need, when its names are cut."""
    operands: dict[int, list[Edges]] = {}
    results: dict[int, list[Edges]] = {}
    for halo in rule.halos:
        if halo.name in cuts:
            for i in halo.operands:
                operands.setdefault(i, []).append(_edges(halo, rule.operands[i], cuts[halo.name], mesh))
            for i in halo.results:
                results.setdefault(i, []).append(_edges(halo, rule.results[i], cuts[halo.name], mesh))
    return Halos(operands, results)


def _edges(halo: Halo, dims: Dims, cut: Sequence[Cut], mesh: Mesh) -> Edges:
    runs = runs_of(halo.dim(dims), cut, mesh)
    args = (runs.axis, runs.dim, runs.outer, halo.before, halo.after)
    return Edges((*args, True) if halo.wrap else args, runs.count * (halo.before + halo.after))


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of consecutive rows in which a dim of a value lies on the ranks. axis, outer: as collectives take them.

    count: of all ranks. local: of one.
    """

    axis: str
    dim: int
    outer: int
    count: int

    @property
    def local(self) -> int:
        return abs(self.outer)

    def apart(self, shape: tuple[int, ...], of_rank: bool = False) -> tuple[int, ...]:
        """A shape, of the whole or of a rank, with the dim as (runs, rows of each)."""
        count = self.local if of_rank else self.count
        return (*shape[: self.dim], count, shape[self.dim] // count, *shape[self.dim + 1 :])


def runs_of(dim: int, cut: Sequence[Cut], mesh: Mesh) -> Runs:
    """The runs of a dim of one name that is cut."""
    outers, axes = {outer for outer, _, _ in cut}, [axis for _, _, axis in cut]
    assert len(cut) == 1 or outers == {1}, cut  # several axes cut a name one right after the other: see `may_split`
    (outer,) = outers
    return Runs(group_name(axes), dim, outer, abs(outer) * math.prod(mesh[axis] for axis in axes))
