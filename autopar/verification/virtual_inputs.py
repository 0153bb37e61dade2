"""What the steps of all ranks of a virtual mesh begin with, parts of whole values, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.capture.inputs.containers import take_call_apart
from autopar.compiler.lowered import Lowered
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Input, Program
from autopar.parallel.tensors.padding import padded_part
from autopar.runtime.executor.executor import Executable, Kernels, Outputs
from autopar.runtime.executor.inputs import Source, StepInputs, inputs_of, slots_of
from autopar.runtime.pipeline.compiled_instructions import RankCode, compile_rank
from autopar.runtime.pipeline.run_pipeline import outputs_of
from autopar.runtime.ranks.virtual import VirtualMesh
from autopar.verification.places import places_of
from autopar.verification.plain import SCALE

Whole = Callable[[Input], torch.Tensor]


def whole_inputs(
    tensors: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor
) -> Whole:
    """The whole value of each input of a step. tensors: parameters, buffers and constants by name."""
    leaves = take_call_apart(args, kwargs).leaves

    def value_of(entry: Input) -> torch.Tensor:
        if entry.kind == "batch":
            leaf = leaves[int(entry.name)]
            assert isinstance(leaf, torch.Tensor)
            return leaf
        if entry.kind == "scale":
            return torch.tensor(SCALE, device=seed.device)
        return seed if entry.kind == "seed" else tensors[entry.name]

    return value_of


def scattered(program: Program, pipeline: Pipeline | None, mesh: Mesh, every: Sequence[Whole]) -> list[StepInputs]:
    """What the step of each rank begins with. every: the whole values, or those of each place of the data axes."""

    def source(whole: Whole) -> Source:
        return lambda entry, layout, coord: padded_part(whole(entry), layout, program.mesh, coord)

    sources = [source(whole) for whole in every]
    at = places_of(mesh) if len(every) > 1 else [0] * mesh.size
    return [
        inputs_of(slots_of(program, pipeline, coord), sources[place])
        for coord, place in zip(mesh.coords(), at, strict=True)
    ]


class RankPrograms:
    """The programs of all ranks of a virtual mesh, turned into Python once for all steps that run them."""

    def __init__(self, compiled: Lowered, device: torch.device, kernels: Kernels | None) -> None:
        self.compiled, pipeline = compiled, compiled.pipeline
        self._codes: Sequence[RankCode] = ()
        self._executable: Executable | None = None
        if pipeline is None:
            self._executable = Executable(compiled.program.graph, device=device, kernels=kernels)
        else:
            self._codes = [compile_rank(pipeline, place, None, device, kernels) for place in range(pipeline.flow.size)]

    def outputs(self, every: Sequence[Whole]) -> list[Outputs]:
        """The outputs of every rank, None for those that other stages have. every: as of `scattered`."""
        mesh, program = self.compiled.mesh, self.compiled.program
        inputs = scattered(program, self.compiled.pipeline, mesh, every)
        if self._executable is not None:
            return VirtualMesh(mesh).run(self._executable, [given.values() for given in inputs])
        return [outputs_of(finals, program.outputs) for finals in VirtualMesh(mesh).run_pipeline(self._codes, inputs)]
