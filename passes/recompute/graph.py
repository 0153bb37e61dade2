"""The forward pass as calls and the values that they make: what a choice of what to keep is made on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.ops.ops import is_collective
from autopar.ir.ops.storage import root_of
from autopar.ir.program import Program, is_gathered_input, is_getitem, record


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A call of the forward pass that makes memory. values: its results: itself, or the items of its tuple. reads: the
    values of other calls that it reads. Views are no values: what they lie in is read. Nor are inputs, gathered or not.
    """

    node: fx.Node
    values: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Forward:
    """call_of: the call of each value. needed: of each value the nodes of the backward pass that read it."""

    calls: tuple[ForwardCall, ...]
    call_of: dict[fx.Node, ForwardCall]
    needed: dict[fx.Node, list[fx.Node]]
    users: dict[fx.Node, list[ForwardCall]] = field(default_factory=dict)


def forward_of(program: Program) -> Forward:
    """The calls of the forward pass, in the order of the program, with who reads what."""
    calls: list[ForwardCall] = []
    call_of: dict[fx.Node, ForwardCall] = {}
    needed: dict[fx.Node, list[fx.Node]] = {}
    users: dict[fx.Node, list[ForwardCall]] = {}
    root = {node: root_of(node) for node in program.nodes}
    for node in program.calls():
        reads = dict.fromkeys(root[operand] for operand in node.all_input_nodes)
        if is_backward(node):
            for value in reads:
                if value in call_of:
                    needed.setdefault(value, []).append(node)
            continue
        if is_getitem(node) or is_gathered_input(node) or root[node] is not node or not any(record(node).types):
            continue
        items = tuple(user for user in node.users if is_getitem(user) and not is_backward(user))
        values = items if record(node).several else (node,)
        call = ForwardCall(node, values, tuple(value for value in reads if value in call_of))
        calls.append(call)
        call_of.update(dict.fromkeys(values, call))
        for value in call.reads:
            users.setdefault(value, []).append(call)
    return Forward(tuple(calls), call_of, needed, users)


def is_backward(node: fx.Node) -> bool:
    return node.op == "call_function" and record(node).is_backward


def is_costly(node: fx.Node) -> bool:
    """True for what is never computed again under a budget: a product, a collective, a custom op (which may
    take any time)."""
    namespace = getattr(node.target, "namespace", "")
    return bool(record(node).flops) or is_collective(node.target) or namespace not in ("autopar", "aten", "prims", "")


def inputs_that_vary(program: Program) -> Iterator[fx.Node]:
    """The inputs that differ from step to step: the batch and the seed."""
    for node, entry in program.entries:
        if entry.kind in ("batch", "seed"):
            yield node
