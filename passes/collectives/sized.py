"""The values of a slice of a sequence, where slices differ in length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.layout import Layout, factor_sizes
from autopar.ir.mesh import SLICE, Mesh
from autopar.ir.program import Program, Record, TensorType, record

Cut = tuple[int, int, str]  # of a name: outer within it, order of the axis, axis
Shape = tuple[int, ...]
_CHUNKS = "chunk_loss"


@dataclass(frozen=True, slots=True)
class Sized:
    """What differs between the program of a slice of `length` positions and that of a slice of `mean` positions.

    Its values are those of a sequence of slices that are all as long as this one, so that a slice has its part of them.
    mesh: with such slices. places: of the whole sequence, in units of which `count` are this slice's. dims: of the
    results of each node, those along which a slice of another length has another size. inside: the nodes that read a
    dim as (slices, chunks, tokens of a chunk).
    """

    length: int
    mean: int
    mesh: Mesh
    places: int
    count: int
    dims: Mapping[fx.Node, tuple[frozenset[int], ...]]
    inside: frozenset[fx.Node]

    def of_mean(self, size: int) -> int:
        """What a size of a mean slice is of this one."""
        assert size * self.length % self.mean == 0, (size, self.length, self.mean)
        return size * self.length // self.mean

    def size(self, size: int, cut: Sequence[Cut]) -> int:
        """The local size of a name."""
        return self.of_mean(size) if any(axis == SLICE for _, _, axis in cut) else size

    def is_of_chunks(self, node: fx.Node) -> bool:
        """True for what puts chunks into slices, or takes them out: only its shapes tell what a slice has of it."""
        return not self.inside.isdisjoint((node, *node.all_input_nodes))

    def shapes(self, node: fx.Node, shapes: Sequence[Shape]) -> list[Shape]:
        """The local shapes of the tensors that a call gives."""
        dims = [found for found, type_ in zip(self.dims[node], record(node).types, strict=True) if type_ is not None]
        return [self._shape(shape, found) for shape, found in zip(shapes, dims, strict=True)]

    def record(self, known: Record, dims: Sequence[frozenset[int]]) -> Record:
        """The record of a slice's value. dims: of each result, those that are as long as the slice."""
        types = tuple(
            type_ and TensorType(self._shape(type_.shape, found), type_.dtype)
            for type_, found in zip(known.types, dims, strict=False)
        )
        is_sliced = any(layout is not None and SLICE in layout.axes for layout in (*known.layouts, *known.operands))
        flops = known.flops * self.length // self.mean if is_sliced else known.flops
        return known.with_(types=(*types, *known.types[len(types) :]), flops=flops)

    def _shape(self, shape: Shape, dims: frozenset[int]) -> Shape:
        return tuple(self.of_mean(size) if dim in dims else size for dim, size in enumerate(shape))


def sized_program(program: Program, mesh: Mesh, length: int) -> Sized:
    """What differs in the program of slices of `length`. mesh: with the lengths of all slices."""
    total, unit = sum(mesh.lengths), mesh.granule
    dims, inside = _sliced_dims(program)
    return Sized(length, total // mesh[SLICE], Mesh(mesh.axes), total // unit, length // unit, dims, inside)


def unit_of(program: Program, positions: int) -> int:
    """The positions that the length of each slice must be a multiple of, so that all layouts of an EXPLICIT program
    divide what a slice has: cp its mirrored pieces, chunks of logits their tokens."""
    mean, unit = positions // program.mesh[SLICE], 1
    for node, results in _sliced_dims(program)[0].items():
        for found, type_, layout in zip(results, record(node).types, record(node).layouts, strict=False):
            for dim in found:
                assert type_ is not None and layout is not None
                rest = type_.shape[dim] // math.prod(factor_sizes(layout.dims[dim], program.mesh))
                unit = math.lcm(unit, mean // math.gcd(mean, rest))
    return unit


def by_layout(layouts: Iterable[Layout | None]) -> tuple[frozenset[int], ...]:
    """The dims that slices cut, of each result."""
    return tuple(
        frozenset(dim for dim, factors in enumerate(layout.dims) if SLICE in factors) if layout else frozenset()
        for layout in layouts
    )


def _sliced_dims(program: Program) -> tuple[dict[fx.Node, tuple[frozenset[int], ...]], frozenset[fx.Node]]:
    """The dims of each node's results that slices cut, or that lie within what they cut; and the latter's nodes."""
    nodes: dict[fx.Node, tuple[frozenset[int], ...]] = {}
    inside: dict[fx.Node, int] = {}  # of logits in chunks: the dim of the tokens of a chunk of a slice
    for node in program.graph.nodes:
        layouts = record(node).layouts if node.op != "output" else ()
        nodes[node] = by_layout(layouts)
        dim = _tokens_of_chunk(node, inside, program.mesh)
        if dim is not None:
            inside[node], nodes[node] = dim, (frozenset({dim}),)
    return nodes, frozenset(inside)


def _tokens_of_chunk(node: fx.Node, inside: Mapping[fx.Node, int], mesh: Mesh) -> int | None:
    """The dim of the tokens of a chunk of a slice, of what reads a dim as (slices, chunks, tokens of a chunk)."""
    if node.op != "call_function" or record(node).made_by != _CHUNKS or len(record(node).layouts) != 1:
        return None
    source = node.all_input_nodes[0]
    more = len(record(node).type.shape) - len(record(source).type.shape)
    if source in inside and more == 0:
        return inside[source]
    if more != 2 or node.target is not torch.ops.aten.reshape.default:
        return None
    shape, dims, before = record(node).type.shape, record(node).layout.dims, record(source).layout.dims
    sliced = next((dim for dim, factors in enumerate(dims) if SLICE in factors), None)
    # else it is the model's own, or slices cut the tokens of a chunk, and its layout says so
    if sliced is None or sliced >= len(before) or SLICE not in before[sliced]:
        return None
    return sliced + 2 if shape[sliced] == math.prod(factor_sizes(dims[sliced], mesh)) else None
