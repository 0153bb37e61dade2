"""Layouts: which mesh axes split which tensor dim, and over which axes a value is still partial.

The one spelling, used in plans, dumps, golden files and errors:

    [dp,-,tp]            dim 0 split over dp, dim 1 whole, dim 2 split over tp
    [dp:cp,-]            dim 0 split over dp, then each piece over cp
    [3:tp,-]             dim 0 read as (3, tp, rest): every third is split over tp (a fused qkv)
    [-,2~cp]             dim 1 read as (2, cp, rest), where the second half has the places of cp in reverse: of 2 n
                         chunks rank r has the chunks r and 2 n - 1 - r (zigzag; `~` stands behind an even number)
    [@ep,-]              row i of dim 0 is on the rank of ep that holds the expert of row i: ranks hold different
                         numbers of rows, in an order of their own
    [-,-] partial(tp)    whole, and the sum over tp is still to be taken
    [-] partial(max:tp)  as above with the maximum
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.errors import LayoutError
from autopar.ir.mesh import SLICE, Mesh

Factor = str | int
OWNED = 0  # before an axis: a row is on the rank that holds its owner, an expert
PARTIAL_KINDS = ("sum", "max", "min", "logsumexp")
_TEXT = re.compile(r"\s*\[([^\[\]]*)\]\s*(?:partial\(([^()]*)\))?\s*\Z")
_NAME = re.compile(r"[A-Za-z_]\w*\Z")


@dataclass(frozen=True, slots=True)
class Layout:
    """For each tensor dim its factors, major to minor: an axis name splits, an integer does not.

    The last factor of a dim (what is left of its size) is not written. A negative integer -k stands for k places, in
    every second of which the axis behind it is mirrored: `k~axis`. OWNED says that the axis behind it holds rows where
    their owners are: `@axis`. `partial` holds (axis, kind) pairs in the order of their axes: the value is the `kind`
    over these axes of what the ranks hold.
    """

    dims: tuple[tuple[Factor, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        dims = ",".join(spelled(dim) or "-" for dim in self.dims)
        if not self.partial:
            return f"[{dims}]"
        partial = ",".join(axis if kind == "sum" else f"{kind}:{axis}" for axis, kind in self.partial)
        return f"[{dims}] partial({partial})"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split some dim."""
        return tuple(f for dim in self.dims for f in dim if isinstance(f, str))

    @property
    def owned(self) -> tuple[tuple[int, str], ...]:
        """The dims of which rows are with their owners, each with the axis."""
        if not any(OWNED in factors for factors in self.dims):  # nearly always: passes ask of each value
            return ()
        return tuple(
            (dim, str(factors[place + 1]))
            for dim, factors in enumerate(self.dims)
            for place, factor in enumerate(factors)
            if factor == OWNED
        )

    @property
    def at_home(self) -> Layout:
        """The same layout with every row where it comes from."""
        return Layout(tuple(tuple(f for f in dim if f != OWNED) for dim in self.dims), self.partial)

    @property
    def is_replicated(self) -> bool:
        """True if every rank holds the whole value."""
        return not self.partial and not any(self.dims)


def spelled(factors: Sequence[Factor]) -> str:
    """The factors of a dim as layouts spell them: `2~cp:tp`."""
    return "".join(map(_spelled, factors)).removesuffix(":")


def _spelled(factor: Factor) -> str:
    if factor == OWNED:
        return "@"
    return f"{-factor}~" if isinstance(factor, int) and factor < 0 else f"{factor}:"


def replicated(ndim: int) -> Layout:
    """The layout of a value that every rank holds whole."""
    return Layout(((),) * ndim)


def parse_layout(text: str) -> Layout:
    """Read the one spelling; the inverse of `str(layout)`."""
    match = _TEXT.match(text)
    if match is None:
        raise LayoutError(f"cannot read layout '{text}': write it like '[dp,-,tp]' or '[-,-] partial(tp)'.")
    body = match[1].strip()
    dims = tuple(_parse_dim(part.strip(), text) for part in body.split(",")) if body else ()
    partial = tuple(_parse_partial(part.strip(), text) for part in match[2].split(",")) if match[2] else ()
    used = [f for dim in dims for f in dim if isinstance(f, str)] + [axis for axis, _ in partial]
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise LayoutError(f"layout '{text}' uses axis '{twice[0]}' twice: an axis splits one dim only.")
    return Layout(dims, partial)


def _parse_dim(part: str, text: str) -> tuple[Factor, ...]:
    if part == "-":
        return ()
    factors: list[Factor] = []
    for factor, link in zip(*[iter([*re.split("([:~])", part), ""])] * 2, strict=True):
        if link == "~" and not (_is_count(factor) and int(factor) % 2 == 0):
            raise LayoutError(f"layout '{text}': '~' stands behind an even number, like '2~cp', not behind '{factor}'.")
        if _is_count(factor):
            factors.append(-int(factor) if link == "~" else int(factor))
        elif _NAME.match(factor.removeprefix("@")):
            factors += [OWNED, factor[1:]] if factor.startswith("@") else [factor]
        else:
            raise LayoutError(f"layout '{text}': '{factor}' is neither an axis name, an integer above 1 nor '-'.")
    if isinstance(factors[-1], int):
        raise LayoutError(f"layout '{text}': '{part}' ends in an integer; what follows the last axis is not written.")
    return tuple(factors)


def _is_count(factor: str) -> bool:
    return factor.isascii() and factor.isdigit() and len(factor) < 13 and int(factor) > 1


def _parse_partial(part: str, text: str) -> tuple[str, str]:
    kind, _, axis = part.rpartition(":")
    if not _NAME.match(axis) or (kind or "sum") not in PARTIAL_KINDS:
        raise LayoutError(f"layout '{text}': '{part}' is not an axis, or a kind and an axis like 'max:tp'.")
    return axis, kind or "sum"


def factor_sizes(dim: tuple[Factor, ...], mesh: Mesh) -> tuple[int, ...]:
    """The sizes of a dim's written factors."""
    return tuple([mesh[f] if isinstance(f, str) else abs(f) or 1 for f in dim])


def outer_of(factors: Sequence[Factor], axis: str) -> int:
    """The places that a dim has outside of an axis, on one rank: the integers before it. Negative if the axis is
    mirrored in every second of them."""
    place = list(factors).index(axis)
    size = math.prod(abs(factor) or 1 for factor in factors[:place] if isinstance(factor, int))
    return -size if is_mirrored(factors, place) else size


def is_mirrored(factors: Sequence[Factor], place: int) -> bool:
    """True if the axis at a place is mirrored in every second place of the integer before it."""
    before = factors[place - 1] if place else 1
    return isinstance(before, int) and before < 0


def mirrored(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x with the dim behind `dim` in reverse, in every second place of `dim`: its own inverse."""
    even, odd = x.unflatten(dim, (-1, 2)).unbind(dim + 1)
    return torch.stack([even, odd.flip(dim + 1)], dim + 1).flatten(dim, dim + 1)


def pieces(dim: tuple[Factor, ...], mesh: Mesh) -> int:
    """Into how many pieces the axes of a dim split it."""
    return math.prod([mesh[f] for f in dim if isinstance(f, str)])


def fits(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """True if every dim is divisible by its factors."""
    if len(shape) != len(layout.dims):
        return False
    for size, dim in zip(shape, layout.dims, strict=True):  # (a generator would take twice the time)
        if dim and size % math.prod(factor_sizes(dim, mesh)):
            return False
    return True


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of one rank's part of a value of global `shape`; of rows that are with their owners the mean."""
    assert fits(shape, layout, mesh), (shape, str(layout), str(mesh))
    return tuple([size // pieces(dim, mesh) if dim else size for size, dim in zip(shape, layout.dims, strict=True)])


def padded_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The smallest shape that the layout fits, of at least `shape`."""
    needed = (math.prod(factor_sizes(dim, mesh)) for dim in layout.dims)
    return tuple(-(-size // factor) * factor for size, factor in zip(shape, needed, strict=True))


def local_part(value: torch.Tensor, layout: Layout, mesh: Mesh, coord: Mapping[str, int]) -> torch.Tensor:
    """What the rank at `coord` holds of a global value. Partial sums are held by coordinate 0."""
    assert not layout.owned, f"who holds which rows of {layout} the owners say"
    first = all(coord[axis] == 0 for axis, kind in layout.partial if kind == "sum")
    if mesh.lengths:
        value, layout = of_slice(value, layout, mesh, coord[SLICE])
    for dim, factors in enumerate(layout.dims):
        if not any(isinstance(f, str) for f in factors):
            continue
        sizes = factor_sizes(factors, mesh)
        rest = value.shape[dim] // math.prod(sizes)
        value = value.unflatten(dim, (*sizes, rest))
        # After a select the next factor moves into this position; an integer factor stays and is passed over.
        kept = 0
        for place, factor in enumerate(factors):
            if isinstance(factor, str):
                value = mirrored(value, dim + kept - 1) if is_mirrored(factors, place) else value
                value = value.select(dim + kept, coord[factor])
            else:
                kept += 1
        value = value.flatten(dim, dim + kept)
    return value if first else torch.zeros_like(value)


def of_slice(value: torch.Tensor, layout: Layout, mesh: Mesh, place: int) -> tuple[torch.Tensor, Layout]:
    """What the slice at a place has of a global value, where slices differ in length; and its layout within that."""
    dims = []
    for dim, factors in enumerate(layout.dims):
        if SLICE in factors:
            at = factors.index(SLICE)
            value = cut_out(value, dim, math.prod(factor_sizes(factors[:at], mesh)), mesh, place)
            factors = (*factors[:at], *factors[at + 1 :])
        dims.append(factors)
    return value, Layout(tuple(dims), layout.partial)


def cut_out(value: torch.Tensor, dim: int, outer: int, mesh: Mesh, place: int) -> torch.Tensor:
    """The slice at a place of a dim that reads (outer, positions): a view where strides allow."""
    value = value.unflatten(dim, (outer, -1))
    return value.narrow(dim + 1, *mesh.run_of(place, value.shape[dim + 1])).flatten(dim, dim + 1)


def combine(parts: list[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The global value of which rank i holds `parts[i]`; the inverse of `local_part`.

    Replicas are taken from the ranks with coordinate 0; `replica_error` says whether they agree.
    """
    return combine_grid(torch.stack(parts), layout, mesh)


def combine_grid(parts: torch.Tensor, layout: Layout, mesh: Mesh) -> torch.Tensor:
    """Put the parts together that stand in one tensor, a rank a row (see `combine`)."""
    assert not layout.owned, f"where the rows of {layout} belong the owners say"
    local = parts.shape[1:]
    grid = parts.reshape((*mesh.shape, *local))
    names = list(mesh.names)
    for axis, kind in layout.partial:
        grid = reduce_dim(grid, names.index(axis), kind)
        names.remove(axis)
    for axis in [name for name in names if name not in layout.axes]:
        grid = grid.select(names.index(axis), 0)
        names.remove(axis)
    # grid dims: the splitting axes, then the local dims. Put each axis where its factor stands.
    order: list[int] = []
    shape: list[int] = []
    grid_shape = list(grid.shape[: len(names)])
    for size, factors in zip(local, layout.dims, strict=True):
        integers = [abs(f) for f in factors if isinstance(f, int)]
        grid_shape += [*integers, size // math.prod(integers)]
    position = len(names)
    reversed_: list[int] = []
    for factors in layout.dims:
        for place, factor in enumerate(factors):
            if isinstance(factor, str):
                if is_mirrored(factors, place):
                    reversed_.append(len(order) - 1)
                order.append(names.index(factor))
            else:
                order.append(position)
                position += 1
        order.append(position)
        position += 1
    for size, factors in zip(local, layout.dims, strict=True):
        shape.append(size * pieces(factors, mesh))
    grid = grid.reshape(grid_shape).permute(order)
    for dim in reversed_:
        grid = mirrored(grid, dim)
    return grid.reshape(shape)


def reduce_dim(grid: torch.Tensor, dim: int, kind: str) -> torch.Tensor:
    """Reduce one dim by a partial kind."""
    match kind:
        case "sum":
            return grid.sum(dim, dtype=grid.dtype)
        case "max":
            return grid.amax(dim)
        case "min":
            return grid.amin(dim)
        case "logsumexp":
            return torch.logsumexp(grid, dim)
    raise AssertionError(kind)


def reduce_two(a: torch.Tensor, b: torch.Tensor, kind: str) -> torch.Tensor:
    """Reduce two tensors by a partial kind, without a grid of both."""
    match kind:
        case "sum":
            return a + b
        case "max":
            return torch.maximum(a, b)
        case "min":
            return torch.minimum(a, b)
        case "logsumexp":
            return torch.logaddexp(a, b)
    raise AssertionError(kind)


def replica_error(parts: list[torch.Tensor], layout: Layout, mesh: Mesh) -> float:
    """The largest absolute difference between ranks that should hold the same part (0 if none share)."""
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    distinct = set(layout.axes) | {axis for axis, _ in layout.partial}
    worst = 0.0
    for part, coord in zip(parts, mesh.coords(), strict=True):
        key = tuple(coord[axis] for axis in mesh.names if axis in distinct)
        part = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
        first = seen.setdefault(key, part)
        if first is not part and part.numel():
            same = (part == first) | (part.isnan() & first.isnan())
            difference = torch.where(same, 0.0, (part.double() - first.double()).abs())
            worst = max(worst, difference.nan_to_num(math.inf, math.inf).max().item())
    return worst
