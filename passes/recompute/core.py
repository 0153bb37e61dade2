"""Find the attention core: cheap products of activations, and what lies between them."""

from __future__ import annotations

from torch import fx

from autopar.ir.ops.ops import is_collective
from autopar.ir.program import Program, operand_nodes, record
from autopar.passes.recompute.graph import inputs_that_vary, is_backward

# Operations for each byte of a product's result: about what a GPU does while it writes that byte and reads it again.
# Products over the width of a head (64 to 256 in 16 bits) are below, those over the width of a model are above.
_FLOPS_PER_BYTE = 256.0


def attention_core(program: Program) -> frozenset[fx.Node]:
    """The nodes on a way from one product of two activations to another, without the last: q k^T, softmax and dropout
    where attention is written out (arXiv 2205.05198, section 5).

    Their values grow with the square of the sequence, and little work is in each. A product with a weight ends a way,
    and so does a collective. A product of activations that takes longer than its result's memory does not begin one.
    """
    varies: set[fx.Node] = set(inputs_that_vary(program))
    forward = [node for node in program.calls() if not is_backward(node)]
    products: set[fx.Node] = set()
    after: set[fx.Node] = set()
    for node in forward:
        operands = operand_nodes(node)
        if any(operand in varies for operand in node.all_input_nodes):
            varies.add(node)
        if record(node).flops and record(node).is_tensor and all(operand in varies for operand in operands):
            products.add(node)
            if record(node).flops <= _FLOPS_PER_BYTE * record(node).type.bytes_:
                after.add(node)
        elif not _ends(node) and any(operand in after for operand in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(forward):
        if any(user in products or (user in before and not _ends(user)) for user in node.users):
            before.add(node)
    return frozenset(after & before)


def _ends(node: fx.Node) -> bool:
    return bool(record(node).flops) or is_collective(node.target)
