"""The device mesh: ordered, named axes; ranks are numbered with the last axis fastest."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.errors import MeshError, divisors, one_of

PIPELINE, MICROBATCH = "pp", "mb"  # the axes of stages, and of micro-batches
SLICE = "sl"  # the axis of the slices of a sequence that a stage computes one after another
TIME_AXES = (MICROBATCH, SLICE)  # one rank computes all of their parts, the slices of a micro-batch in a row
EXPERT = "ep"  # splits the batch, and experts
DATA_AXES = ("dp", "fsdp", EXPERT)  # split the batch
CONTEXT, ULYSSES = "cp", "ulysses"  # split the sequence; the second one gives attention whole heads
# Gradients are sums over these: what moves over several of them moves at once.
CONTEXT_AXES = (CONTEXT, ULYSSES)
GRADIENT_AXES = (*DATA_AXES, *CONTEXT_AXES)
SHARDED = "fsdp"  # the data axis over which states are split, where there is one beside dp

AUTO = "auto"  # in place of a mesh: planned where ranks run, for their first batch

_MOST = 10**9  # ranks of an axis
_AXIS = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(-?\d+)\s*\Z", re.ASCII)
_LENGTHS = re.compile(rf"\s*{SLICE}\s*=\s*(\d{{1,12}}(?:\+\d{{1,12}})+)\s*\Z", re.ASCII)  # sl=768+512


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes with their sizes, outermost first, e.g. `Mesh((("dp", 2), ("tp", 4)))`.

    lengths: the positions of each slice of a sequence, where they differ, written `sl=768+512`; sizes of parts are then
    those of a mean slice.
    """

    axes: tuple[tuple[str, int], ...]
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if size > _MOST:
                raise MeshError(f"axis '{name}' of the mesh has size {size}; it is {_MOST} at most.")
        if len(set(names)) != len(names):
            raise MeshError(f"mesh '{self}' names an axis twice: each axis has one name and one size.")
        for name, size in self.axes:
            if size < 1:
                raise MeshError(f"mesh '{self}': axis '{name}' has size {size}; a size is 1 or more.")
        if self.lengths and len(self.lengths) != dict(self.axes).get(SLICE):
            raise MeshError(f"mesh '{self}' has {len(self.lengths)} lengths, but '{SLICE}' another size.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    def __getitem__(self, axis: str) -> int:
        """The number of ranks along an axis, or along several joined ones ("dp:cp")."""
        for name, size in self.axes:
            if name == axis:
                return size
        names = axes_of_group(axis)
        if names == (axis,):
            raise KeyError(axis)
        return math.prod(self[name] for name in names)

    def __contains__(self, axis: str) -> bool:
        return axis in self.names

    def __str__(self) -> str:
        lengths = "+".join(map(str, self.lengths))
        return ",".join(f"{name}={lengths if name == SLICE and lengths else size}" for name, size in self.axes)

    @property
    def granule(self) -> int:
        """The positions that the length of every slice is a multiple of."""
        return math.gcd(*self.lengths)

    def run_of(self, place: int, size: int) -> tuple[int, int]:
        """Where the slice at a place begins and how long it is, along a dim of `size` that slices of different length
        cut."""
        total, before = sum(self.lengths), sum(self.lengths[:place])
        return size * before // total, size * self.lengths[place] // total

    def coord(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis."""
        coord: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, coord[name] = divmod(rank, size)
        return {name: coord[name] for name in self.names}

    def rank(self, coord: Mapping[str, int]) -> int:
        """The rank that stands at a coordinate."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coord[name]
        return rank

    def coords(self) -> list[dict[str, int]]:
        """The coordinates of all ranks, in rank order."""
        ranges = [range(size) for _, size in self.axes]
        return [dict(zip(self.names, point, strict=True)) for point in itertools.product(*ranges)]

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only on `axis`, in the order of that axis."""
        coord = self.coord(rank)
        return tuple(self.rank({**coord, axis: i}) for i in range(self[axis]))


def group_name(axes: Iterable[str]) -> str:
    """The name of the group of ranks that differ on some axes only, the first axis slowest: "dp:cp"."""
    return ":".join(axes)


def axes_of_group(name: str) -> tuple[str, ...]:
    """The inverse of `group_name`."""
    return tuple(name.split(":"))


def is_in_time(group: str) -> bool:
    """True for an axis, or several joined ones, of which one rank computes all parts, one after another."""
    return set(axes_of_group(group)).issubset(TIME_AXES)


def time_mesh(parts: int, slices: int, lengths: tuple[int, ...] = ()) -> Mesh:
    """The axes in time: the parts of a step by their numbers, micro-batch * slices + slice."""
    return Mesh(((MICROBATCH, parts // slices), (SLICE, slices)), lengths)


def parse_mesh(mesh: str | Mapping[str, int] | Mesh, world_size: int | None = None) -> Mesh:
    """`"dp=2,tp=-1"`, `{"dp": 2, "tp": -1}` or a `Mesh`, checked against the number of ranks.

    One size may be -1: it takes what the other axes leave of `world_size`.
    Raises `MeshError` for anything else, or if the product is not `world_size`.
    """
    lengths: tuple[int, ...] = ()
    if isinstance(mesh, Mesh):
        axes, lengths = list(mesh.axes), mesh.lengths
    elif isinstance(mesh, Mapping):
        axes = [(str(name), _size(name, size, mesh)) for name, size in mesh.items()]
    elif isinstance(mesh, str):
        axes, lengths = _parse_axes(mesh)
    else:
        raise MeshError(
            f"a mesh is a string such as 'dp=2,tp=2', a dict, a named DeviceMesh or an autopar.Mesh, "
            f"not {type(mesh).__name__}."
        )
    filled = _fill(axes, mesh, world_size)
    return Mesh(filled.axes, lengths) if lengths else filled


def _size(name: object, size: object, mesh: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int):
        raise MeshError(f"mesh {mesh!r}: the size of axis '{name}' is {size!r}, which is not an integer.")
    if size > _MOST:  # Python does not write a number of thousands of digits
        raise MeshError(f"the size of axis '{name}' is above {_MOST}, which is the most.")
    return size


def _parse_axes(text: str) -> tuple[list[tuple[str, int]], tuple[int, ...]]:
    """The axes, and the lengths of slices that differ."""
    axes, lengths = [], tuple[int, ...]()
    for part in text.split(","):
        if of_slices := _LENGTHS.match(part):
            lengths = tuple(map(int, of_slices[1].split("+")))
            axes.append((SLICE, len(lengths)))
            continue
        match = _AXIS.match(part)
        if match is None:
            raise MeshError(
                f"mesh '{text}': cannot read '{part.strip()}'. Write axis=size pairs with commas, e.g. 'dp=2,tp=2'."
            )
        axes.append((match[1], int(match[2][:20])))  # the first digits of a number that is too large are, too
    return axes, lengths


def _fill(axes: list[tuple[str, int]], mesh: object, world_size: int | None) -> Mesh:
    known = math.prod(size for _, size in axes if size != -1)
    open_axes = [name for name, size in axes if size == -1]
    if len(open_axes) > 1:
        raise MeshError(f"mesh '{mesh}': only one axis may be -1, not {', '.join(open_axes)}.")
    if open_axes:
        if world_size is None:
            raise MeshError(
                f"mesh '{mesh}': '{open_axes[0]}=-1' needs the number of ranks, which is not known here: write a size."
            )
        if known < 1 or world_size % known:
            raise MeshError(
                f"mesh '{mesh}': the other axes need a multiple of {known} ranks, but there are {world_size}. "
                f"Their product may be {one_of(divisors(world_size))} here."
            )
        axes = [(name, world_size // known if size == -1 else size) for name, size in axes]
    filled = Mesh(tuple(axes))
    if world_size is not None and filled.size != world_size:
        raise MeshError(
            f"mesh '{filled}' has {filled.size} ranks, but {world_size} "
            f"{'is' if world_size == 1 else 'are'} running. Start {filled.size} "
            f"(autopar run, or torchrun --nproc-per-node={filled.size}), or write -1 for the axis that takes the rest."
        )
    return filled
