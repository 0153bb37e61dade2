"""Find when each node of a step runs: before the micro-batches, once for each of them, or after all of them."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from torch import fx

from autopar.errors import CoupledError
from autopar.ir.mesh import SLICE, TIME_AXES, axes_of_group, is_in_time
from autopar.ir.ops.ops import is_collective, is_mesh_op, op
from autopar.ir.program import Program, captured_name, record
from autopar.passes.pipeline.cuts.coupling import Coupling, coupled

COORD = op("coord")
# What adds up, or puts side by side, the parts of all micro-batches.
JOINS = (op("all_reduce"), op("all_gather"))
# What a slice of a sequence takes over from the slices before it, and a gradient from those after it.
EARLIER = op("earlier")
CARRIES = (EARLIER, op("later"))


class When(enum.Enum):
    """The time of a node in a step."""

    INVARIANT = "invariant"  # the same for all micro-batches, and there before the first
    INPUT = "input"  # of a micro-batch, but made of the batch alone: any rank can compute it
    BODY = "body"  # of a micro-batch, and of parameters: what stages are made of
    MIDDLE = "middle"  # needs what all forward passes add up to, and backward passes read it
    AFTER = "after"  # needs what all micro-batches add up to


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """The time of every node.

    reductions: the nodes that take the parts of all micro-batches together. renewed: values of parameters alone,
    gathered anew for each micro-batch; late: those of them that are read when all micro-batches are done. second: nodes
    of a micro-batch that need what all forward passes add up to, so that they run with the backward pass; coupling: why
    the first of them does.
    """

    of: dict[fx.Node, When]
    reductions: frozenset[fx.Node]
    renewed: frozenset[fx.Node] = frozenset()
    late: frozenset[fx.Node] = frozenset()
    second: frozenset[fx.Node] = frozenset()
    coupling: Coupling | None = None

    def is_forward(self, node: fx.Node) -> bool:
        """True for what a forward action computes of a micro-batch."""
        return self.of[node] is When.BODY and node not in self.second and not record(node).is_backward


def times_of(
    program: Program, microbatches: int, renews: Collection[fx.Node] = (), *, both: bool = False, sized: bool = False
) -> NodeTimes:
    """Sort the nodes of a LOCAL program by time; its layouts name the axis of micro-batches, if there are several.

    renews: the gathers of parameters that each micro-batch has anew (ZeRO-3); others are once for all of them. both:
    what is made of such parameters alone may be read by micro-batches and when they are done, as it cannot be in the
    end (see `late.py`). sized: slices differ in length, and so does what they cut.

    What all forward passes add up to may be read by the backward pass, or by the rest of the loss, of each micro-batch
    (the balance of experts, similarities between samples): that rest runs with the backward pass then, when all
    micro-batches have come forward. Raises CoupledError where such values are needed more often than once (statistics
    of the whole batch in one layer after the other, as of BatchNorm), and for slices of a sequence.
    """
    of: dict[fx.Node, When] = {}
    reductions: set[fx.Node] = set()
    weighted: set[fx.Node] = set()  # depends on parameters
    renewed: set[fx.Node] = set()  # parameters alone, gathered anew
    late: set[fx.Node] = set()
    partway: set[fx.Node] = set()  # joins behind which another one comes
    second: set[fx.Node] = set()  # of a micro-batch, and behind a join
    ends: set[fx.Node] = set()  # made of what backward passes add up to
    coupling: Coupling | None = None
    refused = _Refused()
    entries = dict(program.entries)
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            kind = entries[node].kind
            split = differs_in_time(node) or (microbatches == 1 and kind == "batch")
            of[node] = When.INPUT if split else When.INVARIANT
            if kind == "parameter":
                weighted.add(node)
            continue
        operands = node.all_input_nodes
        refused.follow(node)
        if any(operand in weighted for operand in operands):
            weighted.add(node)
        if is_join(node):
            source = of[operands[0]]
            if differs_in_time(node):  # of all parts along one axis, for each along the other: another join follows
                partway.add(node)
                of[node] = When.AFTER if source is When.BODY else source
                continue
            reductions.add(node)
            of[node] = When.AFTER if source in (When.BODY, When.AFTER) else When.INVARIANT
            part = operands[0]
            if part in ends or (source is When.BODY and (part in second or record(part).is_backward)):
                ends.add(node)
            continue
        if not partway.isdisjoint(operands):
            joins = [operand for operand in operands if operand in partway]
            raise refused.or_else(CoupledError(coupled(node, joins, partway, program.notes).refusal))
        gathers = node in renews
        after = [operand for operand in operands if of[operand] is When.AFTER]
        is_cut = _is_cut(node) or (sized and not after and _is_sliced(node))
        differs = gathers or is_cut or any(of[operand] in (When.INPUT, When.BODY) for operand in operands)
        if gathers or (differs and not is_cut and all(o in renewed or of[o] is When.INVARIANT for o in operands)):
            renewed.add(node)
        if differs and after and not is_cut:
            behind = made_among(operands, renewed)
            late |= behind
            if both:
                differs = any(of[one] in (When.INPUT, When.BODY) and one not in renewed for one in operands)
            elif together := _only_late(behind, renewed, of):
                of.update(dict.fromkeys(together, When.AFTER))  # gathered once, after the micro-batches
                differs = any(of[operand] in (When.INPUT, When.BODY) for operand in operands)
        if differs and after:
            reason = coupled(node, after, reductions, program.notes)
            if microbatches == 1 or not ends.isdisjoint(after) or _has_slices(program):
                error = CoupledError(reason.refusal, _parts_of(after, ends))
                if not _is_sum(node):
                    raise refused.or_else(error)
                refused.add(node, error)
                of[node] = When.AFTER
                ends.add(node)
                continue
            coupling = coupling or reason
        if differs and (after or not second.isdisjoint(operands)):
            second.add(node)
        if differs and is_collective(node.target) and _moves_in_time(node) and node.target not in CARRIES:
            (source,) = operands
            movers = [source] if source in second else list(node.users)
            reason = coupled(node, [node], {node}, program.notes)
            raise refused.or_else(CoupledError(reason.refusal, frozenset(map(captured_name, movers))))
        if after and not differs:
            of[node] = When.AFTER
            if not ends.isdisjoint(operands):
                ends.add(node)
        elif not differs:
            of[node] = When.INVARIANT
        else:
            of[node] = When.BODY if node in weighted else When.INPUT
    if refused.first is not None:
        raise refused.or_else(refused.first)
    leaving = made_among([node for node in program.results if node is not None], renewed)
    if not both:
        of.update(dict.fromkeys(_only_late(leaving, renewed, of), When.AFTER))
    if second:
        early = {node for node, when in of.items() if when is When.AFTER and node not in ends | reductions}
        of.update(dict.fromkeys(early - _of_ends(early, ends, reductions), When.MIDDLE))
    known = frozenset(reductions), frozenset(renewed), frozenset(late | leaving), frozenset(second)
    return NodeTimes(of, *known, coupling)


@dataclass(slots=True)
class _Refused:
    """What of gradients of weights cannot be computed micro-batch by micro-batch: the first error, and the values that
    would have to be the whole batch's, of all places that do not hang on one another: one more search mends all."""

    first: CoupledError | None = None
    whole: frozenset[str] = frozenset()
    behind: set[fx.Node] = field(default_factory=set)

    def add(self, node: fx.Node, error: CoupledError) -> None:
        """Take a node that cannot be computed. What is made of another one is mended with that, perhaps."""
        self.first = self.first or error
        if node not in self.behind:
            self.whole |= error.whole
            self.behind.add(node)

    def follow(self, node: fx.Node) -> None:
        """Know what is made of a node that cannot be computed."""
        if not self.behind.isdisjoint(node.all_input_nodes):
            self.behind.add(node)

    def or_else(self, error: CoupledError) -> CoupledError:
        """What is raised at another error: the first one, with all that would have to be whole."""
        return error if self.first is None else CoupledError(str(self.first), self.whole)


def _only_late(nodes: set[fx.Node], renewed: AbstractSet[fx.Node], of: dict[fx.Node, When]) -> set[fx.Node]:
    """Find what runs behind the micro-batches with some nodes: all that is made of them and of parameters. Nothing
    if a micro-batch reads any of it."""
    found, pending = set(nodes), list(nodes)
    while pending:
        for user in pending.pop().users:
            if user in found or of.get(user, When.AFTER) is When.AFTER:
                continue
            if user not in renewed:
                return set()
            more = made_among([user], renewed) - found
            found |= more
            pending += more
    return found


def _of_ends(early: AbstractSet[fx.Node], ends: AbstractSet[fx.Node], joins: AbstractSet[fx.Node]) -> set[fx.Node]:
    """Find what is made of parameters alone and read by `ends` alone: it is gathered and computed with these."""
    joined: set[fx.Node] = set()
    ordered = [node for node in next(iter(early)).graph.nodes if node in early] if early else []
    for node in ordered:
        if not joined.isdisjoint(node.all_input_nodes) or not joins.isdisjoint(node.all_input_nodes):
            joined.add(node)
    found: set[fx.Node] = set()
    for node in reversed(ordered):
        if node not in joined and all(user in ends or user in found for user in node.users):
            found.add(node)
    return found


def made_among(operands: Iterable[fx.Node], among: AbstractSet[fx.Node]) -> set[fx.Node]:
    """Find the members of a set that some nodes are, or are made of."""
    nodes: set[fx.Node] = set()
    pending = list(operands)
    while pending:
        node = pending.pop()
        if node in among and node not in nodes:
            nodes.add(node)
            pending += node.all_input_nodes
    return nodes


def is_join(node: fx.Node) -> bool:
    """True for what takes the parts of all micro-batches together."""
    return node.op == "call_function" and node.target in JOINS and is_in_time(_axis(node))


def differs_in_time(node: fx.Node) -> bool:
    """True for a value of which the parts along an axis in time are not the same."""
    layout = record(node).layout
    return any(axis in TIME_AXES for axis in (*layout.axes, *(axis for axis, _ in layout.partial)))


def _is_sum(node: fx.Node) -> bool:
    """True for a value that micro-batches add up, as the gradient of a weight, and of which none has its own rows."""
    layouts = [layout for layout in record(node).layouts if layout is not None]
    return not any(axis in TIME_AXES for layout in layouts for axis in layout.axes)


def _is_cut(node: fx.Node) -> bool:
    """True for the piece of a micro-batch, and for its number."""
    if not is_mesh_op(node.target) or is_collective(node.target):
        return False
    return is_in_time(_axis(node))


def _parts_of(after: Iterable[fx.Node], ends: AbstractSet[fx.Node]) -> frozenset[str]:
    """The values of a micro-batch that joins among `ends`, behind which some values are, take together."""
    joins = (node for node in made_among(after, ends) if is_join(node))
    return frozenset(captured_name(join.all_input_nodes[0]) for join in joins)


def _has_slices(program: Program) -> bool:
    """True if micro-batches are slices of sequences."""
    return dict(program.mesh.axes).get(SLICE, 1) > 1


def _is_sliced(node: fx.Node) -> bool:
    """True for a value of which slices have parts."""
    return any(layout is not None and SLICE in layout.axes for layout in record(node).layouts)


def _moves_in_time(node: fx.Node) -> bool:
    """True for what moves over an axis in time, or over one and others at once (the ends of rows over dp:mb)."""
    return any(axis in TIME_AXES for axis in axes_of_group(_axis(node)))


def _axis(node: fx.Node) -> str:
    position = 0 if node.target is COORD else 1
    return str(node.args[position]) if len(node.args) > position else ""
