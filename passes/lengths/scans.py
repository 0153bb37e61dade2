"""scans: sums along a sequence, and their gradients, are one op each."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, erase_unused, of_parameters, operand_nodes, record
from autopar.passes.search.intents import context_axes

aten = torch.ops.aten
Scan = tuple[fx.Node, int, bool]  # what is summed up, along which dim, from behind


def scans(program: Program, plan: Plan) -> Program:
    """CAPTURED -> CAPTURED. Where cp splits a sequence, a running sum along it says whether it begins at the end.

        mesh: cp=2
        CAPTURED program
        %x: f32[2,8] = batch "0"
        %w: f32[8] = parameter "w"
        %mul: f32[2,8] = aten.mul.Tensor(%x, %w)
        %cumsum: f32[2,8] = aten.cumsum.default(%mul, -1)
        %flip: f32[2,8] = aten.flip.default(%cumsum, [1])
        %cumsum_1: f32[2,8] = aten.cumsum.default(%flip, 1)
        %flip_1: f32[2,8] = aten.flip.default(%cumsum_1, [1])
        return value "y" = %flip_1
    becomes
        CAPTURED program
        %x: f32[2,8] = batch "0"
        %w: f32[8] = parameter "w"
        %mul: f32[2,8] = aten.mul.Tensor(%x, %w)
        %running_sum: f32[2,8] = autopar.running_sum.default(%mul, 1, False)
        %running_sum_2: f32[2,8] = autopar.running_sum.default(%running_sum, 1, True)
        return value "y" = %running_sum_2

    Autograd writes the gradient of a running sum as one between two flips, through which no split gets. Sums of the
    batch alone stay: the batch is there whole.
    """
    size = math.prod(size for _, size in context_axes(plan.mesh))
    build, fed = Builder("scans"), of_parameters(program)

    def put(node: fx.Node) -> fx.Node | None:
        scan = _scan(node)
        if scan is None or node not in fed or record(node).type.shape[scan[1]] % size:
            return None
        x, dim, reverse = scan
        return build.call(op("running_sum"), build.value[x], dim, reverse, like=record(node), name="running_sum")

    if size == 1 or not any(map(_scan, program.calls())):
        return program
    made = build.rewrite(program, put)
    erase_unused(made.graph)
    return made


def _scan(node: fx.Node) -> Scan | None:
    """What a node sums up, if that is all it does."""
    if node.target is aten.cumsum.default:
        (x,) = operand_nodes(node)
        known = record(node).type
        is_plain = known.shape and known.dtype.is_floating_point and record(x).type.dtype == known.dtype
        dim: Any = node.args[1]
        return (x, dim % len(known.shape), False) if is_plain else None
    if node.target is not aten.flip.default:
        return None
    (inner,) = operand_nodes(node)
    scan = _scan(inner)
    if scan is None or _flipped(node) != [scan[1]] or _flipped(scan[0]) != [scan[1]]:
        return None
    return operand_nodes(scan[0])[0], scan[1], not scan[2]


def _flipped(node: fx.Node) -> list[int] | None:
    """The dims that a node turns round."""
    if node.target is not aten.flip.default:
        return None
    dims: Any = node.args[1]
    return [dim % len(record(node).type.shape) for dim in dims]
