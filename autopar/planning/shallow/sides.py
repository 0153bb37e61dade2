"""Where the calls of a graph lie: before the equal layers, in them or behind, or in a sum of what both ends made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from autopar.ir.program import CAST, Program, record
from autopar.passes.pipeline.cuts.sums import ADD
from autopar.planning.shallow.depth import Rest

BEFORE, INSIDE, BEHIND, JOINED = -1, 0, 1, 2
TERM, SUM = 1, 2
BODIES = "FBIW"  # actions of a micro-batch


def side_of(node: fx.Node, rest: Rest) -> int:
    """By its module alone."""
    return BEFORE if rest.is_entry(node) else INSIDE if rest.is_equal(node) else BEHIND


def sides_of(kind: str, program: Program, rest: Rest) -> dict[fx.Node, int]:
    """Say of each call on which side of the layers it lies. kind: of the action that runs the graph.

    JOINED are sums of the gradients of a parameter that is read at both ends (tied embeddings), with the casts of what
    they add that comes from behind: a backward pass holds these terms from its beginning to its end. Stages do not:
    each adds up its own (passes/pipeline/cuts/sums.py).
    """
    sides = {node: side_of(node, rest) for node in program.calls()}
    place = {node: i for i, node in enumerate(sides)}
    inside = [place[node] for node, side in sides.items() if side == INSIDE]
    if kind not in BODIES or not inside:
        return sides
    if kind == "F":
        outer = {node for node, i in place.items() if i < inside[0]}
    else:
        outer = {node for node, i in place.items() if i > inside[-1]}
        sides |= dict.fromkeys((node for node in outer if sides[node] == BEHIND), BEFORE)
    sides |= {node: INSIDE for node, side in sides.items() if side == BEFORE and node not in outer}  # views, made again
    for node, out in program.leaving:
        if out.kind == "part" and node in outer and record(node).is_backward:
            sides |= dict.fromkeys(_joined(node, sides), JOINED)
    return sides


def terms_of(sides: Mapping[fx.Node, int]) -> Iterator[tuple[fx.Node, int]]:
    """SUM with the joined sums, TERM with what they add, and with casts of that."""
    for node, side in sides.items():
        if side == JOINED:
            yield node, TERM if node.target is CAST else SUM
            yield from ((operand, TERM) for operand in node.all_input_nodes if sides.get(operand) in (BEFORE, BEHIND))


def _joined(node: fx.Node, sides: dict[fx.Node, int]) -> list[fx.Node]:
    """A sum of terms from both ends, and the casts of those from behind; none where a value is no such sum."""
    sums = list(_sums(node))
    terms = [term for one in sums for term in one.all_input_nodes if term not in sums]
    behind = [term for term in terms if sides.get(_source(term)) == BEHIND]
    return [*sums, *(term for term in behind if term.target is CAST)] if 0 < len(behind) < len(terms) else []


def _sums(node: fx.Node) -> Iterator[fx.Node]:
    if node.target is ADD and len(node.all_input_nodes) == 2:
        yield node
        for term in node.all_input_nodes:
            yield from _sums(term)


def _source(term: fx.Node) -> fx.Node:
    """What a term casts, or itself."""
    return term.all_input_nodes[0] if term.target is CAST else term
