"""Matrix products. A contracted name leaves a partial sum, unless something is added that every rank would add."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.ir.ops.ops import contraction_flops
from autopar.passes.rules.build import SECOND, Linear, argument, build, replicated_rule, with_owners
from autopar.passes.rules.linalg import batched
from autopar.passes.rules.notation import instantiate
from autopar.passes.rules.rule import Call, Row, Rule

EITHER: Linear = (frozenset({0}), frozenset({1}))


def _product(spec: str) -> Callable[[Call], Rule]:
    """Two operands; two floating-point operations for each point of the space that all names span."""

    def rule(call: Call) -> Rule:
        points = math.prod(call.operands[0].shape) * call.results[0].shape[-1] if call.results[0].shape else 0
        return instantiate(spec, call, linear=EITHER, flops=2 * points)

    return rule


def _vectors(spec: str) -> Callable[[Call], Rule]:
    return lambda call: instantiate(spec, call, linear=EITHER, flops=2 * call.operands[0].numel)


def einsum(call: Call) -> Rule:
    """The names are the letters of the equation."""
    equation = str(argument(call, 2, "equation"))
    left, result = equation.split("->")
    shapes = [operand.shape for operand in call.operands]
    sizes = {
        name: size
        for part, shape in zip(left.split(","), shapes, strict=True)
        for name, size in zip(part, shape, strict=True)
    }
    operands = [tuple(() if sizes[name] == 1 else (name,) for name in part) for part in left.split(",")]
    results = [tuple(() if sizes[name] == 1 else (name,) for name in result)]
    flops = contraction_flops(equation, shapes[0], shapes[1])
    return build(call, operands, results, linear=EITHER, flops=flops)


def _added(product: str) -> Callable[[Call], Rule]:
    """beta * bias + alpha * a b: linear in bias and a, or bias and b, jointly. Every rank adds it: k is replicated."""
    result = product.split(" -> ")[1].split()

    def rule(call: Call) -> Rule:
        shape = call.operands[0].shape
        own = result[len(result) - len(shape) :]
        bias = " ".join("1" if size == 1 else name for name, size in zip(own, shape, strict=True))
        # mv has one column
        columns = call.operands[2].shape[-1] if len(call.operands[2].shape) > 1 else 1
        flops = 2 * call.operands[1].numel * columns
        return instantiate(f"{bias}, {product}", call, replicated={"k"}, linear=({0, 1}, {0, 2}), flops=flops)

    return rule


def _grouped(call: Call) -> Rule:
    """Rows of a are multiplied by the matrix of their group, found by `offs`: groups and rows are replicated."""
    a, b = (len(operand.shape) for operand in call.operands[:2])
    spec = {
        (2, 3): "m k, g k n, g -> m n",
        (3, 2): "g m k, k n, g -> m n",
        (2, 2): "m k, k n, g -> g m n",
        (3, 3): "g m k, g k n -> g m n",
    }[a, b]
    assert len(call.operands) == spec.count(",") + 1, "grouped_mm with a bias"
    # in the 2-d by 2-d form the groups are ranges of k
    replicated = {(2, 3): {"m", "g"}, (3, 2): {"n", "g"}, (2, 2): {"k", "g"}, (3, 3): set()}[a, b]
    linear = EITHER
    points = call.operands[0].numel * call.results[0].shape[-1]
    return instantiate(spec, call, replicated=replicated, linear=linear, flops=2 * points)


def _expert_mm(call: Call) -> Rule:
    """Each row is multiplied by the matrix of its expert: rows are apart, and so are experts (the rest adds zeros)."""
    flops = 2 * call.operands[0].numel * call.results[0].shape[-1]
    rule = instantiate("s k, g k n, s -> s n", call, indexed={"g"}, linear=EITHER, flops=flops)
    return with_owners(rule, rule.operands[2], "g")


def _expert_mm_backward(call: Call) -> Rule:
    flops = 2 * call.operands[0].numel * call.operands[1].shape[-1]
    rule = instantiate("s k, s n, s -> g k n", call, indexed={"g"}, linear=EITHER, flops=flops)
    return with_owners(rule, rule.operands[2], "g")


def _solve_triangular(call: Call) -> Rule:
    """A X = B, or X A = B if not `left`: each column (row) of B on its own, linear in B."""
    a, b = call.operands
    flops = call.results[0].numel * a.shape[-1]
    if len(a.shape) != len(b.shape):
        return replace(replicated_rule(call), flops=flops)
    sides = "... n k" if argument(call, 3, "left", True) else "... k n"
    return instantiate(f"... n r, {sides} -> {sides}", call, replicated={"n", "r"}, linear=SECOND, flops=flops)


def _distances(call: Call) -> Rule:
    """Name the dims of distances of every row of one matrix to every row of the other; a distance is no sum over m."""
    flops = 2 * call.results[0].numel * call.operands[0].shape[-1]
    return batched(call, "p _, r _ -> p r", flops=flops)


def _distances_backward(call: Call) -> Rule:
    """The gradient of the first matrix is a sum over the rows of the other."""
    grad, x, *_ = call.operands
    flops = 2 * grad.numel * x.shape[-1]
    if len({len(operand.shape) for operand in call.operands}) > 1:
        return replace(replicated_rule(call), flops=flops)
    return instantiate(
        "... p r, ... p m, ... r m, ... p r -> ... p m", call, replicated={"m"}, linear=({0},), flops=flops
    )


ROWS: Mapping[str, Row] = {
    "autopar.einsum.default": Row(einsum),
    "aten.mm.default": Row(_product("m k, k n -> m n")),
    "aten.bmm.default": Row(_product("b m k, b k n -> b m n")),
    "aten.mv.default": Row(_vectors("m k, k -> m")),
    "aten.dot.default": Row(_vectors("k, k -> ")),
    "aten.vdot.default": Row(_vectors("k, k -> ")),
    "aten.addmm.default": Row(_added("m k, k n -> m n")),
    "aten.baddbmm.default": Row(_added("b m k, b k n -> b m n")),
    "aten.addmv.default": Row(_added("m k, k -> m")),
    "aten._grouped_mm.default": Row(_grouped),
    "aten.linalg_solve_triangular.default": Row(_solve_triangular),
    "aten._cdist_forward.default": Row(_distances),
    "aten._cdist_backward.default": Row(_distances_backward),
    "aten._euclidean_dist.default": Row(_distances),
    "autopar.expert_mm.default": Row(_expert_mm),
    "autopar.expert_mm_backward.default": Row(_expert_mm_backward, size_arg=(3, "g")),
}
