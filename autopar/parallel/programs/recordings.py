"""Run a rank's program as a recording, or say why it cannot be one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar.compiler.check_options import Graphs
from autopar.compiler.lowered import Lowered
from autopar.errors import CompileError
from autopar.ir.layout import padded_shape
from autopar.ir.ops.ops import op
from autopar.ir.program import Program
from autopar.runtime.compilers.cuda_graphs import CudaGraph, DryGraph, GraphRunner, RecordedGraph
from autopar.runtime.executor.executor import describe
from autopar.runtime.executor.inputs import Slot
from autopar.runtime.ranks.runner import Runner

_READING = frozenset({op("ctc_loss"), op("ctc_loss_backward")})  # torch's kernels take the lengths from the host


class Recordings:
    """Makes the recordings of one parallel module. wanted: as of `parallelize`."""

    def __init__(self, wanted: Graphs, device: torch.device) -> None:
        self._wanted, self._device = wanted, device
        self._pool: Any = None

    def of(
        self, runner: Runner, compiled: Lowered, slots: Sequence[Slot], parameters: Mapping[str, nn.Parameter]
    ) -> Runner:
        """The same program as a recording, if the user wants one. Raises CompileError if it cannot be recorded."""
        if not self._wanted:
            return runner
        _check(compiled)
        copied = {slot.key for slot in slots if _is_made_anew(slot, compiled.program, parameters)}
        name = f"the program on mesh {compiled.mesh} ({len(compiled.program.graph.nodes)} nodes)"
        return GraphRunner(runner, self._empty, {slot.key: slot.entry for slot in slots}, copied, name)

    def _empty(self) -> RecordedGraph:
        if self._wanted == "dry-run":
            return DryGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self._pool, self._device)


def _is_made_anew(slot: Slot, program: Program, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether an input is made at each step of what the user has: with zeros behind it, or of a Python number. The same
    on all ranks."""
    if slot.entry.kind == "parameter":
        shape = tuple(parameters[slot.entry.name].shape)
        return padded_shape(shape, slot.layout, program.mesh) != shape
    return slot.entry.kind == "constant" and not slot.layout.dims


def _check(compiled: Lowered) -> None:
    """Raise CompileError for a step that waits for its device, or moves messages, while it runs."""
    if compiled.pipeline is not None:
        raise CompileError(
            f"cuda_graphs records steps of one graph; this one is a pipeline (mesh {compiled.mesh}, "
            f"{compiled.pipeline.parts_text}), whose messages are events of the host. Leave "
            f"cuda_graphs out, or pp and microbatches."
        )
    program = compiled.program
    if any(out.kind == "guard" for out in program.outputs):
        raise CompileError(
            "cuda_graphs keeps the host from waiting for the GPU, and specialize=True lets it read values of the batch "
            "at every step: leave out one of the two."
        )
    reading = next((node for node in program.calls() if node.target in _READING), None)
    if reading is not None:
        raise CompileError(
            f"cuda_graphs cannot record {describe(reading)}\n"
            f"  It takes its lengths from the host, which a recording would freeze. Leave cuda_graphs out."
        )
