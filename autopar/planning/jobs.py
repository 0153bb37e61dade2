"""From a job, or from a call of a model, to the programs that plans are read off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from autopar.capture import Captured
from autopar.capture.capture import LossFn
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import batch_arguments, capture_step
from autopar.errors import PlanError
from autopar.ir.options import PLANNED, StepOptions
from autopar.job import Job
from autopar.machines import Machine
from autopar.planning.price.layers import Layers
from autopar.planning.shallow.captures import Captures
from autopar.planning.shallow.depth import Shallow
from autopar.planning.shallow.fewer import Capture, with_fewer
from autopar.planning.space.batches import resized_call, rows_of


def layers_of(job: Job, machine: Machine) -> Layers:
    """The programs of a job's micro-batches. Raises as `layers_of_call`."""
    return layers_of_call(job.model, job.loss_fn, *batch_arguments(job.batch), options_of(**job.step), machine)


def layers_of_call(
    model: nn.Module, loss_fn: LossFn | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: StepOptions,
    machine: Machine,
) -> Layers:  # fmt: skip
    """The programs of the micro-batches of a step. Raises BatchError for a batch without rows, and PlanError for
    stages and layouts that are chosen already."""
    rows_of(args, kwargs)
    free = _open(options)

    def capture(count: int, of: nn.Module = model) -> Captured:
        return capture_step(of, loss_fn, *resized_call(args, kwargs, {"b": count}), free)

    def fewer(shallow: Shallow) -> Capture | None:
        small = with_fewer(model, shallow)
        return None if small is None else partial(capture, of=small)

    return Layers(Captures(capture, fewer), free, machine)


def _open(options: StepOptions) -> StepOptions:
    """The options of the job but those that are planned."""
    planned = {name: default for name, default in PLANNED.items() if getattr(options, name) != default}
    if options.stages or options.shard:
        raise PlanError("a plan chooses stages and layouts itself: leave out stages= and shard=.")
    if options.batch_dims is not None:
        raise PlanError(
            f"batch_dims={options.batch_dims!r}: a plan tries other numbers of samples, which it takes for dim 0 of "
            f"the batch's tensors. Leave batch_dims out, or write a mesh in place of a plan."
        )
    return replace(options, memory=None, **planned)
