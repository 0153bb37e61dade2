"""A compiled program as one HTML page that needs nothing else: data as packed JSON, style and script inline."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

from torch import fx

from autopar.compiler.lowered import Collective, Lowered, moving_nodes
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.names import dtype_name
from autopar.ir.pipeline import Pipeline
from autopar.ir.program import Program, record
from autopar.ir.text.text import diffs, print_program, print_result
from autopar.passes.schedules import in_flight
from autopar.report.inspection import Memory, memory_of
from autopar.report.inspection_pipeline import memory_of_rank, saved_bytes
from autopar.report.timeline.show_timeline import picture_of
from autopar.report.timeline.svg import style
from autopar.report.timeline.timeline_page import timeline_file, timeline_html

STYLE, SCRIPT = "/* STYLE */", "/* SCRIPT */"  # in page.html
SCRIPTS = ("base.js", "tree.js", "panel.js", "tables.js", "passes.js", "search.js", "frame.js")  # one script, in order
TITLE, DATA, DIFFS, TIMELINE = "TITLE", "DATA", "DIFFS", "TIMELINE"
SEPARATOR = "   # "  # before the comment of a line


def page_text(compiled: Lowered, title: str) -> str:
    """The whole page. It opens from a file, asks no network for anything and runs in any browser since 2023."""
    style, script, pipeline = _file("style.css"), "\n".join(map(_file, SCRIPTS)), compiled.pipeline
    if pipeline is not None:
        style, script = style + timeline_style(compiled), script + timeline_script()
    page = _file("page.html").replace(STYLE, style).replace(SCRIPT, script)
    escaped = title.replace("&", "&amp;").replace("<", "&lt;")
    # In columns alike stands beside alike: a fifth of the nodes' bytes.
    found = page_data(compiled, title)
    found["nodes"] = list(zip(*found["nodes"], strict=True))
    head, _, tail = page.partition(f"{{{DATA}}}")
    head = head.replace(f"{{{TITLE}}}", escaped).replace(f"{{{TIMELINE}}}", timeline_of_page(compiled))
    return head + _packed(found) + tail.replace(f"{{{DIFFS}}}", _packed(list(_passes(compiled))))


def _packed(data: Any) -> str:
    """What the browser unpacks. Passes of eighty equal layers say eighty times the same: a twentieth is left.
    No text ends the element that it stands in."""
    return base64.b64encode(gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)).decode()


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def page_data(compiled: Lowered, title: str) -> dict[str, Any]:
    """All that the page shows. Nodes are rows, so that thousands of them stay small."""
    program, pipeline = compiled.program, compiled.pipeline
    memory, place = (memory_of(program), None) if pipeline is None else fullest(compiled)
    words = _Words()
    places = {node.name: i for i, node in enumerate(program.graph.nodes)}
    stages = stage_of_names(compiled)
    mesh = [*compiled.mesh.axes, *(axis for axis in program.mesh.axes if axis[0] not in compiled.mesh)]
    return {
        "title": title,
        "mesh": [list(axis) for axis in mesh],
        "ranks": compiled.mesh.size,
        "notes": list(program.notes),
        "memory": {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "buffers": memory.buffers,
            "activations": memory.activations,
        },
        "fullest": place,
        "pipeline": None if pipeline is None else stages_data(pipeline),
        "nodes": [[*row, stages.get(row[0], -1)] for row in _nodes(program, words)],
        "collectives": [
            {"op": row.op, "axis": row.axis, "bytes": row.bytes * row.times, "shape": row.shape, "value": row.value,
             "module": row.module, "source": row.source, "reason": row.reason, "phase": row.phase,
             "dtype": dtype_name(row.dtype), "node": places.get(name, -1), "graph": row.graph, "place": row.place,
             "times": row.times}
            for row, name in collectives_with_names(compiled)
        ],
        "inputs": list(_inputs(program)),
        "passes": len(compiled.history) - 1,
        "words": list(words.numbers),
    }  # fmt: skip


class _Words:
    """Texts that come back often, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _nodes(program: Program, words: _Words) -> Iterator[list[Any]]:
    """[name, types, right side, module, source, phase, pass, reason, global shape, layout] of each node in order."""
    lines = print_program(program).split("\n")[1 + len(program.notes) :]
    inputs = iter(program.inputs)
    for node, line in zip(program.graph.nodes, lines, strict=False):
        if node.op == "output":
            return
        known = record(node)
        types = print_result(known, program.level, program.mesh)
        right = line[len(f"%{node.name}: {types} = ") :]
        module = known.module
        if node.op == "placeholder":
            entry = next(inputs)
            right = entry.kind
            module = entry.name.rpartition(".")[0] if entry.kind in ("parameter", "buffer") else ""
        else:
            right = right.partition(SEPARATOR)[0]
        if known.made_by == "bucket" and len(known.types) == 1 and not known.origin:
            module = ""  # a bucket is of the whole model, not of its first gradient's module
        yield [
            node.name, types, right, words(module), words(known.source), words(known.phase), words(known.made_by),
            known.reason, *_placed(node),
        ]  # fmt: skip


def _placed(node: fx.Node) -> tuple[tuple[int, ...] | None, str]:
    """The global shape and the layout of a node with one tensor as its result."""
    known = record(node)
    if not known.is_tensor or not known.layouts:
        return None, ""
    return known.type.shape, str(known.layout)


def _inputs(program: Program) -> Iterator[dict[str, Any]]:
    places = {node: i for i, node in enumerate(program.graph.nodes)}
    for node, entry in program.entries:
        known = record(node)
        if not known.is_tensor:
            continue
        local = local_type(node, program.mesh)
        yield {
            "names": entry.names,
            "kind": entry.kind,
            "dtype": dtype_name(known.type.dtype),
            "shape": known.type.shape,
            "layout": str(known.layout),
            "local": local.shape,
            "bytes": local.bytes_,
            "whole": known.type.bytes_,
            "node": places[node],
        }


def _passes(compiled: Lowered) -> Iterator[dict[str, Any]]:
    """What each pass changed, as the lines of `autopar inspect --diff`."""
    names, programs = zip(*compiled.history, strict=True)
    for name, after, text in zip(names[1:], programs[1:], diffs(programs), strict=True):
        lines = text.split("\n")[:-1]  # a name may hold what `splitlines` splits at
        yield {"name": name, "level": after.level.name, "nodes": len(after.graph.nodes), "lines": lines}


# -- stages -----------------------------------------------------------------------------------------------------------


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
