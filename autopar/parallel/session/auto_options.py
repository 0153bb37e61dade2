"""What may be said beside a mesh. Beside "auto" nothing that a plan decides; and the machine that it plans for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import AutoparError, BatchError, MeshError, PlanError
from autopar.ir.mesh import AUTO, Mesh
from autopar.ir.options import PLANNED, StepOptions
from autopar.ir.plan import Plan
from autopar.machines import Machine, MachineLike, machine_like
from autopar.machines.here import machine_here
from autopar.settings import Settings

BATCHES = ("global", "local", "ddp")
_CHOSEN = {**PLANNED, "shard": None, "stages": None}


def check_open(is_auto: bool, step: Mapping[str, Any], batch: str) -> None:
    """Raise MeshError for what contradicts a mesh that is planned; BatchError for an unknown kind of batch."""
    if batch not in BATCHES:
        said = repr(batch) if isinstance(batch, str) else f"a {type(batch).__name__}"
        raise BatchError(f'batch={said}: write "global" (each rank takes its part), "local" or "ddp".')
    if not is_auto:
        return
    for name, default in _CHOSEN.items():
        if step.get(name, default) != default:
            raise MeshError(
                f"mesh '{AUTO}' decides {name} itself: leave out {name}={step[name]!r}, or write a mesh. "
                f"(`autopar plan TARGET --gpus N --fix ...` plans around what is decided.)"
            )
    if isinstance(memory := step.get("memory"), float):
        raise MeshError(
            f"mesh '{AUTO}' with memory={memory}: a part is of what the step holds on one mesh, and each that is "
            f'planned has another. Write bytes, such as memory="60GiB".'
        )
    if batch != "global":
        raise MeshError(
            f"mesh '{AUTO}' with batch=\"{batch}\": which part of the batch a rank passes follows from the mesh, which "
            f'is planned for the batch. Pass the whole batch on every rank (batch="global"), or write a mesh.'
        )


def check_own(batch: str, mesh: Mesh, options: StepOptions) -> None:
    """Raise PlanError for states that are split over the ranks of batch="ddp"."""
    plan = Plan(mesh, options=options)
    if batch == "ddp" and plan.zero:
        raise PlanError(
            f"batch=\"ddp\" with zero={plan.zero} on mesh '{mesh}': every rank keeps all states, as under DDP. Leave "
            f'zero out and name the axis dp, or write batch="local", whose step is that of all parts together.'
        )


def machine_for(given: MachineLike | None, device: torch.device) -> Machine:
    """The machine that is planned for: the one given, or that of this rank's device, with as many ranks in a node as
    the launcher started. Raises MeshError for one that is not known."""
    try:
        found = machine_here(device) if given is None else machine_like(given)
    except AutoparError as error:
        raise MeshError(f"mesh '{AUTO}': {error}") from error
    return replace(found, ranks=Settings.read().local_world_size or found.ranks)


__all__ = ["AUTO", "check_open", "check_own", "machine_for"]
