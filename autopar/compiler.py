"""From a module to the programs of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from autopar.capture import Captured, capture
from autopar.capture.capture import LossFn
from autopar.compiled import Compiled
from autopar.constraints import check_batch, parse_shard, patterns_of
from autopar.errors import CaptureError
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Plan
from autopar.ir.text import print_program
from autopar.meshes import MeshLike, mesh_of
from autopar.passes import run_passes
from autopar.settings import Settings

Shard = Mapping[str, "str | Layout"]


def compile(
    model: nn.Module,
    mesh: MeshLike,
    *,
    loss_fn: LossFn | None = None,
    batch: Any,
    shard: Shard | None = None,
) -> Compiled:
    """Compile one training step for every rank of a mesh, without processes, ranks or device memory.

    model, batch: may be on the meta device; only shapes, dtypes and Python values are read.
    batch: the global batch: a tuple of the positional arguments after the model, a dict of keyword arguments, or one
      tensor. loss_fn: called as `loss_fn(model, *batch)`; None if the module itself returns the loss.
    shard: layouts by parameter pattern, e.g. `{"blocks.*.up.weight": "[tp,-]"}`.

    Raises MeshError, LayoutError, BatchError or CaptureError for what cannot be compiled.
    """
    check_model(model)
    parsed = mesh_of(mesh)
    args, kwargs = batch_arguments(batch)
    captured = capture(model, loss_fn, args, kwargs)
    return lower(captured, parsed, shard)


def check_model(model: object) -> None:
    """Raise CaptureError for what is no module."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(f"the model is {what}, but it must be an nn.Module that is built already.")


def lower(captured: Captured, mesh: Mesh, shard: Shard | None, settings: Settings | None = None) -> Compiled:
    """Take a captured program through the passes."""
    check_batch(captured.program, mesh)
    layouts = parse_shard(shard, captured.program, mesh)
    plan = Plan(mesh, layouts, patterns=patterns_of(shard, captured.program))
    compiled = Compiled(plan, run_passes(captured.program, plan))
    directory = (settings or Settings.read()).dump
    if directory is not None:
        dump(compiled, directory)
    return compiled


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
