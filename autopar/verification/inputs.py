"""What the steps of all ranks of a virtual mesh begin with: parts of whole values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar.capture.containers import take_call_apart
from autopar.ir.mesh import Mesh
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Input, Program
from autopar.parallel.padding import padded_part
from autopar.runtime.inputs import Source, StepInputs, inputs_of, slots_of
from autopar.verification.places import places_of
from autopar.verification.reference import SCALE

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
