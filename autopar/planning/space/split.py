"""How ranks divide a micro-batch, and how far apart they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from autopar.ir.mesh import CONTEXT_AXES, SHARDED, Mesh
from autopar.ir.ops.measure import group_of

TENSOR, DATA = "tp", "dp"
INNER = (*CONTEXT_AXES, TENSOR)  # split the parts of each other, in this order
Axes = tuple[tuple[str, int], ...]


class Split(NamedTuple):
    """tp, cp, ulysses: ranks of each. sequence: activations lie split over tp where no weight needs them whole. around:
    the axes of the mesh among which these lie, outermost first; none where nothing lies between neighbours. data: ranks
    that divide the rows, of a model whose forward pass takes them together: sums over these are among its calls. batch:
    rows of a step, of a model in which all pairs of them meet; 0 of any other."""

    tp: int = 1
    sequence: bool = False
    cp: int = 1
    ulysses: int = 1
    around: Axes = ()
    data: int = 1
    batch: int = 0

    @staticmethod
    @cache  # many plans differ in nothing else
    def of(tp: int, sequence: bool, cp: int, ulysses: int, axes: Axes) -> Split:
        """The split as it lies in a mesh of these axes, outermost first."""
        split = Split(tp, sequence, cp, ulysses)
        inner = tuple(_inner(axes)) if tp * split.context > 1 else ()
        return split if not inner or inner == split.mesh.axes else split._replace(around=inner)

    @property
    def context(self) -> int:
        """The ranks that have a part of each sequence."""
        return self.cp * self.ulysses

    @property
    def mesh(self) -> Mesh:
        """The mesh of the program: where its ranks lie decides no layout."""
        sizes = (self.data, self.cp, self.ulysses, self.tp)
        axes = tuple((name, size) for name, size in zip((DATA, *INNER), sizes, strict=True) if size > 1)
        return Mesh(axes or ((DATA, 1),))

    def summed(self, axes: Axes) -> Split:
        """Split a model that takes rows together, in a mesh of these axes: those that divide rows count as one."""
        ranks = math.prod(size for name, size in axes if name in (DATA, SHARDED))
        if ranks == 1:
            return self
        outer = next(name for name, _ in axes if name in (DATA, SHARDED))
        joined = [
            (DATA, ranks) if name == outer else (name, size)
            for name, size in axes
            if name == outer or name not in (DATA, SHARDED)
        ]
        return self._replace(around=tuple(joined), data=ranks)

    @property
    def program(self) -> Split:
        """The split that programs of a micro-batch are made for: how many ranks divide the rows changes none."""
        return self.near._replace(data=min(self.data, 2), batch=0)

    @property
    def near(self) -> Split:
        """The split with nothing between its ranks."""
        return self._replace(around=()) if self.around else self

    @property
    def placed(self) -> Mesh:
        """The mesh by which the groups of its axes are known."""
        return Mesh(self.around) if self.around else self.mesh

    def inside(self, ranks: int) -> tuple[int, ...]:
        """How many ranks of each axis lie in one node of so many."""
        return tuple(group_of(self.placed, name, ranks).inside for name, _ in self.mesh.axes)


def _inner(axes: Axes) -> Iterator[tuple[str, int]]:
    """The axes from the outermost one of the split on; what the others are called does not matter."""
    names = [name for name, size in axes if size > 1]
    first = next(i for i, name in enumerate(names) if name in INNER)
    for i, (name, size) in enumerate((name, size) for name, size in axes if size > 1):
        if i >= first:
            yield (name if name in INNER else f"other{i - first}"), size
