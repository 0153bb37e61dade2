"""Find when each node of a step runs: before the micro-batches, once for each of them, or after all of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import fx

from autopar.errors import LayoutError
from autopar.ir.mesh import MICROBATCH
from autopar.ir.ops import is_collective, is_mesh_op, op
from autopar.ir.program import Program, Record, is_given, record

COORD = op("coord")
# What adds up, or puts side by side, the parts of all micro-batches.
JOINS = (op("all_reduce"), op("all_gather"))


class When(enum.Enum):
    """The time of a node in a step."""

    INVARIANT = "invariant"  # the same for all micro-batches, and there before the first
    INPUT = "input"  # of a micro-batch, but made of the batch alone: any rank can compute it
    BODY = "body"  # of a micro-batch, and of parameters: what stages are made of
    AFTER = "after"  # needs what all micro-batches add up to


@dataclass(frozen=True, slots=True)
class Times:
    """The time of every node. `reductions`: the nodes that take the parts of all micro-batches together."""

    of: dict[fx.Node, When]
    reductions: frozenset[fx.Node]


def times_of(program: Program, microbatches: int, regathered: str | None = None) -> Times:
    """Sort the nodes of a LOCAL program by time; its layouts name the axis of micro-batches, if there are several.

    regathered: the axis over which each micro-batch gathers parameters anew (ZeRO-3); None: once for all of them.

    Raises LayoutError where a micro-batch needs a value of the others that stages compute (statistics of the whole
    batch, as of BatchNorm): then no micro-batch can go on before all have come so far.
    """
    of: dict[fx.Node, When] = {}
    reductions: set[fx.Node] = set()
    weighted: set[fx.Node] = set()  # depends on parameters
    renewed: set[fx.Node] = set()  # parameters alone, gathered anew
    entries = dict(program.entries)
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            kind = entries[node].kind
            split = MICROBATCH in record(node).layout.axes or (microbatches == 1 and kind == "batch")
            of[node] = When.INPUT if split else When.INVARIANT
            if kind == "parameter":
                weighted.add(node)
            continue
        operands = node.all_input_nodes
        if any(operand in weighted for operand in operands):
            weighted.add(node)
        if is_join(node):
            reductions.add(node)
            source = of[operands[0]]
            of[node] = When.AFTER if source in (When.BODY, When.AFTER) else When.INVARIANT
            continue
        gathers = node.target is op("all_gather") and _axis(node) == regathered and is_given(operands[0])
        differs = gathers or _is_cut(node) or any(of[operand] in (When.INPUT, When.BODY) for operand in operands)
        after = [operand for operand in operands if of[operand] is When.AFTER]
        if gathers or (
            differs and not _is_cut(node) and all(o in renewed or of[o] is When.INVARIANT for o in operands)
        ):
            renewed.add(node)
        if differs and after and not _is_cut(node):
            late = _behind(operands, renewed)
            if not any(
                of.get(user, When.AFTER) is not When.AFTER for each in late for user in each.users.keys() - late
            ):
                of.update(dict.fromkeys(late, When.AFTER))  # gathered once, after the micro-batches
                differs = any(of[operand] in (When.INPUT, When.BODY) for operand in operands)
        if differs and after:
            raise LayoutError(_coupled(node, _reduction_before(after[0], reductions), program.notes))
        if differs and is_collective(node.target) and _axis(node) == MICROBATCH:
            raise LayoutError(_coupled(node, node, program.notes))
        if after:
            of[node] = When.AFTER
        elif not differs:
            of[node] = When.INVARIANT
        else:
            of[node] = When.BODY if node in weighted else When.INPUT
    return Times(of, frozenset(reductions))


def _behind(operands: list[fx.Node], among: set[fx.Node]) -> set[fx.Node]:
    """Those of a set that some operands are, or are made of."""
    found: set[fx.Node] = set()
    pending = list(operands)
    while pending:
        node = pending.pop()
        if node in among and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def is_join(node: fx.Node) -> bool:
    """True for what takes the parts of all micro-batches together."""
    return node.op == "call_function" and node.target in JOINS and _axis(node) == MICROBATCH


def _is_cut(node: fx.Node) -> bool:
    """True for the piece of a micro-batch, and for its number."""
    if not is_mesh_op(node.target) or is_collective(node.target):
        return False
    return _axis(node) == MICROBATCH


def _axis(node: fx.Node) -> str:
    position = 0 if node.target is COORD else 1
    return str(node.args[position]) if len(node.args) > position else ""


def _reduction_before(node: fx.Node, reductions: set[fx.Node]) -> fx.Node:
    """The nearest join that a value comes from."""
    pending = [node]
    while pending:
        found = pending.pop(0)
        if found in reductions:
            return found
        pending += found.all_input_nodes
    return node


def _coupled(node: fx.Node, join: fx.Node, notes: tuple[str, ...]) -> str:
    user, source = record(node), record(join)
    ruleless = [f" {note}." for note in notes if "has no rule" in note][:1]  # it too needs all samples at once
    return (
        f"micro-batches cannot be computed one after another: {_place(source)} needs a value of the whole batch "
        f"(%{join.name}), and {_place(user)} uses it before the micro-batch is done (%{node.name}). BatchNorm in "
        f"training and losses between samples of one batch do this. Use microbatches=1, or a module without it "
        f"(GroupNorm, LayerNorm; BatchNorm in eval mode)." + "".join(ruleless)
    )


def _place(found: Record) -> str:
    return " at ".join(part for part in (f"'{found.module}'" if found.module else "", found.source) if part) or "an op"
