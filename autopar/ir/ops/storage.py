"""Find in whose memory a value lies, and what the forward pass keeps for the backward pass."""

from __future__ import annotations

from torch import fx

from autopar.ir.ops import op_facts
from autopar.ir.program import Program, is_gathered_input, is_getitem, record


def is_view(node: fx.Node) -> bool:
    """True for an op whose result lies in the memory of its operand."""
    return op_facts.is_view(node.target)


def root_of(node: fx.Node) -> fx.Node:
    """The node in whose memory a value lies."""
    while node.op == "call_function":
        source = node.args[0] if node.args else None
        inside = is_view(node) or op_facts.may_return_operand(node.target)
        if not isinstance(source, fx.Node) or not (inside or (is_getitem(node) and is_view(source))):
            return node
        node = source
    return node


def kept_values(program: Program) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """What the forward pass keeps for the backward pass, with the nodes of the backward pass that read it.

    Views are no values of their own: what they lie in is kept. Inputs of the program, gathered or not, are no values of
    the forward pass.
    """
    nodes: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in program.calls():
        if record(node).phase != "backward":
            continue
        for operand in node.all_input_nodes:
            root = root_of(operand)
            is_made = root.op == "call_function" and not is_gathered_input(root)
            if is_made and record(root).phase != "backward" and _has_tensors(root):
                nodes.setdefault(root, {})[node] = None
    return {root: tuple(users) for root, users in nodes.items()}


def _has_tensors(node: fx.Node) -> bool:
    return any(type_ is not None for type_ in record(node).types)
