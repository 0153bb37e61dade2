"""Give every call of a LOCAL program its stage, and every stage its own gathers and sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.errors import CoupledError
from autopar.ir.mesh import axes_of_group
from autopar.ir.plan import Plan
from autopar.ir.program import Program, given_of, is_gathered_input, record
from autopar.passes.pipeline.cuts.action_graphs import Places
from autopar.passes.pipeline.cuts.backward_stages import backward_nodes, place_backward, with_attention
from autopar.passes.pipeline.cuts.cut import StageLimits, Stages, cut, forward_nodes
from autopar.passes.pipeline.cuts.gathers import gathered_by_stage
from autopar.passes.pipeline.cuts.late import gathered_late
from autopar.passes.pipeline.cuts.manual import manual
from autopar.passes.pipeline.cuts.rematerialized import kept_across
from autopar.passes.pipeline.cuts.sums import sums_by_stage, with_reductions, with_steps_of_terms
from autopar.passes.pipeline.cuts.undivided import check_divided
from autopar.passes.pipeline.cuts.when import NodeTimes, When, times_of


@dataclass(frozen=True, slots=True)
class Staged:
    """A program with the stages of its forward and backward calls."""

    program: Program
    forward: Stages
    backward: Stages

    @property
    def all(self) -> Stages:
        return {**self.forward, **self.backward}

    def moved_to(self, program: Program, new: Mapping[fx.Node, fx.Node], placed: Mapping[fx.Node, int]) -> Staged:
        """The same stages in a program that was made of this one; new: its nodes by those of this one. placed: the
        stages of nodes that have others, or stand for none of this one."""
        forward, backward = (
            {new[n]: stage for n, stage in of.items() if n in new}
            | {n: stage for n, stage in placed.items() if record(n).is_backward == is_backward}
            for of, is_backward in ((self.forward, False), (self.backward, True))
        )
        return Staged(program, forward, backward)


def staged(program: Program, plan: Plan, places: Places) -> Staged:
    """The program with its stages, of which each gathers parameters and adds up micro-batches for itself."""
    staged = _assign(program, plan, places)
    if len(places.ranks) > 1:
        for step in (_keep_across, _gather_per_stage, _accumulate_per_stage):
            staged = step(staged, plan)
    return staged


def _assign(program: Program, plan: Plan, places: Places) -> Staged:
    """Give every call of the micro-batches its stage: forward ones by the cut, backward ones by data flow."""
    program, times = timed(program if plan.parts > 1 else with_reductions(program), plan)
    if len(places.ranks) == 1 and plan.options.stages is None and plan.options.stage_memory is None:
        every = forward_nodes(program, times), backward_nodes(program, times)
        return Staged(program, *(dict.fromkeys(nodes, 0) for nodes in every))
    _check_second(program, times, len(places.ranks))
    if plan.parts > 1:
        check_divided(program, times, plan)
    forward = with_attention(_cut(program, times, plan, places))
    return Staged(program, forward, place_backward(program, times, forward, len(places.ranks)))


def _check_second(program: Program, times: NodeTimes, stages: int) -> None:
    """Raise CoupledError if more layers of the model than a stage has need all micro-batches: no cut divides these."""
    work = {True: 0, False: 0}
    for node in program.calls():
        is_layer = any(times.of[one] is When.INVARIANT or one in times.renewed for one in node.all_input_nodes)
        if is_layer and times.of[node] in (When.BODY, When.MIDDLE) and not record(node).is_backward:
            work[not times.is_forward(node)] += record(node).flops
    if times.coupling is not None and stages > 1 and work[True] * stages >= work[True] + work[False] > 0:
        raise CoupledError(times.coupling.refusal)


def _cut(program: Program, times: NodeTimes, plan: Plan, places: Places) -> Stages:
    options, fixed = plan.options, plan.fixed
    if options.stages is not None:
        return manual(program, times, options.stages)
    limits = StageLimits(places.in_flight, options.stage_memory, fixed.owners, fixed.machine, plan.mesh)
    return cut(program, times, len(places.ranks), limits)


def _keep_across(staged: Staged, plan: Plan) -> Staged:
    """Let a recomputed call read, across the border of stages, what the forward pass sent."""
    renewed = times_in(staged.program, plan).renewed
    return staged.moved_to(*kept_across(staged.program, staged.all, renewed), {})


def _gather_per_stage(staged: Staged, plan: Plan) -> Staged:
    """Let each stage gather the parameters that it uses, as those that no other stage uses."""
    renewed = times_in(staged.program, plan).renewed
    return staged.moved_to(*gathered_by_stage(staged.program, renewed, staged.all)) if renewed else staged


def _accumulate_per_stage(staged: Staged, plan: Plan) -> Staged:
    """Let each stage add up its own micro-batches before stages add to one another."""
    times = times_of(staged.program, plan.parts, sized=bool(plan.slice_lengths))
    staged = replace(staged, backward=with_steps_of_terms(times, staged.backward))
    return staged.moved_to(*sums_by_stage(staged.program, times, staged.all))


def timed(program: Program, plan: Plan) -> tuple[Program, NodeTimes]:
    """The program in which each node has one time, and the times: what micro-batches read, and the step once more when
    they are done, is there twice."""
    if plan.gathers_again:
        gathers = gathered_anew(program, plan)
        times = times_of(program, plan.parts, gathers, both=True, sized=bool(plan.slice_lengths))
        program = gathered_late(program, times)
    return program, times_in(program, plan)


def times_in(program: Program, plan: Plan) -> NodeTimes:
    return times_of(program, plan.parts, gathered_anew(program, plan), sized=bool(plan.slice_lengths))


def gathered_anew(program: Program, plan: Plan) -> frozenset[fx.Node]:
    """The gathers of parameters that each micro-batch has anew (ZeRO-3)."""
    if not plan.gathers_again:
        return frozenset()
    axes, names = set(plan.zero_axes), {node: entry.name for node, entry in program.entries}
    gathers = (node for node in program.calls() if is_gathered_input(node))
    return frozenset(
        node
        for node in gathers
        if axes.issuperset(axes_of_group(str(node.args[1]))) and plan.is_gathered_again(names[given_of(node)])
    )
