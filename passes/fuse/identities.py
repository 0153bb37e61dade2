"""Calls that give what they are given: a product with 1, a first power. Each would be a result of its own."""

from __future__ import annotations

from torch import fx

from autopar.ir.program import Builder, Program, record
from autopar.passes.fuse.facts import aten

_OF_ONE = frozenset(
    (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar)
)  # fmt: skip


def without_identities(program: Program) -> Program:
    """The program in which the operands of such calls stand for them."""
    found = {node for node in program.calls() if _is_identity(node)}
    if not found:
        return program
    build = Builder("fuse")

    def put(node: fx.Node) -> fx.Node | None:
        return build.value[node.args[0]] if node in found else None  # type: ignore[index]

    return build.rewrite(program, put)


def _is_identity(node: fx.Node) -> bool:
    """True for a call whose result is its operand to the bit, and that a kernel or the executor made."""
    if node.target not in _OF_ONE or node.kwargs or len(node.args) != 2:
        return False
    operand, number = node.args
    if not isinstance(operand, fx.Node) or type(number) not in (int, float) or number != 1:
        return False
    leaves = any(user.op == "output" for user in node.users)  # it would leave in the memory of its operand
    mine, its = record(node), record(operand)
    return not leaves and its.is_tensor and (mine.types, mine.layouts) == (its.types, its.layouts)
