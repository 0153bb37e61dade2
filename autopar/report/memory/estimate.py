"""From what a simulated rank held to a report: categories, the peak and its place, the timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from autopar.compiler.lowered import Lowered
from autopar.errors import PlanError, RankError, one_of
from autopar.ir.mesh import PIPELINE
from autopar.ir.ops.ops import AWAITED, TO_DEVICE, TO_HOST, is_collective
from autopar.ir.ops.storage import is_view
from autopar.ir.program import Program, is_getitem, record
from autopar.report.memory.assumed_rows import RowCounts, routes_rows
from autopar.report.memory.known_results import KnownResults
from autopar.report.memory.position import BETWEEN, OPTIMIZER, RankPosition
from autopar.report.memory.report import (
    ACTIVATIONS,
    CATEGORIES,
    COLLECTIVES,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    HeldValue,
    MemoryReport,
    Moment,
)
from autopar.report.memory.simulate_rank import CPU_DEVICE, GPU_DEVICE, OptimizerMaker, Trace, simulate
from autopar.report.memory.track import StorageBlock
from autopar.runtime.tiers.host_buffers import host_bytes

LARGEST = 12  # values of a report


def memory_report(
    compiled: Lowered, rank: int = 0, optimizer: OptimizerMaker | None = None, device: str | None = None,
    counts: RowCounts | None = None, known: KnownResults | None = None,
) -> MemoryReport:  # fmt: skip
    """What a rank holds, without running anything on data. Raises RankError for a rank that the mesh has not.

    optimizer: makes one from the parameters; AdamW if not given. device: "cpu" or "cuda"; by default that for which
    the program was compiled. counts: of the rows that go to experts; by default their mean, and beside it the worst.
    known: results of ops, where several reports share them.
    """
    if not 0 <= rank < compiled.mesh.size:
        raise RankError(f"there is no rank {rank}: mesh '{compiled.mesh}' has ranks 0 to {compiled.mesh.size - 1}.")
    if device is None:
        device = CPU_DEVICE if compiled.plan.fixed.machine.is_host else GPU_DEVICE
    if device not in (CPU_DEVICE, GPU_DEVICE):
        raise PlanError(f"memory on device {device!r}: write {one_of((CPU_DEVICE, GPU_DEVICE))}.")
    make, known = optimizer or torch.optim.AdamW, known or KnownResults()
    report = _report(compiled, rank, simulate(compiled, rank, make, device, counts=counts, known=known), device)
    if counts is not None or not routes_rows(compiled.program):
        return report
    worst = RowCounts(compiled.plan.layout_mesh, compiled.mesh.coord(rank), worst=True)
    trace = simulate(compiled, rank, make, device, counts=worst, known=known)
    return replace(report, worst=max(report.peak, trace.tracker.peak_bytes(trace.start)))


def _report(compiled: Lowered, rank: int, trace: Trace, device: str) -> MemoryReport:
    tracker, coord = trace.tracker, compiled.mesh.coord(rank)
    timeline = tuple(_moments(trace))
    at = max(tracker.peak(trace.start), trace.start - 1)
    category = _Categories(compiled, trace)
    alive = tracker.alive(at)
    found = dict.fromkeys(CATEGORIES, 0)
    for block in alive:
        found[category.of(block)] += block.bytes
    states = dict.fromkeys((PARAMETERS, GRADIENTS, STATES, INPUTS), 0)
    for block in tracker.alive(trace.start - 1):
        states[category.of(block)] = states.get(category.of(block), 0) + block.bytes
    states[GRADIENTS] = sum(block.bytes for block in dict.fromkeys(trace.gradients))
    pipeline = compiled.pipeline
    return MemoryReport(
        rank=rank,
        coord=coord,
        stages=pipeline.stages_of(coord.get(PIPELINE, 0)) if pipeline is not None else (),
        device=device,
        optimizer_name=trace.optimizer_name,
        peak=tracker.events[at].total,
        place=_moment(tracker.events[at].place, 0, 0),
        categories=found,
        states=states,
        step=tracker.peak_bytes(trace.start, trace.optimizer),
        optimizer=tracker.peak_bytes(trace.optimizer),
        largest=tuple(_value(block, category.of(block)) for block in _largest(alive)),
        timeline=timeline,
        host=host_bytes(compiled.program, pipeline, coord.get(PIPELINE, 0)) + trace.host_states,
        disk=trace.disk_states,
    )


class _Categories:
    """What each block is for. A gradient on its way to be reduced is one too; what holds several on their way is a
    collective's."""

    def __init__(self, compiled: Lowered, trace: Trace) -> None:
        self.gradients, self.saved = set(trace.gradients), trace.saved
        pipeline = compiled.pipeline
        self.is_staged = pipeline is not None
        programs = [compiled.program] if pipeline is None else [one.program for one in pipeline.every_graph()]
        self.of_gradients = {node for program in programs for node in _gradients(program)}

    def of(self, block: StorageBlock) -> str:
        place: RankPosition | None = block.place
        if block.kind:
            return block.kind
        if block in self.gradients:
            return GRADIENTS
        node = place.node if place is not None else None
        if node is not None and node.target is TO_DEVICE and node.all_input_nodes[0].op == "placeholder":
            return TEMPORARIES if self.is_staged else PARAMETERS  # of a stage it is what the forward pass left
        if node is not None and is_collective(node.target):
            return ACTIVATIONS if block in self.saved else COLLECTIVES
        if node in self.of_gradients:
            return COLLECTIVES if _is_joined(node) else GRADIENTS
        if block in self.saved:
            return ACTIVATIONS
        received = node is None and place is not None and place.graph == BETWEEN and place.action.startswith("RECV")
        return COLLECTIVES if received else TEMPORARIES


def _gradients(program: Program) -> Iterator[fx.Node]:
    """The nodes whose values are parameters' gradients before or after they are reduced, and in what they move."""
    wanted = [
        node
        for node, out in program.leaving
        if node is not None and (out.kind == "gradient" or (out.kind == "part" and record(node).is_backward))
    ]
    seen: set[fx.Node] = set()
    while wanted:
        node = wanted.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        yield node
        is_moved = is_collective(node.target) or node.target in (TO_HOST, AWAITED)
        if is_moved or is_view(node) or is_getitem(node) or _is_joined(node):
            wanted += node.all_input_nodes


def _is_joined(node: fx.Node | None) -> bool:
    """True for what a pass laid side by side, to move it at once."""
    return node is not None and node.target is torch.ops.aten.cat.default and record(node).made_by != "capture"


def _moments(trace: Trace) -> Iterator[Moment]:
    """The events of each place in a row, as one."""
    events, place, peak, after = trace.tracker.events, None, 0, 0
    for event in events[trace.start :]:
        if event.place != place and place is not None:
            yield _moment(place, peak, after)
            peak = after
        place, after, peak = event.place, event.total, max(peak, event.total)
    if place is not None:
        yield _moment(place, peak, after)


def _moment(place: RankPosition | None, peak: int, after: int) -> Moment:
    if place is None:
        return Moment("before the step", "", "", "", "", "", peak, after)
    node = place.node
    if node is None:
        return Moment(place.graph, place.action, "", "", "", OPTIMIZER if place.graph == OPTIMIZER else "", peak, after)
    known = record(node)
    return Moment(place.graph, place.action, node.name, known.module, known.source, known.phase, peak, after)


def _largest(alive: list[StorageBlock]) -> list[StorageBlock]:
    return sorted(alive, key=lambda block: (-block.bytes, block.born))[:LARGEST]


def _value(block: StorageBlock, category: str) -> HeldValue:
    place: RankPosition | None = block.place
    if block.name or place is None or place.node is None:
        return HeldValue(block.bytes, category, block.name or (place.graph if place is not None else ""))
    known = record(place.node)
    return HeldValue(block.bytes, category, f"%{place.node.name}", known.module, known.source)
