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
from autopar.runtime.pipeline.run_pipeline import compile_rank, outputs_of
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


def outputs_on(
    compiled: Lowered, every: Sequence[Whole], device: torch.device, kernels: Kernels | None
) -> list[Outputs]:
    """The outputs of every rank of a virtual mesh, None for those that other stages have. every: as of `scattered`."""
    mesh, program, pipeline = compiled.mesh, compiled.program, compiled.pipeline
    inputs = scattered(program, pipeline, mesh, every)
    if pipeline is None:
        executable = Executable(program.graph, device=device, kernels=kernels)
        return VirtualMesh(mesh).run(executable, [given.values() for given in inputs])
    codes = [compile_rank(pipeline, place, None, device, kernels) for place in range(pipeline.flow.size)]
    return [outputs_of(finals, program.outputs) for finals in VirtualMesh(mesh).run_pipeline(codes, inputs)]
