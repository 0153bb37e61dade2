"""Compile a module into the programs of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from autopar.capture import Captured, Earlier, LossFn, capture, dims_of_call
from autopar.capture.code_checks import check_code
from autopar.capture.data.reads import Answers
from autopar.capture.draws.host_draws import generators, set_generators
from autopar.capture.inputs.batch_dims import Dims
from autopar.capture.step_kind import StepKind
from autopar.compiler.constraints import (
    batch_ranks,
    check_batch,
    check_patterns,
    check_plan,
    divides_batch,
    microbatches_of,
    parse_shard,
    patterns_of,
)
from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.compiler.models import check_model
from autopar.compiler.positions import with_positions
from autopar.compiler.precision_check import check_parameters
from autopar.compiler.sequence import through_passes
from autopar.custom_ops.registry import CUSTOM_OPS, check_calls
from autopar.errors import BatchError, CoupledError, LayoutError
from autopar.ir.mesh import Mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed, Plan
from autopar.ir.program import Program
from autopar.passes import make_pipeline, run_passes
from autopar.passes.groups import deals_microbatches, parts_of_batch
from autopar.passes.schedules import simulate
from autopar.passes.search.axes import cuts_samples
from autopar.settings import Settings

# Choose how many slices of a sequence end a step soonest, by the simulation of what each number is compiled to.

COUNTS = (2, 4, 8)


def best_sliced(lower: Callable[[int], Lowered]) -> Lowered:
    """The best of several numbers of slices, with a note that says why. lower: compiles one of them."""
    best = lower(1)
    if best.pipeline is None or best.plan.ranks_of_pipeline == 1:
        return best
    spans, said = {1: span_us(best)}, ""
    for count in COUNTS:
        try:
            lowered = lower(count)
        except BatchError:
            continue  # it does not divide the positions
        except LayoutError as error:  # nor would another number do
            said = f": {error}"
            break
        spans[count] = span_us(lowered)
        best = lowered if spans[count] < span_us(best) else best
    took = ", ".join(f"{count} of them {span:.3g} us" for count, span in spans.items())
    return best.with_note(f"slices='auto' is {best.plan.slices} (simulated: {took}){said}")


def span_us(compiled: Lowered) -> float:
    """The simulated time of a step."""
    pipeline = compiled.pipeline
    assert pipeline is not None
    return simulate(pipeline.lists, pipeline.flow, pipeline.costs).span_us


WHOLE_TRIES = 16  # searches of a program in which some values turn out to be needed of the whole batch


class CaptureKeywords(TypedDict, total=False):
    """What `capture` may be told of the step that is meant."""

    kind: StepKind
    lift: torch.dtype | None
    answers: Answers | None


@dataclass(frozen=True, slots=True)
class Dealing:
    """To how many micro-batches a loss deals the batch that takes a value of each (`autopar.per_microbatch`).

    dims: of the batch that count its samples, where more is known than the options say. earlier: captures of the same
    step at other sizes, by the number of micro-batches.
    """

    mesh: Mesh
    options: StepOptions
    fixed: Fixed = field(default_factory=Fixed)
    dims: Dims | None = None
    earlier: Mapping[int, Earlier] | None = None

    def guess(self) -> int:
        """The number that a batch has which ranks and micro-batches divide."""
        return batch_ranks(self.mesh) * (self.options.microbatches or 1)


@uncollected()
def capture_step(
    model: nn.Module, loss_fn: LossFn | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: StepOptions,
    dealing: Dealing | None = None, **known: Unpack[CaptureKeywords],
) -> Captured:  # fmt: skip
    """Check a model and capture its step: what every way to its programs begins with. dealing: if the mesh is known.
    known: what `capture` may be told."""
    check_model(model, loss_fn)
    gives_loss = known.get("kind", StepKind.TRAINING).gives_loss
    function, behind = (loss_fn, 1) if loss_fn is not None and gives_loss else (model.forward, 0)
    dims = None if dealing is None else dealing.dims
    dims = dims_of_call(options.batch_dims, args, kwargs, function, behind) if dims is None else dims

    start = generators()

    def captured_for(count: int) -> Captured:
        set_generators(start)  # the step is the same one, whatever an earlier capture drew on the host
        earlier = None if dealing is None or dealing.earlier is None else dealing.earlier[count]
        return capture(
            model, loss_fn, args, kwargs, specialize=options.specialize, precision=options.precision,
            statistics=options.batch_statistics, microbatches=count, earlier=earlier, **known,
        ).with_dims(dims)  # fmt: skip

    captured = captured_for(1 if dealing is None else dealing.guess())
    if dealing is not None and deals_microbatches(captured.program):
        found = parts_of_batch(make_plan(captured, dealing.mesh, dealing.options, dealing.fixed))
        captured = captured_for(found) if deals_microbatches(captured.program, found) else captured
    check_code(captured.ran)
    for partner in captured.partners:
        if partner.module is partner.traced:  # a parallel one is checked already
            check_model(partner.module)
    return captured


@uncollected()
def lower(
    captured: Captured, mesh: Mesh, options: StepOptions | None = None, fixed: Fixed | None = None,
    settings: Settings | None = None,
) -> Lowered:  # fmt: skip
    """Take a captured program through the passes. fixed: what is decided already. Of `memory=` it knows nothing: see
    `report/memory/within_memory.py`."""
    wanted, known = options or StepOptions(), fixed or Fixed()
    assert wanted.memory is None, "the limit is kept to by lower_within"
    if wanted.slices == "auto":
        compiled = best_sliced(lambda count: _lowered(captured, mesh, replace(wanted, slices=count), known))
    else:
        compiled = _lowered(captured, mesh, wanted, known)
    return dumped(compiled, settings)


def dumped(compiled: Lowered, settings: Settings | None = None) -> Lowered:
    """Compiled programs, which are written where AUTOPAR_DUMP says."""
    directory = (settings or Settings.read()).dump
    if directory is not None:
        compiled.dump(directory)
    return compiled


def varied(compiled: Lowered, **changes: Any) -> Lowered:
    """The same programs with other options of what a rank keeps and gathers: nothing before `reshard` reads them."""
    plan = replace(compiled.plan, options=replace(compiled.plan.options, **changes), slice_lengths=())
    check_plan(plan)
    begun = tuple(takewhile(lambda step: step[0] != "reshard", compiled.history))
    made = replace(compiled, plan=plan, history=run_passes(begun[-1][1], plan, begun), pipeline=None)
    return _staged(made) if plan.is_staged else made


def _lowered(captured: Captured, mesh: Mesh, options: StepOptions, fixed: Fixed) -> Lowered:
    program, plan = check_calls(captured.program), make_plan(captured, mesh, options, fixed)

    def made(plan: Plan) -> Lowered:
        compiled = through_passes(program, plan)
        return _staged(compiled) if plan.is_staged else compiled

    return decoupled(program, plan, made)


def decoupled(program: Program, plan: Plan, make: Callable[[Plan], Lowered]) -> Lowered:
    """The programs that `make` gives for a plan in which what couples micro-batches twice is computed of the whole
    batch, once all have come forward (`Plan.whole`), or samples that the loss cuts out of the batch are all at once.
    program: the CAPTURED one. Raises CoupledError where that does not help."""
    first, given = None, plan
    for _ in range(WHOLE_TRIES):
        try:
            return make(plan)
        except CoupledError as error:
            first = first or error
            if error.whole <= plan.whole:
                break
            plan = replace(plan, whole=plan.whole | error.whole)
    assert first is not None
    if given.cuts_samples and cuts_samples(program, given):
        with suppress(CoupledError, LayoutError):  # the first reason is the one to be told
            return decoupled(program, replace(given, cuts_samples=False), make)
    raise first


def _staged(compiled: Lowered) -> Lowered:
    """Cut compiled programs into stages, with the lengths of slices in the plan."""
    plan, history = compiled.plan, compiled.history
    pipeline = make_pipeline(compiled.program, plan, dict(history)["chunk_loss"])
    if pipeline.flow.lengths:
        plan = replace(plan, slice_lengths=pipeline.flow.lengths)
        *before, (name, last) = history
        history = (*before, (name, last.with_(mesh=plan.layout_mesh)))
    compiled = replace(compiled, plan=plan, history=history, pipeline=pipeline)
    for note in pipeline.notes:
        compiled = compiled.with_note(note)
    return compiled


def batch_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


# -- the plan of a step -----------------------------------------------------------------------------------------------


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
    check_plan(plan)
    check_patterns(plan, program)
    return with_positions(plan, program)
