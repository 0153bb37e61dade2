"""Run a program of a parallel module on a batch: what this rank holds and was given becomes the inputs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from autopar.parallel.loss_scale import give_gradients
from autopar.parallel.session import Session
from autopar.runtime.inputs import StepInputs, inputs_of


def train_step(session: Session, running: Running, parts: Parts) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """Run a training program: gradients are added to `.grad`, buffers are written. The loss, and all outputs."""
    outputs = run_step(session, running, parts)
    session.random.steps += 1
    gradients: dict[str, torch.Tensor | None] = {}
    for out, value in zip(running.compiled.program.outputs, outputs, strict=True):
        if out.kind == "loss":
            loss = value
        elif out.kind == "gradient":
            gradients[out.name] = running.owners.taken(out.name, value)
        elif out.kind == "buffer":
            running.owners.set_buffer(out.name, value)
    give_gradients(running.owners.parameters(), gradients, session.scale, session.settings.device)
    session.announcer.stepped()
    return finished(loss), outputs


def forward_step(session: Session, running: Running, parts: Parts) -> Any:
    """Run a forward program: buffers are written. What the model returns, which refuses a backward pass."""
    outputs = run_step(session, running, parts)
    for out, value in zip(running.compiled.program.outputs, outputs, strict=True):
        if out.kind == "buffer":
            running.owners.set_buffer(out.name, value)
    return running.captured.result(guarded(outputs, parts.leaves, running.owners.parameters().values()))


def run_step(session: Session, running: Running, parts: Parts) -> tuple[torch.Tensor, ...]:
    """The outputs of this rank. Raises OtherValues if the program was specialised to other values than this batch has,
    before anything is changed."""
    for i, tensor in parts.tensors():
        if fake_like(tensor):
            where = "is on the meta device, where nothing has data"
            raise BatchError(f"{parts.paths[i]} {where}: only prepare() can take it.")
    with default_dtype(session.settings.lift):
        outputs = running.run(_inputs(session, running, parts.leaves))
    pairs = zip(running.compiled.program.outputs, outputs, strict=True)
    check_reads(running.captured.reads, [value for out, value in pairs if out.kind == "guard"])
    return outputs


def _inputs(session: Session, running: Running, leaves: Sequence[Any]) -> StepInputs:
    device, is_local = session.settings.device, session.settings.is_local
    random, scale, mesh = session.random, session.scale, running.compiled.program.mesh

    def value_of(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
        if entry.kind == "parameter":
            return running.owners.given(entry.name, layout)
        if entry.kind == "buffer":
            return running.owners.buffer(entry.name)
        if entry.kind == "constant":
            return running.constants[entry.name]
        if entry.kind == "scale":
            return torch.tensor(scale.scale if scale else 1.0, device=device)
        if entry.kind == "seed":
            return torch.tensor([random.seed, random.steps], device=device)
        leaf = leaves[int(entry.name)].detach()
        part = local_part(leaf, of_local_batch(layout) if is_local else layout, mesh, coord)
        # Of memory that can move, the copy is in the device's queue; of other the host waits for all before it there.
        return part.to(device, non_blocking=device.type != "cpu" and leaf.is_pinned())

    return inputs_of(running.slots, value_of)
