"""Find the first node of a program whose value is not that of the captured program."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import fx

from autopar.capture.data.casts import default_dtype
from autopar.compiler.lowered import Lowered
from autopar.ir.layout import combine, replica_error
from autopar.ir.mesh import Mesh
from autopar.ir.ops.unfused import unfused
from autopar.ir.program import Program, Record, operand_nodes, record
from autopar.parallel.tensors.padding import beginning
from autopar.runtime.executor.executor import Executable
from autopar.runtime.ranks.virtual import VirtualMesh
from autopar.verification.judge.comparison import ZERO, Mismatch, error_of, norm_of
from autopar.verification.virtual_inputs import Whole, scattered

Parts = dict[fx.Node, list[torch.Tensor]]  # of a node, by rank


def locate(
    captured: Program, compiled: Lowered, whole: Whole, tolerance: float, dtype: torch.dtype, device: torch.device
) -> Mismatch:
    """Run the captured and the final program side by side; the first node whose value differs.

    whole: the inputs. dtype: that floats without one have. Micro-batches run side by side, so that what is cut
    afterwards shows in no node.
    """
    graph = unfused(compiled.program.graph).graph  # calls of groups one by one
    final = compiled.program.with_(graph=graph, mesh=Mesh(compiled.program.mesh.axes))  # slices all of mean length
    with default_dtype(dtype):
        expected = _values(captured, whole, device)
    with default_dtype(dtype):
        parts = _parts(final, whole, expected, device)
    leaving = {(out.kind, out.name): expected[node.name] for node, out in captured.leaving if node}
    mismatch = _wrong_value(final, parts, expected, tolerance, norm_of(leaving, "gradient")) or _wrong_layout(final)
    if mismatch is not None:
        return mismatch
    text = "every node agrees with the captured program: the captured program itself differs from the plain module"
    if compiled.pipeline is not None:
        text += ", or the pipeline from the program that was cut"
    return Mismatch("", "capture", "", "", float("nan"), text)


def _values(captured: Program, whole: Whole, device: torch.device) -> dict[str, torch.Tensor]:
    """The value of every node on one device, by name."""
    values: dict[str, torch.Tensor] = {}

    def keep(_rank: int, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            values[node.name] = value

    inputs = [whole(entry) for entry in captured.inputs]
    VirtualMesh(Mesh(())).run(Executable(captured.graph, device=device), [inputs], keep)
    return values


def _parts(final: Program, whole: Whole, expected: Mapping[str, torch.Tensor], device: torch.device) -> Parts:
    """The values of all ranks of the nodes that stand for an expected one."""
    parts: Parts = {}

    def collect(rank: int, node: fx.Node, value: Any) -> None:
        known = record(node)
        if isinstance(value, torch.Tensor) and known.origin in expected and not known.layout.owned:  # compared at home
            parts.setdefault(node, [None] * final.mesh.size)[rank] = value  # type: ignore[list-item]

    inputs = [given.values() for given in scattered(final, None, final.mesh, [whole])]
    with suppress(RuntimeError):  # the values up to there say enough
        VirtualMesh(final.mesh).run(Executable(final.graph, device=device), inputs, collect)
    return parts


def _wrong_value(
    final: Program, parts: Parts, expected: Mapping[str, torch.Tensor], tolerance: float, gradients: float
) -> Mismatch | None:
    """The first node whose value is off. gradients: the norm of all, the measure of the backward pass."""
    for node in final.graph.nodes:
        if node not in parts or any(part is None for part in parts[node]):
            continue
        known = record(node)
        origins = [record(operand).origin for operand in operand_nodes(node)]
        norms = [norm_of({("node", origin): expected[origin]}, "node") for origin in origins if origin in expected]
        floor = ZERO["node"] * max(norms, default=0.0)
        if known.is_backward:
            floor = max(floor, ZERO["gradient"] * gradients)
        error = _error(parts[node], known, final.mesh, expected[known.origin], floor)
        if not error <= tolerance:
            return Mismatch(node.name, known.made_by, known.module, known.source, error, node.format_node() or "")
    return None


def _wrong_layout(final: Program) -> Mismatch | None:
    """The first output that leaves in another layout than it should."""
    wanted = record(final.graph.output_node()).operands
    for node, out, layout in zip(final.results, final.outputs, wanted, strict=True):
        if node is not None and record(node).layout != layout:
            known = record(node)
            text = f"it is in {known.layout}, but leaves as the {out.kind} '{out.name}' in {layout}: no collective"
            return Mismatch(node.name, known.made_by, known.module, known.source, float("inf"), text)
    return None


def _error(parts: list[torch.Tensor], known: Record, mesh: Mesh, value: torch.Tensor, floor: float) -> float:
    whole = beginning(combine(parts, known.layout, mesh), value.shape)
    if whole.shape != value.shape:
        return float("inf")
    return max(error_of(whole, value, floor), replica_error(parts, known.layout, mesh))
