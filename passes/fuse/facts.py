"""What `fuse` reads off a program once: which calls a kernel may hold, who reads whom through views, what stays put.

Views show memory that is there: a group takes in those between its calls as index arithmetic, and all others cost
nothing. So the graph of groups is one of values: `reads` looks through views.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.ir.ops import op_facts
from autopar.ir.ops.fusible import Fusible, fusible
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.ops import is_mesh_op, op
from autopar.ir.program import Program, TensorType, is_getitem, record

aten = torch.ops.aten
MOST_PIECES = 8  # that one call puts together: each is a branch in the kernel
_COORD = op("coord")
_CAST = aten._to_copy.default
_ADD = aten.add.Tensor
_ADDING = frozenset((op("einsum"), op("embedding_backward")))


@dataclass(frozen=True, slots=True)
class ViewedRead:
    """That a node reads `value`, as `seen` by it: through views, or the value itself."""

    seen: fx.Node
    value: fx.Node


@dataclass(slots=True)
class Facts:
    """how: of each call, how a kernel computes it. place: where each node stands. joins: the calls that a group may
    hold. added: those that are not theirs, since sums over micro-batches or products take them in. slot: the places of
    the calls that stay where they are (products, collectives, whatever no kernel computes) among one another.
    """

    program: Program
    how: dict[fx.Node, Fusible | None] = field(default_factory=dict)
    place: dict[fx.Node, int] = field(default_factory=dict)
    slot: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[fx.Node, tuple[ViewedRead, ...]] = field(default_factory=dict)
    users: dict[fx.Node, dict[fx.Node, None]] = field(default_factory=dict)
    types: dict[fx.Node, TensorType] = field(default_factory=dict)
    added: frozenset[fx.Node] = frozenset()
    joins: frozenset[fx.Node] = frozenset()

    @classmethod
    def of(cls, program: Program) -> Facts:
        facts = cls(program, added=frozenset((*_added(program), *_summed_by_products(program))))
        for place, node in enumerate(program.graph.nodes):
            facts.place[node] = place
            if node.op == "call_function":
                facts.how[node] = fusible(node, program.mesh)
            if record(node).is_tensor and node.op != "output":
                facts.types[node] = local_type(node, program.mesh)
        facts.joins = frozenset(node for node in program.graph.nodes if facts._may_join(node))
        for node in program.graph.nodes:
            if not facts.is_view(node):
                facts._read(node)
            if node.op == "output" or (node.op == "call_function" and facts._stays(node)):
                facts.slot[node] = len(facts.slot)
        return facts

    def _read(self, node: fx.Node) -> None:
        found = []
        for operand in node.all_input_nodes:
            found.append(ViewedRead(operand, self.value_of(operand)))
            self.users.setdefault(found[-1].value, {})[node] = None
        self.reads[node] = tuple(found)
        self.users.setdefault(node, {})

    def value_of(self, node: fx.Node) -> fx.Node:
        """The value that a node shows, itself if it is no view."""
        while self.is_view(node):
            node = node.args[0]  # type: ignore[assignment]
        return node

    def is_view(self, node: fx.Node) -> bool:
        """True for a view that a kernel reads by indices."""
        how = self.how.get(node)
        if how is None or how.kind != "view":
            return False
        if is_getitem(node):
            return self.is_view(node.args[0])  # type: ignore[arg-type]
        return op_facts.is_view(node.target)

    def is_part(self, node: fx.Node) -> bool:
        """True for one of several results of a call that a kernel computes."""
        return is_getitem(node) and node.args[0] in self.joins  # type: ignore[arg-type]

    def _may_join(self, node: fx.Node) -> bool:
        how = self.how.get(node)
        if how is None or self.is_view(node) or node in self.added or is_getitem(node):
            return False
        if any(layout is not None and layout.owned for layout in record(node).layouts):
            return False  # a kernel is written for a number of rows
        if op_facts.facts_of(node.target).moves == "joined" and len(node.all_input_nodes) > MOST_PIECES:
            return False
        types = [self.types[each] for each in self.values(node)]
        return all((type_.shape or how.columns) and type_.numel for type_ in types)

    def values(self, node: fx.Node) -> Iterator[fx.Node]:
        """The tensors that a call makes: itself, or its parts."""
        if record(node).several:
            yield from (user for user in node.users if is_getitem(user) and user in self.types)
        else:
            yield node

    def _stays(self, node: fx.Node) -> bool:
        """True for a call whose place among others like it no group may change. What has no tensors, and a projection,
        costs nothing and stands where it is needed."""
        if self.is_view(node) or is_getitem(node) or node in self.joins:
            return False
        is_number = not is_mesh_op(node.target) and not any(record(node).types)
        return not is_number and node.target is not _COORD

    def bytes_(self, node: fx.Node) -> int:
        return self.types[node].bytes_ if node in self.types else 0

    def seen_bytes(self, read: ViewedRead) -> int:
        """What a read moves at most: of a value that is broadcast its own bytes, of a slice those of the slice."""
        return min(self.bytes_(read.seen), self.bytes_(read.value))

    def is_cast(self, node: fx.Node) -> bool:
        return node.target is _CAST

    def rows(self, node: fx.Node) -> tuple[int, int]:
        """(rows, width) of what a row or column op reads."""
        how = self.how[node]
        assert how is not None and how.width, node
        numel = math.prod(self._read_shape(node))
        return numel // how.width, how.width

    def _read_shape(self, node: fx.Node) -> tuple[int, ...]:
        first = next(read.seen for read in self.reads[node] if read.seen in self.types)
        return self.types[first].shape


def _added(program: Program) -> Iterator[fx.Node]:
    """Casts that leave as parts of sums over micro-batches: they are added to these in place (`adding_variant`)."""
    for node, out in program.leaving:
        if node is not None and out.kind == "part" and node.target is _CAST:
            yield node


def _summed_by_products(program: Program) -> Iterator[fx.Node]:
    """Sums of several products, each right behind its last term: the executor lets a product add to what is there
    (`_terms` of runtime/executor/executor.py), which moves no more than a kernel that adds, and keeps one term at a
    time."""
    firsts: dict[fx.Node, fx.Node] = {}  # of a sum, its first term
    sums: dict[fx.Node, list[fx.Node]] = {}
    for node in program.calls():
        total, term = (*node.args, None, None)[:2]
        if node.target is not _ADD or node.kwargs or not isinstance(total, fx.Node) or not isinstance(term, fx.Node):
            continue
        first = firsts.get(total, total)
        is_product = term.target in _ADDING and first.target is term.target and first.args[2:] == term.args[2:]
        if is_product and term.next is node and len(term.users) == 1 and record(first).types == record(term).types:
            firsts[node] = first
            sums.setdefault(first, []).append(node)
    for found in sums.values():
        if len(found) > 1:
            yield from found
