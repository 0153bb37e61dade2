"""From a module to the programs of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from autopar.capture import Captured, capture
from autopar.capture.capture import LossFn
from autopar.capture.constructs import PARAMETERS, WRAPPERS
from autopar.compiled import Compiled
from autopar.constraints import (
    check_batch,
    divides_batch,
    is_sequence_parallel,
    microbatches_of,
    no_sequence,
    parse_shard,
    patterns_of,
)
from autopar.errors import CaptureError, LayoutError, ScheduleError
from autopar.estimate import step_cost
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan, Staging
from autopar.ir.text import print_program
from autopar.meshes import MeshLike, mesh_of
from autopar.own_ops import OWN_OPS, check_calls
from autopar.passes import make_pipeline, run_passes
from autopar.passes.rules.rule import Table
from autopar.passes.schedules import UserSchedule
from autopar.settings import Settings

Shard = Mapping[str, "str | Layout"]
SequenceParallel = bool | Literal["auto"]
ScheduleLike = str | Path | UserSchedule


@dataclass(frozen=True, slots=True)
class Choices:
    """What is decided beside the mesh: layouts by parameter pattern, sequence parallelism, whether a batch that its
    axes cannot divide is computed whole by every rank instead of refused, whether values that the model reads from
    tensors are taken from the example batch, the number of micro-batches and the stages of a pipeline."""

    shard: Shard | None = None
    sequence_parallel: SequenceParallel = False
    uneven: bool = False
    specialize: bool = False
    microbatches: int | None = None
    staging: Staging = field(default_factory=Staging)


def compile(
    model: nn.Module,
    mesh: MeshLike,
    *,
    loss_fn: LossFn | None = None,
    batch: Any,
    shard: Shard | None = None,
    sequence_parallel: SequenceParallel = False,
    specialize: bool = False,
    microbatches: int | None = None,
    schedule: ScheduleLike = "1f1b",
    stages: Sequence[str] | None = None,
    chunks: int | None = None,
    stage_memory: int | None = None,
) -> Compiled:
    """Compile one training step for every rank of a mesh, without processes, ranks or device memory.

    model, batch: may be on the meta device; only shapes, dtypes and Python values are read.
    batch: the global batch: a tuple of the positional arguments after the model, a dict of keyword arguments, or one
      tensor. loss_fn: called as `loss_fn(model, *batch)`; None if the module itself returns the loss.
    shard: layouts by parameter pattern, e.g. `{"blocks.*.up.weight": "[tp,-]"}`.
    sequence_parallel: True splits norms, dropout and residuals over tp on the sequence: reduce-scatter and all-gather
      in place of all-reduce (arXiv 2205.05198). "auto" does so where the model allows it and where what the ranks no
      longer all compute outweighs the starts of more collectives (`autopar/estimate.py`); a note says so.
    specialize: values that the model reads from tensors (`if mask.any():`, `.item()`) are those of this batch, which
      needs data; they must depend on the batch and on buffers alone. Each is noted, and leaves the program as a guard.
    microbatches: into how many parts a rank's batch goes, one after another; the step stays that of the whole batch.
    schedule, stages, chunks, stage_memory: of a pipeline, as of `autopar.parallelize`.

    Raises MeshError, LayoutError, BatchError, ScheduleError or CaptureError for what cannot be compiled; RuleError for
    an op of your own that is called as none of its registered patterns says.
    """
    check_model(model)
    parsed = mesh_of(mesh)
    args, kwargs = batch_arguments(batch)
    captured = capture(model, loss_fn, args, kwargs, specialize=specialize)
    staging = staging_of(schedule, stages, chunks, stage_memory)
    return lower(captured, parsed, Choices(shard, sequence_parallel, microbatches=microbatches, staging=staging))


def staging_of(
    schedule: ScheduleLike, stages: Sequence[str] | None, chunks: int | None, stage_memory: int | None
) -> Staging:
    """What a user says of a pipeline, checked as far as it can be without one."""
    if isinstance(stages, str) or not all(isinstance(entry, str) for entry in stages or ()):
        raise LayoutError(
            f'stages={stages!r}: write a list of modules, a stage an entry: ["blocks.0-3", "blocks.4-7"].'
        )
    for name, value in (("chunks", chunks), ("stage_memory", stage_memory)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ScheduleError(f"{name}={value!r}: write a number of 1 or more.")
    return Staging(schedule, chunks, None if stages is None else tuple(stages), stage_memory)


def check_model(model: object) -> None:
    """Raise CaptureError for what is no module, and for one that holds what no capture can look into."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(f"the model is {what}, but it must be an nn.Module that is built already.")
    for path, module in model.named_modules():
        for is_wrapped, construct in WRAPPERS:
            if is_wrapped(module):
                who = f"the module '{path}'" if path else "the model"
                name = construct.name.format(type(module).__name__)
                raise CaptureError(f"{who} is {name}. {construct.instead}")
    for path, parameter in model.named_parameters():
        for is_kind, construct in PARAMETERS:
            if is_kind(parameter):
                raise CaptureError(f"the parameter '{path}' {construct.name}. {construct.instead}")


def lower(captured: Captured, mesh: Mesh, choices: Choices | None = None, settings: Settings | None = None) -> Compiled:
    """Take a captured program through the passes."""
    choices = choices or Choices()
    batch_whole = choices.uneven and not divides_batch(captured.program, mesh)
    if not batch_whole:
        check_batch(captured.program, mesh)
    layouts = parse_shard(choices.shard, captured.program, mesh)
    patterns = patterns_of(choices.shard, captured.program)
    microbatches = microbatches_of(
        captured.program, mesh, choices.microbatches, whole=batch_whole, uneven=choices.uneven
    )
    plan = Plan(
        mesh,
        layouts,
        sequence_parallel=bool(choices.sequence_parallel),
        batch_whole=batch_whole,
        microbatches=microbatches,
        staging=choices.staging,
        patterns=patterns,
    )
    program, table = check_calls(captured.program), OWN_OPS.table()
    compiled = Compiled(plan, run_passes(program, plan, table))
    if choices.sequence_parallel and not is_sequence_parallel(compiled.program):
        if choices.sequence_parallel != "auto":
            raise LayoutError(no_sequence(captured.program, mesh))
        compiled = whole_sequence(compiled, table)
    elif choices.sequence_parallel == "auto":
        compiled = cheaper(compiled, whole_sequence(compiled, table))
    if compiled.plan.is_staged:
        compiled = replace(compiled, pipeline=make_pipeline(compiled.program, compiled.plan))
    directory = (settings or Settings.read()).dump
    if directory is not None:
        dump(compiled, directory)
    return compiled


def whole_sequence(compiled: Compiled, table: Table) -> Compiled:
    """The same program compiled without sequence parallelism."""
    plan = replace(compiled.plan, sequence_parallel=False)
    return Compiled(plan, run_passes(compiled.history[0][1], plan, table))


def cheaper(split: Compiled, whole: Compiled) -> Compiled:
    """The cheaper one of the plans with and without sequence parallelism, with a note that says why."""
    costs = step_cost(split.program), step_cost(whole.program)
    chosen, is_on = (split, "on") if costs[0].total <= costs[1].total else (whole, "off")
    note = f"sequence_parallel='auto' is {is_on}: with it a step is {costs[0]} on a rank, without it {costs[1]}"
    return chosen.with_note(note)


def dump(compiled: Compiled, directory: Path) -> None:
    """Write the program after each pass, as `00-capture.txt` and so on."""
    directory.mkdir(parents=True, exist_ok=True)
    for i, (name, program) in enumerate(compiled.history):
        (directory / f"{i:02}-{name}.txt").write_text(print_program(program))


def batch_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as positional and keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}
