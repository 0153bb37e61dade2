"""Run a program of a parallel module on a batch: what this rank holds and was given becomes the inputs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from autopar.capture.capture import fake_like
from autopar.capture.containers import Parts
from autopar.capture.raising import default_dtype
from autopar.capture.reads import check_reads
from autopar.errors import BatchError
from autopar.ir.layout import Layout, local_part
from autopar.ir.program import Input
from autopar.parallel.batches import of_local_batch
from autopar.parallel.execution import Running
from autopar.parallel.gradients import finished, guarded
from autopar.parallel.parameter import accumulate, drop_gradients
from autopar.parallel.session import Session
from autopar.runtime import host
from autopar.runtime.inputs import StepInputs


def train_step(session: Session, running: Running, parts: Parts) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Run a training program: gradients are added to `.grad`, buffers are written. The loss, and all outputs."""
    bound = running.bound
    outputs = run_step(session, running, parts, is_step=True)
    session.random.steps += 1
    bound.write_buffers(outputs)
    parameters, gradients = bound.gradients(outputs)
    if session.scale is None or session.scale.take(gradients, session.settings.device):
        accumulate(parameters, gradients)
    else:
        drop_gradients(bound.parameters().values())
    session.announcer.stepped()
    (loss,) = bound.losses
    return finished(outputs[loss]), outputs


def forward_step(session: Session, running: Running, parts: Parts) -> Any:
    """Run a forward program: buffers are written. What the model returns, which refuses a backward pass."""
    outputs = run_step(session, running, parts, is_step=False)
    session.random.forwards += 1
    running.bound.write_buffers(outputs)
    return running.captured.result(guarded(outputs, parts.leaves, running.bound.parameters().values()))


def run_step(session: Session, running: Running, parts: Parts, is_step: bool) -> tuple[torch.Tensor, ...]:
    """The outputs of this rank. Raises OtherValues if the program was specialised to other values than this batch has,
    before anything is changed."""
    for i, tensor in parts.tensors():
        if fake_like(tensor):
            where = "is on the meta device, where nothing has data"
            raise BatchError(f"{parts.paths[i]} {where}: only prepare() can take it.")
    lift = session.settings.lift
    with default_dtype(lift) if lift is not None else nullcontext():
        outputs = running.run(_inputs(session, running, parts.leaves, is_step))
    check_reads(running.captured.reads, [outputs[at] for at in running.bound.guards])
    return outputs


def _inputs(session: Session, running: Running, leaves: Sequence[Any], is_step: bool) -> StepInputs:
    device, is_local = session.settings.device, session.settings.is_local
    random, scale, mesh = session.random, session.scale, running.compiled.program.mesh

    def given(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
        if entry.kind == "scale":
            return torch.full((), scale.scale if scale else 1.0, device=device)  # no copy: it would wait for the device
        if entry.kind == "seed":
            return random.tensor(device, is_step)
        leaf = leaves[int(entry.name)].detach()
        part = local_part(leaf, of_local_batch(layout) if is_local else layout, mesh, coord)
        # Of memory that can move, the copy is in the device's queue; of other the host waits for all before it there.
        return part.to(device, non_blocking=not host.on_host(device) and leaf.is_pinned())

    return running.bound.inputs(given)
