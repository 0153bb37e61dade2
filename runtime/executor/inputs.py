"""What a rank's step begins with: a tensor for each input of its program, of the batch one for each micro-batch.

Every way to run a program takes the same: a source says what an input is on a rank, `slots_of` which ones it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from autopar.ir.layout import Layout
from autopar.ir.mesh import PIPELINE
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Input, Program, record
from autopar.ir.schedule import ONCE

Key = tuple[str, int]  # a value and its micro-batch, or ONCE
StepInputs = Mapping[Key, torch.Tensor]  # in the order of the placeholders
# The value of an input in a layout at a coordinate; of a batch tensor the coordinate has a micro-batch.
Source = Callable[[Input, Layout, Mapping[str, int]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor that a step begins with: of an input, at a coordinate with its micro-batch and slice."""

    key: Key
    entry: Input
    layout: Layout
    coord: Mapping[str, int]


def slots_of(program: Program, pipeline: Pipeline | None, coord: Mapping[str, int]) -> tuple[Slot, ...]:
    """What the rank at a coordinate needs. Of parameters it has those that its stages keep.

    program: the whole step, which `pipeline` was cut of.
    """
    slots = []
    for node, entry in program.entries:
        layout = record(node).layout
        if pipeline is None:
            slots.append(Slot((node.name, ONCE), entry, layout, coord))
        elif entry.kind == "batch":
            places = [{**coord, **place} for place in pipeline.time.coords()]
            slots += [Slot((node.name, i), entry, layout, place) for i, place in enumerate(places)]
        elif entry.kind != "parameter" or pipeline.rank_of(entry.name) == coord.get(PIPELINE, 0):
            slots.append(Slot((node.name, ONCE), entry, layout, {**coord, **dict.fromkeys(pipeline.time.names, 0)}))
    return tuple(slots)


def inputs_of(slots: tuple[Slot, ...], source: Source) -> StepInputs:
    """The tensors of a step, from a source."""
    return {slot.key: source(slot.entry, slot.layout, slot.coord) for slot in slots}
