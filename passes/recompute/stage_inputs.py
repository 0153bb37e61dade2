"""Compute the forward pass of a micro-batch again from what its stage was given."""

from __future__ import annotations

from torch import fx

from autopar.ir.options import STAGE
from autopar.ir.plan import Plan
from autopar.ir.program import Program, record
from autopar.passes.pipeline.cuts.assign import gathered_anew
from autopar.passes.pipeline.cuts.when import NodeTimes, When, times_of
from autopar.passes.recompute.choose import routes_of
from autopar.passes.recompute.rematerialize import RecomputedCall, rematerialize

OF_A_MICROBATCH = (When.INPUT, When.BODY)


def from_stage_inputs(program: Program, plan: Plan) -> Program:
    """Let whatever runs with the backward pass of a micro-batch read clones of the forward pass, so that nothing of
    that is kept but what enters it (GPipe, arXiv 1811.06965, section 2.3) and what goes into the graph between the
    passes (GradCache, arXiv 2101.06983).

    The clones are those of one group, made before the first node that reads them. Where the pipeline is cut, each stage
    reads what the forward pass sent to it in place of clones of other stages (`cuts/rematerialized.py`). Parameters
    that ZeRO-3 gathers for the clones are gathered once more for the gradients: else all would stay until then.

    The ways of rows to experts are kept, for which the host waits. Without stages and micro-batches nothing lies
    between the passes, and the program stays as it is.
    """
    if not plan.is_staged:
        return program
    times = times_of(program, plan.parts, gathered_anew(program, plan), both=True, sized=bool(plan.slice_lengths))
    kept = {route for node in program.calls() for route in routes_of(node)}
    recomputed = {
        node: RecomputedCall(STAGE, "recomputed: stage")
        for node in program.calls()
        if _is_forward(node, times) and node not in kept
    }
    return rematerialize(program, recomputed, lambda node: STAGE if _is_second(node, times) else None, shares=False)


def _is_forward(node: fx.Node, times: NodeTimes) -> bool:
    """True for what the forward pass of a micro-batch computes."""
    if record(node).is_backward or node in times.second:
        return False
    return times.of[node] in OF_A_MICROBATCH


def _is_second(node: fx.Node, times: NodeTimes) -> bool:
    """True for what runs with the backward pass of a micro-batch: gradients, and the rest of a loss that needs all."""
    if node.op != "call_function" or times.of[node] not in OF_A_MICROBATCH:
        return False
    return record(node).is_backward or node in times.second
