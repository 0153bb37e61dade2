"""Make the plan of a step: what the user decided, checked against the model, its batch and the mesh."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture import Captured
from autopar.compiler.constraints import (
    check_batch,
    check_slices,
    check_zero,
    divides_batch,
    microbatches_of,
    parse_shard,
    patterns_of,
)
from autopar.compiler.positions import with_positions
from autopar.compiler.precision_check import check_parameters
from autopar.custom_ops.registry import CUSTOM_OPS
from autopar.ir.mesh import Mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed, Plan


def make_plan(captured: Captured, mesh: Mesh, options: StepOptions, fixed: Fixed) -> Plan:
    """The decisions of the user, checked against the model, its batch and the mesh."""
    program = captured.program
    check_parameters(program, options)
    batch_replicated = fixed.is_own or (fixed.uneven and not divides_batch(program, mesh, captured.batch_dims))
    if not batch_replicated:
        check_batch(program, mesh, captured.batch_dims)
    slices = Plan(mesh, options=options).slices
    count = microbatches_of(
        program,
        mesh,
        options.microbatches,
        captured.batch_dims,
        replicated=batch_replicated,
        uneven=fixed.uneven,
        slices=slices,
    )
    plan = Plan(
        mesh,
        parse_shard(options.shard, program, mesh),
        options=replace(options, microbatches=count),
        fixed=fixed,
        batch_replicated=batch_replicated,
        batch_dims=captured.batch_dims,
        patterns=patterns_of(options.shard, program),
        frozen=captured.frozen,
        rules=CUSTOM_OPS.rows(),
    )
    check_zero(plan)
    check_slices(plan)
    return with_positions(plan, program)
