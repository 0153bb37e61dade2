"""fuse: calls between products and collectives become groups that run as one kernel each."""

from __future__ import annotations

from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes.fuse.again import recompute
from autopar.passes.fuse.facts import Facts
from autopar.passes.fuse.merge import merged
from autopar.passes.fuse.reasons import is_worth, reason_of
from autopar.passes.fuse.write import Writer


def fuse(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL."""
    return fused(program) if plan.options.compile == "triton" else program


def fused(program: Program) -> Program:
    """The program with its groups as fused nodes."""
    groups = merged(Facts.of(program))
    recompute(groups)
    chosen = {unit: reason_of(groups, unit) for unit in groups.groups() if is_worth(unit)}
    return Writer(groups, chosen).run() if chosen else program
