"""What the page shows of a pipeline only: stages of nodes, the collectives of all graphs, the timeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from autopar.compiler.lowered import Collective, Lowered, moving_nodes
from autopar.ir.pipeline import Pipeline
from autopar.passes.schedules import in_flight
from autopar.report.inspection import Memory
from autopar.report.inspection_pipeline import memory_of_rank, saved_bytes
from autopar.report.timeline.show_timeline import picture_of
from autopar.report.timeline.svg import style
from autopar.report.timeline.timeline_page import timeline_file, timeline_html


def stages_data(pipeline: Pipeline) -> dict[str, Any]:
    """The schedule, and a row for each stage."""
    rows = [
        {"rank": rank, "saved": _largest(pipeline, stage), "held": in_flight(pipeline.lists[rank], stage)}
        for stage, rank in enumerate(pipeline.flow.ranks)
    ]
    return {
        "schedule": pipeline.schedule,
        "microbatches": pipeline.microbatches,
        "parts": pipeline.parts_text,
        "rows": rows,
    }


def _largest(pipeline: Pipeline, stage: int) -> int:
    """What a micro-batch leaves on a stage, or the slice that leaves most."""
    return max(saved_bytes(pipeline, stage, i) for i in range(pipeline.flow.slices))


def stage_of_names(compiled: Lowered) -> dict[str, int]:
    """The stage of each node that one computes, and of each parameter's, by the node's name."""
    pipeline, program = compiled.pipeline, compiled.program
    if pipeline is None:
        return {}
    found = {node.name: pipeline.owners[entry.name] for node, entry in program.parameters()}
    for (stage, kind), graph in pipeline.graphs.items():
        if kind in "FBIW":
            for node in graph.calls():
                found.setdefault(node.name, stage)
    return found


def collectives_with_names(compiled: Lowered) -> Iterable[tuple[Collective, str]]:
    """All collectives of a step with the name of their node."""
    pipeline = compiled.pipeline
    graphs = [compiled.program] if pipeline is None else [one.program for one in pipeline.every_graph()]
    names = [node.name for graph in graphs for node in moving_nodes(graph)]
    return zip(compiled.collectives, names, strict=True)


def fullest(compiled: Lowered) -> tuple[Memory, int]:
    """The bytes on the rank that holds most, and its place on the axis pp."""
    assert compiled.pipeline is not None
    found = [memory_of_rank(compiled, place) for place in range(compiled.pipeline.flow.size)]
    sizes = [one.parameters + one.gradients + one.buffers + one.activations for one in found]
    place = sizes.index(max(sizes))
    return found[place], place


def timeline_of_page(compiled: Lowered) -> str:
    """The element with the timeline; empty without a pipeline."""
    return "" if compiled.pipeline is None else timeline_html(picture_of(compiled))


def timeline_style(compiled: Lowered) -> str:
    return style(picture_of(compiled))


def timeline_script() -> str:
    return timeline_file("timeline.js")
