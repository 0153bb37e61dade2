"""Sizes of a rank's parts of values: shapes, bytes, and bytes as a person reads them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import Mesh
from autopar.ir.program import TensorType, record


def local_type(node: fx.Node, mesh: Mesh) -> TensorType:
    """The shape and the dtype of one rank's part of a node's one result."""
    return _part(record(node).type, record(node).layout, mesh)


def local_types(node: fx.Node, mesh: Mesh) -> Iterator[TensorType]:
    """Those of one rank's parts of all tensor results of a node."""
    known = record(node)
    for type_, layout in zip(known.types, known.layouts, strict=False):
        if type_ is not None and layout is not None:
            yield _part(type_, layout, mesh)


def local_bytes(node: fx.Node, mesh: Mesh) -> int:
    """The bytes of one rank's parts of all tensor results of a node."""
    return sum(type_.bytes_ for type_ in local_types(node, mesh))


def _part(type_: TensorType, layout: Layout, mesh: Mesh) -> TensorType:
    return TensorType(local_shape(type_.shape, layout, mesh), type_.dtype)


def human(bytes_: float) -> str:
    """`12.6 MB`: bytes as a person reads them (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if bytes_ < 1000 or unit == "TB":
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    raise AssertionError
