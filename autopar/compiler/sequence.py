"""Take a program through the passes, with or without sequence parallelism: what was asked for, or is cheaper."""

from __future__ import annotations

from dataclasses import replace

from autopar.compiler.constraints import is_sequence_parallel, no_sequence
from autopar.compiler.lowered import Lowered
from autopar.errors import LayoutError
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import run_passes
from autopar.passes.costs.streams import run


def through_passes(captured: Program, plan: Plan, is_verified: bool = True) -> Lowered:
    """A captured program after all passes, "auto" decided. is_verified: as of `run_passes`. Raises LayoutError where
    sequence parallelism is asked for and cannot be."""
    is_open = plan.options.sequence_parallel == "auto" and plan.fixed.sequence is None
    if plan.options.sequence_parallel == "auto" and plan.fixed.sequence is False:
        plan = without_sequence(plan)
    compiled = Lowered(plan, run_passes(captured, plan, is_verified=is_verified))
    if plan.sequence_parallel and not is_sequence_parallel(compiled.program):
        if plan.options.sequence_parallel != "auto":
            raise LayoutError(no_sequence(captured, compiled.plan))
        return whole_sequence(compiled, is_verified)
    return cheaper(compiled, whole_sequence(compiled, is_verified)) if is_open else compiled


def whole_sequence(compiled: Lowered, is_verified: bool = True) -> Lowered:
    """The same program compiled without sequence parallelism. is_verified: as of `run_passes`."""
    plan = without_sequence(compiled.plan)
    return Lowered(plan, run_passes(compiled.history[0][1], plan, is_verified=is_verified))


def without_sequence(plan: Plan) -> Plan:
    """The plan without sequence parallelism."""
    return replace(plan, options=replace(plan.options, sequence_parallel=False))


def cheaper(split: Lowered, whole: Lowered) -> Lowered:
    """The faster one of the plans with and without sequence parallelism, with a note that says why."""
    machine = split.plan.weighed_on
    took = [run(each.program, machine).total for each in (split, whole)]
    is_on = took[0] <= took[1]
    chosen, said = (split, "on") if is_on else (whole, "off")
    part = "a micro-batch" if split.plan.parts > 1 else "a step"
    with_it, without = (f"{time / 1e3:.3g} ms" for time in took)
    note = f"sequence_parallel='auto' is {said}: {part} takes {with_it} with it and {without} without on {machine.name}"
    return replace(chosen.with_note(note), sequence=is_on)
