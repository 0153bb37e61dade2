"""Whether calls fit in one kernel, by what they read and write: see `ir/ops/fusible.py` for what a group may hold."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from autopar.ir.ops.op_facts import argument_of, argument_place, facts_of
from autopar.ir.ops.ops import op, semantic_of
from autopar.ir.program import is_getitem
from autopar.passes.fuse.facts import Facts, ViewedRead, aten

# Where the elements of a value lie in rows, and which views and calls leave them in their rows.


def views_between(read: ViewedRead) -> Iterator[fx.Node]:
    """The views through which a value is read."""
    node = read.seen
    while node is not read.value:
        yield node
        node = node.args[0]  # type: ignore[assignment]


def source_of(view: fx.Node) -> fx.Node:
    """What a view shows; of a part of a split what was split."""
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return source.args[0] if is_getitem(view) else source  # type: ignore[return-value]


def first_moved(node: fx.Node, rank: int) -> int:
    """The first dim along which a call moves elements."""
    pads = argument_of(node, "pad")
    if pads is not None:
        return rank - len(pads) // 2
    dims = argument_of(node, "dims" if argument_place(node.target, "dims") else "dim")
    return min((dim % rank for dim in ([dims] if isinstance(dims, int) else dims or ())), default=0)


def ends_in(shape: tuple[int, ...], width: int) -> bool:
    """True if a row of `width` elements is some whole last dims."""
    return width in (math.prod(shape[place:]) for place in range(len(shape)))


def leading(shape: tuple[int, ...]) -> list[int]:
    """The sizes of the leading dims together."""
    return [math.prod(shape[:place]) for place in range(len(shape) + 1)]


def is_vector(shape: tuple[int, ...], width: int) -> bool:
    """True for the elements of a row, the same for all rows."""
    return all(size == 1 or math.prod(shape[place:]) <= width for place, size in enumerate(shape))


def rows_align(seen: tuple[int, ...], shape: tuple[int, ...], rows: int) -> bool:
    """True if, broadcast to `shape`, each row reads what belongs to it: all leading dims are there."""
    aligned = (1,) * (len(shape) - len(seen)) + seen
    places = range(len(shape) + 1)
    return any(math.prod(shape[:place]) == rows and aligned[:place] == shape[:place] for place in places)


def moves_ones_only(view: fx.Node, shape: tuple[int, ...]) -> bool:
    """True for a permutation that leaves all dims but those of size 1 in order."""
    order = _order(view, len(shape))
    kept = [dim for dim in order if shape[dim] != 1]
    return kept == sorted(kept)


def _order(view: fx.Node, rank: int) -> list[int]:
    args: Any = view.args
    if view.target is aten.permute.default:
        return [dim % rank for dim in args[1]]
    order = list(range(rank))
    a, b = (0, -1) if view.target is aten.t.default else args[1:3]
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    return order


MOST_VALUES = 32  # operands and results of a kernel
REGISTERS = 65_536 * 4  # bytes of registers of a multiprocessor: what a program of a row kernel may keep at most
KEPT_WIDTH = 16_384  # rows that are no longer stay in registers; of longer ones a kernel reads pieces, twice
USABLE = 0.9
Level = Literal["full", "row", "vector", "piece", "column"]
_PER_ROW = frozenset((op("cross_entropy_backward"), op("pick_backward")))  # their operands without the last dim


@dataclass(slots=True)
class KernelFit:
    """A set of calls, in order, looked at as one kernel. copies: those among them that stand elsewhere too, and whose
    values are not given here. gone: values that nobody outside reads any longer. rows, width: of its domain.
    has_rows: some call reads rows, or sums over all of them; reads_rows: the former. columns: the values that are sums
    over all rows, and the casts of these."""

    facts: Facts
    calls: Collection[fx.Node]
    copies: Collection[fx.Node] = ()
    gone: Collection[fx.Node] = ()
    inside: frozenset[fx.Node] = frozenset()  # the values that the calls make
    results: list[fx.Node] = field(default_factory=list)
    rows: int = 0
    width: int = 0
    has_rows: bool = False
    reads_rows: bool = False
    columns: frozenset[fx.Node] = frozenset()
    levels: dict[fx.Node, Level] = field(default_factory=dict)

    @classmethod
    def of(
        cls, facts: Facts, calls: Collection[fx.Node], copies: Collection[fx.Node] = (), gone: Collection[fx.Node] = ()
    ) -> KernelFit | str:
        """The calls as one kernel, or why they are none."""
        fit = cls(facts, calls, copies, gone)
        made = [value for node in calls if node not in copies for value in facts.values(node)]
        fit.inside = frozenset((*made, *(value for node in copies for value in facts.values(node))))
        own = {*fit.inside, *calls}
        fit.results = [
            value for value in made if value not in gone and any(user not in own for user in facts.users[value])
        ]
        return fit._domain() or fit._column_values() or fit._levels() or fit._limits() or fit

    def operands(self) -> dict[fx.Node, list[ViewedRead]]:
        """What is read from outside, by value."""
        operands: dict[fx.Node, list[ViewedRead]] = {}
        for node in self.calls:
            for read in self.facts.reads[node]:
                if read.value not in self.inside:
                    operands.setdefault(read.value, []).append(read)
        return operands

    def moved(self) -> int:
        """The bytes of operands and results."""
        read = sum(read_bytes(self.facts, value, reads) for value, reads in self.operands().items())
        return read + sum(map(self.facts.bytes_, self.results))

    # -- the domain -------------------------------------------------------------------------------------------------

    def _domain(self) -> str:
        facts = self.facts
        domains = {facts.rows(node) for node in self.calls if facts.how[node].width}  # type: ignore[union-attr]
        self.has_rows = bool(domains)
        self.reads_rows = any(facts.how[node].kind == "row" for node in self.calls)  # type: ignore[union-attr]
        if not domains:
            shapes = [facts.types[value].shape for value in self.results]
            domains = {(math.prod(shape[:-1]), shape[-1]) for shape in shapes}
        if len(domains) > 1:
            return "other rows"
        if domains:
            ((self.rows, self.width),) = domains
        return ""

    def _column_values(self) -> str:
        """Sums over rows are there when the kernel ends: nothing in it but casts may read them."""
        facts, found = self.facts, set[fx.Node]()
        for node in self.calls:
            how = facts.how[node]
            assert how is not None
            if how.columns and not is_several(node):
                found.add(node)
            elif how.columns:
                found.update(part for part in facts.values(node) if part.args[1] in how.columns)
            sums = [read.value for read in facts.reads[node] if read.value in found]
            if sums and not facts.is_cast(node):
                return "a sum over all rows"
            if sums:
                found.add(node)
        self.columns = frozenset(found)
        return ""

    # -- the places of elements -------------------------------------------------------------------------------------

    def _levels(self) -> str:
        if not self.has_rows:
            numel = self.rows * self.width
            return "" if all(self.facts.types[value].numel == numel for value in self.results) else "other rows"
        of_row: set[fx.Node] = set()  # what depends on a row op
        for node in self.calls:
            wrong = self._level(node, of_row)
            if wrong:
                return wrong
        wanted = ("full", "row", "column")
        return "" if all(self.levels[value] in wanted for value in self.results) else "other rows"

    def _level(self, node: fx.Node, of_row: set[fx.Node]) -> str:
        facts = self.facts
        inner = [read for read in facts.reads[node] if read.value in self.inside]
        derived = bool(facts.how[node].width) or any(read.value in of_row for read in inner)  # type: ignore[union-attr]
        for value in facts.values(node):
            level = self._level_of(value, derived)
            if level is None:
                return "other rows"
            self.levels[value] = level
            if derived:
                of_row.add(value)
        within = facts.how[node].kind != "view" or self._moves_within_rows(node)  # type: ignore[union-attr]
        if within and all(self._keeps_rows(node, read) for read in inner):
            return ""
        return "other rows"

    def _moves_within_rows(self, node: fx.Node) -> bool:
        """True for a call that puts pieces together, or elsewhere, if no element comes into another row."""
        shape = self.facts.types[node].shape
        return any(math.prod(shape[:place]) == self.rows for place in range(first_moved(node, len(shape)) + 1))

    def _level_of(self, value: fx.Node, derived: bool) -> Level | None:
        if value in self.columns:
            return "column"
        shape = self.facts.types[value].shape
        numel = math.prod(shape)
        if numel == self.rows * self.width and (self.width == 1 or ends_in(shape, self.width)):
            return "full"
        if numel == self.rows and (derived or shape[-1] == 1):
            return "row"
        if not derived and numel <= self.width and is_vector(shape, self.width):
            return "vector"
        return "piece" if self.rows in leading(shape) and numel % self.rows == 0 else None

    def _keeps_rows(self, node: fx.Node, read: ViewedRead) -> bool:
        """True if a call finds in its own row what it reads of another call of the group."""
        level = self.levels[read.value]
        if level in ("vector", "column"):
            return True
        if not all(self._keeps(view) for view in views_between(read)):
            return False
        if self._is_wide(node) or node.target in _PER_ROW:
            return True
        made = next(iter(self.facts.values(node)), None)
        seen = self.facts.types[read.seen].shape
        if made is None or self.levels.get(made) == "column":
            return True
        shape = self.facts.types[made].shape
        if level == "row" and self.levels[made] == "row":
            return math.prod(seen) == self.rows
        return rows_align(seen, shape, self.rows)

    def _is_wide(self, node: fx.Node) -> bool:
        """True for a call that reads rows, or is none of aten's that broadcast: it takes its operands as they are."""
        how = self.facts.how[node]
        return bool(how and how.width) or (semantic_of(node.target) is not None and node.target not in _PER_ROW)

    def _keeps(self, view: fx.Node) -> bool:
        if view not in self.facts.types:
            return True  # a split: its parts are looked at
        source, shape = self.facts.types[source_of(view)], self.facts.types[view]
        moves = facts_of(view.target).moves
        if moves in ("same", "flat"):
            return source.numel in (self.rows, self.rows * self.width) or source.numel == shape.numel == self.width
        if moves == "turned":
            return moves_ones_only(view, source.shape)
        if moves == "repeated":
            return rows_align(source.shape, shape.shape, self.rows) or source.numel <= self.width
        return self.rows in leading(source.shape) and self.rows in leading(shape.shape)

    # -- what a kernel can hold -------------------------------------------------------------------------------------

    def _limits(self) -> str:
        operands = self.operands()
        if len(operands) + len(self.results) > MOST_VALUES:
            return f"more than {MOST_VALUES} operands and results"
        if len(self.calls) < 2 or not self.has_rows:
            return ""
        is_long = self.width > KEPT_WIDTH
        if self.reads_rows and (self.columns if is_long else self.kept() > REGISTERS * USABLE):
            return "the register budget"
        return ""

    def kept(self) -> int:
        """Bytes of registers that a row needs: operands, which are read before a reduction and after it, and what is
        added up of all rows."""
        types = self.facts.types
        rows = [types[value] for value in self.operands() if value in types and types[value].numel >= self.width]
        sums = sum(not self.facts.is_cast(value) for value in self.columns)
        return self.width * (sum(type_.dtype.itemsize for type_ in rows) + 4 * sums)


def read_bytes(facts: Facts, value: fx.Node, reads: Collection[ViewedRead]) -> int:
    """The bytes that all reads of a value move at most: overlapping views once."""
    seen = {read.seen: facts.seen_bytes(read) for read in reads}
    return min(sum(seen.values()), facts.bytes_(value))


def is_several(node: fx.Node) -> bool:
    return any(is_getitem(user) for user in node.users)
