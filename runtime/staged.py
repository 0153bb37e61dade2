"""Inputs of a pipelined step: parameters once, batch tensors a micro-batch each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autopar.ir.layout import Layout
from autopar.ir.mesh import MICROBATCH, PIPELINE
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Input, Program, record
from autopar.runtime.pipeline import Given

# The value of an input on this rank, and the part of a batch tensor at a coordinate (with its micro-batch).
ValueOf = Callable[[Input, Layout], torch.Tensor]
PartOf = Callable[[Input, Layout, Mapping[str, int]], torch.Tensor]


def given_of(
    program: Program, pipeline: Pipeline, coord: Mapping[str, int], value_of: ValueOf, part_of: PartOf
) -> Given:
    """What the rank at a coordinate starts from. Of parameters it has those that its stages keep.

    program: the whole step, which `pipeline` was cut of.
    """
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    for node, entry in program.entries:
        layout = record(node).layout
        if entry.kind == "batch":
            places = range(pipeline.microbatches)
            parts[node.name] = [part_of(entry, layout, {**coord, MICROBATCH: place}) for place in places]
        elif entry.kind != "parameter" or pipeline.rank_of(entry.name) == coord.get(PIPELINE, 0):
            whole[node.name] = value_of(entry, layout)
    return Given(whole, parts)
