"""What a rule says of one call, in names: which dims of operands and results are the same thing.

`mm: "m k, k n -> m n"`. A name in operands and results may be split; a name that a result lacks is
contracted and leaves that result partial. The notation is in `passes/rules/notation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.ir.program import TensorType, operand_nodes, record

Dim = tuple[str, ...]  # the names that make up a tensor dim, major to minor; () is a dim of size 1
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One op with its arguments, as a rule sees it: tensor arguments are known by their types.

    `args` and `kwargs` are the node's own; a tensor in them is any object (an fx.Node); ints are global.
    `operands` are the types of the tensor arguments as `operand_nodes` orders them; `results` of the results.
    """

    op: str  # e.g. "aten.mm.default"
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]


def call_of(node: fx.Node) -> Call:
    """A node as rules see it."""
    return Call(
        op=str(node.target),
        args=node.args,
        kwargs=node.kwargs,
        operands=tuple(record(operand).type for operand in operand_nodes(node)),
        results=tuple(type_ for type_ in record(node).types if type_ is not None),
    )


@dataclass(frozen=True, slots=True)
class Halo:
    """The rows of the pieces beside its own that a call reads, or writes, for a piece of a name.

    before, after: how many, of the dim of which `name` is the first; at the ends of the whole they are zeros. operands:
    those that have them. results: those of which they are parts of what the pieces beside make, to be added there.
    wrap: at the ends of the whole they are the rows of its other end.
    """

    name: str
    before: int
    after: int
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    wrap: bool = False

    def dim(self, dims: Dims) -> int:
        """The dim of a tensor with these names, of which it has rows."""
        return next(dim for dim, names in enumerate(dims) if names[:1] == (self.name,))


@dataclass(frozen=True, slots=True)
class Rule:
    """How one call may be split.

    operands, results: for each tensor, for each dim, the names that make it up.
    sizes: the size of each name.
    replicated: the names that must not be split.
    partial: the kind of partial result that a split name leaves in a result that lacks it.
    linear: sets of operands; if all operands of a set are partial sums (and the others are not), so are the results.
    indexed: names along which an index operand points; they may be split contiguously only, and the call then gets
      the offset of its piece as the argument `offset`.
    flops: floating-point operations of the whole call, if it is a contraction; 0 for cheap ops.
    positional: names whose positions the op counts (causal attention its queries): if one is split, the call gets the
      first position of each run of its piece as the argument `starts`.
    growing: those of them along which the work grows.
    halos: what a piece needs of the pieces beside it. What has none needs its own rows only.
    scan: the name along which the only result is a running sum, and whether that begins at the end: to a piece's own
      the sums of the pieces before it are added.
    reversed: names of which the op turns the order round: they are split in mirrored pieces alone, of which a rank has
      as many rows at the end as at the beginning, and by one axis.
    factor: the operand by which each row multiplies that sum before it adds its own; None if it does not.
    turns: the name along which each row needs what the one before it ends with: ranks compute their pieces one after
      the other. Empty if there is none.
    owned: (rows, owners): an index operand tells for each row of the first name which of the second it needs: a rank
      that has a piece of the owners may have exactly their rows, and then gives whole results of them.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    replicated: frozenset[str] = frozenset()
    partial: str = "sum"
    linear: tuple[frozenset[int], ...] = ()
    indexed: frozenset[str] = frozenset()
    flops: int = 0
    positional: frozenset[str] = frozenset()
    growing: frozenset[str] = frozenset()
    halos: tuple[Halo, ...] = ()
    scan: tuple[str, bool] | None = None
    reversed: frozenset[str] = frozenset()
    factor: int | None = None
    turns: str = ""
    owned: tuple[str, str] | None = None

    @property
    def owners_index(self) -> int:
        """The operand that tells the owner of each row."""
        assert self.owned is not None
        rows = ((self.owned[0],),)
        return next(i for i, dims in enumerate(self.operands) if dims == rows)

    @property
    def neighbours(self) -> frozenset[str]:
        """The names of which a piece needs something of the pieces beside it."""
        scanned = (*(self.scan[:1] if self.scan else ()), *([self.turns] if self.turns else []))
        return frozenset(halo.name for halo in self.halos) | frozenset(scanned)

    @property
    def ordered(self) -> frozenset[str]:
        """The names along which the order of rows counts."""
        return self.indexed | self.positional | self.neighbours | self.reversed

    def names(self) -> tuple[str, ...]:
        """The names that may be split, in order of appearance."""
        order: dict[str, None] = {}
        for dims in (*self.operands, *self.results):
            for dim in dims:
                order.update(dict.fromkeys(dim))
        return tuple(name for name in order if name not in self.replicated)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs of a call
# A name as dims of its own, major to minor: (whole size, size of the piece, offset of the piece in the whole). The
# offset may be a node. ((3, 3, 0), (8, 4, 4)): the second half of every third of a name of size 24. A negative whole
# size: in every second place of the dim before, the offset counts from the end. A negative size of the piece: of so
# many places in a row, all of which the dims behind it read together.
Reading = tuple[tuple[int, int, Any], ...]
# A position in the whole: a number, and (factor, offset) terms to be added to it. The offset may be a node.
Position = tuple[int, tuple[tuple[int, Any], ...]]


def starts_of(reading: Reading) -> tuple[Position, ...]:
    """Where the runs of consecutive elements of a piece begin in the whole, in the order in which the piece has them.

    ((2, 2, 0), (3, 1, c), (4, 4, 0)), a name of 24 of which each half is split in three, has two runs: of 4 elements
    from 4 c and from 12 + 4 c.
    """
    *dims, (stride, _, _) = reading  # the last one is the run itself
    starts: list[Position] = [(0, ())]
    mirror: tuple[int, int, Any] | None = None  # (size, stride, offset)
    for size, part, offset in reversed(dims):
        if size < 0:
            mirror = -size, stride, offset
        elif part < size:
            assert part <= 1, reading
            stride //= abs(part)
            starts = [(first, (*terms, (stride, offset))) for first, terms in starts]
        else:
            starts = [
                (first + i * stride + more, (*terms, *term))
                for i in range(size)
                for more, term in [_mirrored(mirror, i)]
                for first, terms in starts
            ]
            mirror = None
        stride *= abs(size)
    return tuple(starts)


def _mirrored(mirror: tuple[int, int, Any] | None, place: int) -> Position:
    if mirror is None:
        return 0, ()
    size, stride, offset = mirror
    return ((size - 1) * stride, ((-stride, offset),)) if place % 2 else (0, ((stride, offset),))


@dataclass(frozen=True, slots=True)
class Pieces:
    """One rank's pieces of a call: the shapes of its results, the local size of each name, and the cuts.

    offset: of the piece of the indexed name, if one is split. readings: of the names that are split.
    """

    call: Call
    rule: Rule
    shapes: tuple[tuple[int, ...], ...]
    sizes: Mapping[str, int]
    offset: Any = None
    readings: Mapping[str, Reading] = field(default_factory=dict)

    def reading(self, name: str) -> Reading:
        """How a name is cut; one uncut dim if it is not split."""
        size = self.rule.sizes[name]
        return self.readings.get(name, ((size, size, 0),))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the rule of an op, and how its arguments change when its pieces are computed.

    rule: makes the rule of one call.
    shape_arg: the position of the argument that is the result's shape, rewritten to the local shape.
    size_arg: (position, name) of an integer argument that is the size of a name, rewritten to the local size.
    local: makes the local arguments where `shape_arg` and `size_arg` are not enough.
    free_args: the positions of arguments that no rule reads: calls which differ in these alone are split alike.
    """

    rule: Callable[[Call], Rule]
    shape_arg: int | None = None
    size_arg: tuple[int, str] | None = None
    local: Callable[[Pieces], Arguments] | None = None
    free_args: tuple[int, ...] = ()


Table = Mapping[str, Row]


def allows(rule: Rule, name: str, n: int, outer: int = 1) -> bool:
    """True if `name`, read as (outer, n, rest), may be split into `n` pieces."""
    size = rule.sizes.get(name, 0)
    return (
        name not in rule.replicated
        and size > 0
        and size % (abs(outer) * n) == 0
        and (outer == 1 or name not in rule.indexed)
        and (outer < 0 or name not in rule.reversed)
    )


@dataclass(slots=True)
class Namer:
    """Fresh names for rules computed from shapes."""

    count: int = 0
    sizes: dict[str, int] = field(default_factory=dict)

    def new(self, size: int) -> str:
        name = f"n{self.count}"
        self.count += 1
        self.sizes[name] = size
        return name
