"""Linear algebra on batches of matrices: each matrix by itself; of what is solved each column too, where it can be.

A spec has the dims of each tensor behind its batch: `_` is replicated, a letter is free. Batch dims are broadcast,
from the right. A name that a result lacks is replicated: that result does not become a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.passes.rules.build import FIRST, NONE, Linear, argument, build
from autopar.passes.rules.rule import Call, Dims, Row, Rule

THIRD: Linear = (frozenset({2}),)


def batched(call: Call, spec: str, *, linear: Linear = NONE, flops: int = 0) -> Rule:
    """The rule of a call whose tensors have these dims behind their batch."""
    left, right = spec.split("->")
    cores = [part.split() for side in (left, right) for part in side.split(",")]
    types = (*call.operands, *call.results)
    depth = max(len(type_.shape) - len(core) for type_, core in zip(types, cores, strict=True))
    tensors, replicated = [], set()
    for i, (type_, core) in enumerate(zip(types, cores, strict=True)):
        lead = len(type_.shape) - len(core)
        names = [f"b{depth - lead + at}" if at < lead else core[at - lead] for at in range(len(type_.shape))]
        names = [f"t{i}_{at}" if name == "_" or lead < 0 else name for at, name in enumerate(names)]
        tensor: Dims = tuple(() if size == 1 else (name,) for name, size in zip(names, type_.shape, strict=True))
        replicated |= {name for name in names if name.startswith("t")}
        tensors.append(tensor)
    count = len(call.operands)
    everywhere = {name for tensor in tensors for dim in tensor for name in dim}
    for type_, tensor in zip(call.results, tensors[count:], strict=True):
        if type_.numel:  # some are empty where they were not asked for
            replicated |= everywhere - {name for dim in tensor for name in dim}
    return build(call, tensors[:count], tensors[count:], replicated=replicated & everywhere, linear=linear, flops=flops)


def _row(spec: str, linear: Linear = NONE) -> Row:
    return Row(lambda call: batched(call, spec, linear=linear))


def _solved(of: int, spec: Callable[[Call], str], linear: Linear) -> Row:
    """The row of a solve, which costs the substitution of every column of operand `of`."""
    return Row(
        lambda call: batched(
            call, spec(call), linear=linear, flops=2 * call.operands[of].numel * call.operands[of].shape[-2]
        )
    )


def _lu_solve(call: Call) -> str:
    return "_ _, _, _ k -> _ k" if argument(call, 3, "left", True) else "_ _, _, k _ -> k _"


def _ormqr(call: Call) -> Rule:
    side = "_ k" if argument(call, 3, "left", True) else "k _"
    return batched(call, f"_ _, _, {side} -> {side}", linear=THIRD)


def _pinv(call: Call) -> Rule:
    tolerances = ", " * (len(call.operands) - 1)
    return batched(call, f"_ _{tolerances} -> _ _")


def _least_squares(call: Call) -> Rule:
    """Residuals are of a column each, rank and singular values of a matrix; what was not asked for is empty."""
    return batched(call, "_ _, _ _ -> _ _, _, , _")


ROWS: Mapping[str, Row] = {
    "aten._linalg_eigh.default": _row("_ _ -> _, _ _"),
    "aten._linalg_svd.default": _row("_ _ -> _ _, _, _ _"),
    "aten.cholesky_inverse.default": _row("_ _ -> _ _"),
    "aten.cholesky_solve.default": _solved(0, lambda _: "_ k, _ _ -> _ k", FIRST),
    "aten.geqrf.default": _row("_ _ -> _ _, _"),
    "aten.linalg_cholesky_ex.default": _row("_ _ -> _ _, "),
    "aten.linalg_eig.default": _row("_ _ -> _, _ _"),
    "aten.linalg_householder_product.default": _row("_ _, _ -> _ _"),
    "aten.linalg_inv_ex.default": _row("_ _ -> _ _, "),
    "aten.linalg_ldl_factor_ex.default": _row("_ _ -> _ _, _, "),
    "aten.linalg_ldl_solve.default": _solved(2, lambda _: "_ _, _, _ k -> _ k", THIRD),
    "aten.linalg_lstsq.default": Row(_least_squares),
    "aten.linalg_lu.default": _row("_ _ -> _ _, _ _, _ _"),
    "aten.linalg_lu_factor_ex.default": _row("_ _ -> _ _, _, "),
    "aten.linalg_lu_solve.default": _solved(2, _lu_solve, THIRD),
    "aten.linalg_matrix_exp.default": _row("_ _ -> _ _"),
    "aten.linalg_pinv.atol_rtol_tensor": Row(_pinv),
    "aten.linalg_qr.default": _row("_ _ -> _ _, _ _"),
    "aten.lu_unpack.default": _row("_ _, _ -> _ _, _ _, _ _"),
    "aten.ormqr.default": Row(_ormqr),
    "aten.triangular_solve.default": _row("_ k, _ _ -> _ k, _ _"),
}
