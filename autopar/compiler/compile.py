"""Compile a module into the programs of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture import Captured, Earlier, LossFn, capture, dims_of_call
from autopar.compiler.auto_slices import best_sliced
from autopar.compiler.garbage import uncollected
from autopar.compiler.lowered import Lowered
from autopar.compiler.make_plan import make_plan
from autopar.compiler.models import check_model
from autopar.compiler.sequence import through_passes
from autopar.custom_ops.registry import check_calls
from autopar.errors import CoupledError
from autopar.ir.mesh import Mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.passes import make_pipeline
from autopar.settings import Settings

WHOLE_TRIES = 8  # searches of a program in which some values turn out to be needed of the whole batch


def compile_step(
    model: nn.Module, loss_fn: LossFn | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh,
    options: StepOptions, *, train: bool = True, lift: torch.dtype | None = None, fixed: Fixed | None = None,
) -> tuple[Captured, Lowered]:  # fmt: skip
    """Check a model, capture its step and take that through the passes: the one way from a module to its programs.

    train, lift: as of `capture`. fixed: as of `lower`.
    """
    captured = capture_step(model, loss_fn, args, kwargs, options, train=train, lift=lift)
    return captured, lower(captured, mesh, options, fixed)


@uncollected()
def capture_step(
    model: nn.Module, loss_fn: LossFn | None, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: StepOptions,
    *, train: bool = True, lift: torch.dtype | None = None, earlier: Earlier | None = None,
) -> Captured:  # fmt: skip
    """Check a model and capture its step: what every way to its programs begins with. earlier: as of `capture`."""
    check_model(model)
    captured = capture(
        model, loss_fn, args, kwargs,
        train=train, lift=lift, specialize=options.specialize, precision=options.precision, earlier=earlier,
    )  # fmt: skip
    for partner in captured.partners:
        if partner.module is partner.traced:  # a parallel one is checked already
            check_model(partner.module)
    function, behind = (loss_fn, 1) if loss_fn is not None and train else (model.forward, 0)
    return captured.with_dims(dims_of_call(options.batch_dims, args, kwargs, function, behind))


@uncollected()
def lower(
    captured: Captured, mesh: Mesh, options: StepOptions | None = None, fixed: Fixed | None = None,
    settings: Settings | None = None,
) -> Lowered:  # fmt: skip
    """Take a captured program through the passes. fixed: what is decided already."""
    wanted, known = options or StepOptions(), fixed or Fixed()
    if wanted.slices == "auto":
        compiled = best_sliced(lambda count: _lowered(captured, mesh, replace(wanted, slices=count), known))
    else:
        compiled = _lowered(captured, mesh, wanted, known)
    directory = (settings or Settings.read()).dump
    if directory is not None:
        compiled.dump(directory)
    return compiled


def _lowered(captured: Captured, mesh: Mesh, options: StepOptions, fixed: Fixed) -> Lowered:
    program, plan = check_calls(captured.program), make_plan(captured, mesh, options, fixed)
    first: CoupledError | None = None
    for _ in range(WHOLE_TRIES):
        try:
            compiled = through_passes(program, plan)
            return _staged(compiled) if plan.is_staged else compiled
        except CoupledError as error:
            first = first or error
            if error.whole <= plan.whole:
                break
            # what couples micro-batches twice is computed of the whole batch, once all have come forward
            plan = replace(plan, whole=plan.whole | error.whole)
    assert first is not None
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
