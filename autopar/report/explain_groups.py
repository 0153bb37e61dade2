"""What `explain` says of groups: which one computes a value, what it saves, and why it ends where it ends."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.compiler.lowered import Lowered
from autopar.ir.ops.fused import Fused, fused_of
from autopar.ir.pipeline import graph_name
from autopar.ir.program import record
from autopar.ir.text.text import print_result


def _groups(compiled: Lowered) -> Iterator[tuple[str, fx.Node, Fused]]:
    """The groups of all graphs, each with the name of its graph ("" if there is one graph)."""
    pipeline = compiled.pipeline
    graphs = (
        {"": compiled.program}
        if pipeline is None
        else {graph_name(*key): graph for key, graph in pipeline.graphs.items()}
    )
    for name, program in graphs.items():
        for node in program.calls():
            fused = fused_of(node)
            if fused is not None:
                yield name, node, fused


def group_head(compiled: Lowered, name: str) -> tuple[str, tuple[str, ...]] | None:
    """What a group of this name is, and what it saves; None if there is none."""
    for graph, node, fused in _groups(compiled):
        if node.name == name:
            known = record(node)
            result = print_result(known, compiled.program.level, fused.mesh)
            calls = ", ".join(f"%{call.name}" for call in fused.calls)
            head = f"group %{name}: one kernel of kind {fused.kind} for {calls}\n  {result}"
            return head, (_said(graph, node),)
    return None


def groups_with(compiled: Lowered, value: str) -> tuple[str, ...]:
    """The groups that compute a value: one, or several that compute it again."""
    return tuple(
        f"%{node.name}, {_said(graph, node)}"
        for graph, node, fused in _groups(compiled)
        if any(call.name == value for call in fused.calls)
    )


def groups_within(compiled: Lowered, path: str) -> tuple[str, ...]:
    """The groups that begin in a module."""
    return tuple(
        f"%{node.name}, {_said(graph, node)}"
        for graph, node, _ in _groups(compiled)
        if record(node).module == path or record(node).module.startswith(f"{path}.")
    )


def _said(graph: str, node: fx.Node) -> str:
    return f"in {graph}: {record(node).reason}" if graph else record(node).reason
