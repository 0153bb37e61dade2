"""fuse: calls between products and collectives become groups that run as one kernel each."""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes.fuse.again import recompute
from autopar.passes.fuse.facts import Facts
from autopar.passes.fuse.identities import without_identities
from autopar.passes.fuse.merge import merged
from autopar.passes.fuse.reasons import is_worth, reason_of
from autopar.passes.fuse.write_groups import GroupWriter


def fuse(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL, and of each graph of a pipeline. Only with `compile="triton"`. A group is one node that holds its
    calls, and says what it saves and why it ends where it does:

        mesh: dp=2
        compile: triton
        LOCAL program on dp=2
        %w: f32[8,8] [-,-] = parameter "w"
        %x: f32[3,8] of [6,8] [dp,-] = batch "0"
        %einsum: f32[3,8] of [6,8] [dp,-] = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %gelu: f32[3,8] of [6,8] [dp,-] = aten.gelu.default(%einsum)
        %add: f32[3,8] of [6,8] [dp,-] = aten.add.Tensor(%gelu, %x)
        %all_gather: f32[6,8] [-,-] = autopar.all_gather.default(%add, "dp", 0, 1)
        return value "y" = %all_gather
    becomes
        LOCAL program on dp=2
        %w: f32[8,8] [-,-] = parameter "w"
        %x: f32[3,8] of [6,8] [dp,-] = batch "0"
        %einsum: f32[3,8] of [6,8] [dp,-] = autopar.einsum.default(%x, %w, "ca,ba->cb")
        %fused_gelu_add: (f32[3,8] of [6,8] [dp,-]) = fused.points "gelu_add"(%einsum, %x)
            %einsum: f32[3,8] of [6,8] [dp,-] = operand
            %x: f32[3,8] of [6,8] [dp,-] = operand
            %gelu: f32[3,8] of [6,8] [dp,-] = aten.gelu.default(%einsum)
            %add: f32[3,8] of [6,8] [dp,-] = aten.add.Tensor(%gelu, %x)
            return %add
        %add: f32[3,8] of [6,8] [dp,-] = operator.getitem(%fused_gelu_add, 0)
        %all_gather: f32[6,8] [-,-] = autopar.all_gather.default(%add, "dp", 0, 1)
        return value "y" = %all_gather

    Calls that no kernel computes (products, attention, collectives) keep their order, and a group runs between two of
    them, behind all that it reads and before all that reads it: no collective starts later or is awaited earlier.
    Groups grow along values that one call makes and another reads, then beside operands that they share, as long as
    they have the same rows, none of them reads what only a whole group has made, and registers hold a row (see
    `fits.py`). A group computes again what it can make of operands that it reads anyway: the backward pass its part of
    the forward pass, everybody a cast to a longer float. Forward and backward pass stay apart.
    """
    return fused(program) if plan.options.compile == "triton" else program


def fused(program: Program) -> Program:
    """The program with its groups as fused nodes."""
    groups = merged(Facts.of(without_identities(program)))
    recompute(groups)
    chosen = {unit: reason_of(groups, unit) for unit in groups.groups() if is_worth(unit)}
    return GroupWriter(groups, chosen).run() if chosen else program
