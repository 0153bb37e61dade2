"""What a rank's step of a pipeline starts from: its inputs, whole and by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from autopar.compiler.compiled import Compiled
from autopar.ir.layout import Layout
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import MICROBATCH, PIPELINE
from autopar.ir.program import Input, record
from autopar.runtime.pipeline import Given

# The value of an input on this rank, and the part of a batch tensor at a coordinate (with its micro-batch).
ValueOf = Callable[[Input, Layout], torch.Tensor]
PartOf = Callable[[Input, Layout, Mapping[str, int]], torch.Tensor]


def pipeline_of(compiled: Compiled) -> Pipeline:
    assert compiled.pipeline is not None
    return compiled.pipeline


def given_of(compiled: Compiled, coord: Mapping[str, int], value_of: ValueOf, part_of: PartOf) -> Given:
    """What the rank at a coordinate starts from. Of parameters it has those that its stages keep."""
    pipeline, program = pipeline_of(compiled), compiled.program
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        layout = record(node).layout
        if entry.kind == "batch":
            places = range(pipeline.microbatches)
            parts[node.name] = [part_of(entry, layout, {**coord, MICROBATCH: place}) for place in places]
        elif entry.kind != "parameter" or pipeline.rank_of(entry.name) == coord.get(PIPELINE, 0):
            whole[node.name] = value_of(entry, layout)
    return Given(whole, parts)
