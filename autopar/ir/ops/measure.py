"""Sizes of a rank's parts of values: shapes, bytes, and bytes as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from torch import fx

from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Mesh, axes_of_group, is_in_time
from autopar.ir.ops.ops import collective_of, op
from autopar.ir.program import TensorType, operand_nodes, record
from autopar.machines.model import RankGroup

PLACES = 5  # where `dispatch` and `combine` take whose tokens rows are: with these tokens move


def local_type(node: fx.Node, mesh: Mesh) -> TensorType:
    """The shape and the dtype of one rank's part of a node's one result."""
    return _part(record(node).type, record(node).layout, mesh)


def local_types(node: fx.Node, mesh: Mesh) -> Iterator[TensorType]:
    """The types of one rank's parts of all tensor results of a node."""
    known = record(node)
    for type_, layout in zip(known.types, known.layouts, strict=False):
        if type_ is not None and layout is not None:
            yield _part(type_, layout, mesh)


def local_bytes(node: fx.Node, mesh: Mesh) -> int:
    """The bytes of one rank's parts of all tensor results of a node."""
    known = record(node)
    match known.types, known.layouts:
        case (TensorType() as type_,), (Layout() as layout,):  # most nodes
            return _part_bytes(type_, layout, mesh)
    return sum([type_.bytes_ for type_ in local_types(node, mesh)])


def moved_type(node: fx.Node, mesh: Mesh) -> TensorType:
    """What a collective moves: the whole of a value, or what a rank sends of the rows at the edges of its pieces."""
    kind, operand = collective_of(node.target), operand_nodes(node)[0]
    if kind.owned is not None and len(node.args) > PLACES and isinstance(node.args[PLACES], fx.Node):
        return _tokens_type(node, operand if kind.owned else node, mesh)
    if not kind.edges:
        return local_type(node if kind.counts_result else operand, mesh)
    long, short = _with_and_without(node, mesh)
    dim = int(node.args[2])  # type: ignore[arg-type]
    whole = short.shape[dim] * mesh[str(node.args[1])]
    rows = long.shape[dim] - short.shape[dim] if goes_to_one(node, mesh) else whole
    return TensorType((*long.shape[:dim], rows, *long.shape[dim + 1 :]), long.dtype)


def _tokens_type(node: fx.Node, tokens: fx.Node, mesh: Mesh) -> TensorType:
    """What goes to their owners, or comes from there, of tokens that go once to each rank; of experts chosen alike."""
    order, route = operand_nodes(node)[1:3]
    chosen, ranks, part = record(order).type.shape[1], mesh[str(node.args[1])], local_type(tokens, mesh)
    times = ranks * share_of_tokens(record(route).type.shape[1] * ranks, ranks, chosen)
    return TensorType((round(part.shape[0] * times), *part.shape[1:]), part.dtype)


def share_of_tokens(groups: int, ranks: int, chosen: int) -> float:
    """The share of tokens that have an expert on a rank, where each takes `chosen` of `groups` experts, all alike."""
    return 1 - math.comb(groups - groups // ranks, chosen) / math.comb(groups, chosen)


def goes_to_one(node: fx.Node, mesh: Mesh) -> bool:
    """True for a collective of which each element goes to one rank: a shift, and edges that are not longer than what
    they are the edges of."""
    kind = collective_of(node.target)
    if not kind.edges:
        return kind.to_one
    args: Any = node.args
    _, _, dim, outer, before, after, *_ = args
    return bool(max(before, after) <= _with_and_without(node, mesh)[1].shape[dim] // abs(outer))


def _with_and_without(node: fx.Node, mesh: Mesh) -> list[TensorType]:
    """The types of a value with the rows beside its pieces, and without them."""
    return sorted((local_type(node, mesh), local_type(operand_nodes(node)[0], mesh)), key=lambda type_: -type_.numel)


@lru_cache(1 << 14)  # a model repeats its layers, and every pass asks again
def _part(type_: TensorType, layout: Layout, mesh: Mesh) -> TensorType:
    return TensorType(local_shape(type_.shape, layout, mesh), type_.dtype)


@lru_cache(1 << 14)
def _part_bytes(type_: TensorType, layout: Layout, mesh: Mesh) -> int:
    return _part(type_, layout, mesh).bytes_


def group_of(mesh: Mesh, name: str, ranks: int) -> RankGroup:
    """The group of an axis, or of several joined ones. ranks: of a node, which the last axes of the mesh fill."""
    if is_in_time(name):
        return RankGroup(1)
    sizes = {axis: count for axis, count in mesh.axes if not is_in_time(axis)}
    inside, names = inside_of(sizes, ranks), [axis for axis in axes_of_group(name) if axis in sizes]
    return RankGroup(math.prod(sizes[axis] for axis in names), math.prod(inside[axis] for axis in names))


def inside_of(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """How many ranks of each axis lie in one node of so many. sizes: of the axes of a mesh, outermost first."""
    inside, stride = dict[str, int](), 1
    for axis, count in reversed(list(sizes.items())):
        inside[axis] = max(1, min(count, ranks // stride))
        stride *= count
    return inside


def human(bytes_: float) -> str:
    """`12.6 MB`: bytes as a person reads them (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if bytes_ < 1000 or unit == "TB":
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    raise AssertionError


PIECE_BYTES, PIECE_BYTES_CPU = 1 << 26, 1 << 20  # of rows in float32; off the CPU a launch must be worth its while
WIDE = 4  # bytes of an element
LOGITS = {op("logsumexp"): 0, op("cross_entropy_backward"): 1}  # with the place of the logits among the operands


def widened_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes of a call's logits in float32, of which a kernel makes `PIECE_BYTES` at a time; 0 for calls that work in
    their result. What is wide already a gradient is computed in."""
    place = LOGITS.get(node.target)  # type: ignore[arg-type]
    if place is None:
        return 0
    logits = operand_nodes(node)[place]
    short = record(logits).type.dtype.itemsize
    return local_bytes(logits, mesh) * WIDE // short if place == 0 or short < WIDE else 0
