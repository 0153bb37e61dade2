"""What a rank has before a step, without data: parameters, buffers, constants and the batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from autopar.compiler.lowered import Lowered
from autopar.ir.layout import Layout, local_part, local_shape
from autopar.ir.mesh import PIPELINE
from autopar.ir.program import Input, record
from autopar.report.memory.report import INPUTS, PARAMETERS
from autopar.report.memory.track import Tracker
from autopar.runtime.executor.inputs import StepInputs, inputs_of, slots_of

_KINDS = {"parameter": PARAMETERS}


class StateBefore:
    """Tensors of the right sizes, made and named for a tracker that watches. Of a parameter of other stages there is
    nothing."""

    def __init__(self, compiled: Lowered, coord: Mapping[str, int], device: torch.device, tracker: Tracker) -> None:
        self.program, self.device = compiled.program, device
        self.slots = slots_of(compiled.program, compiled.pipeline, coord)
        self.parameters: dict[str, torch.Tensor] = {}
        self.held: dict[str, torch.Tensor] = {}
        owners, here = compiled.owners, (None, coord.get(PIPELINE, 0))
        for node, entry in self.program.entries:
            known = record(node)
            shape, dtype = known.type.shape, known.type.dtype
            if entry.kind == "parameter":
                is_here = owners[entry.name] in here
                shape = local_shape(shape, known.layout, self.program.mesh) if is_here else (0,) * len(shape)
                part = torch.empty(shape, dtype=dtype, device=device)
                made: torch.Tensor = nn.Parameter(part, requires_grad=dtype.is_floating_point)
                self.parameters[entry.name] = made
            elif entry.kind == "seed":
                continue  # made anew for each step
            else:
                made = self.held[_key(entry)] = torch.empty(shape, dtype=dtype, device=device)
            name = entry.name if entry.kind != "batch" else f"argument {entry.name}"
            tracker.tell([made], _KINDS.get(entry.kind, INPUTS), name)

    def inputs(self) -> StepInputs:
        """What a step begins with, as of a parallel module (`parallel/stepping.py`)."""

        def value_of(entry: Input, layout: Layout, coord: Mapping[str, int]) -> torch.Tensor:
            if entry.kind == "parameter":
                return self.parameters[entry.name].detach()
            if entry.kind == "seed":
                return torch.zeros(2, dtype=torch.int64, device=self.device)
            value = self.held[_key(entry)]
            return local_part(value, layout, self.program.mesh, coord) if entry.kind == "batch" else value

        return inputs_of(self.slots, value_of)


def _key(entry: Input) -> str:
    return f"{entry.kind} {entry.name}"
