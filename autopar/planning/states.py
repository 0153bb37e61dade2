"""The bytes that a rank holds of a step, read off its programs: parameters, gradients, states, activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.measure import local_bytes
from autopar.ir.program import CAST, Program, is_getitem, is_view, record, root_of
from autopar.planning.depth import Rest

MOMENTS = 2  # of AdamW, in the dtype of the parameter


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes. entry: the part of the parameters that the forward pass reads before the equal layers. copies: of what is
    made of parameters once a step (casts). plain: of parameters that are read as they are. saved: of one micro-batch,
    from its forward to its backward pass. others: what is alive beside all of that at the worst moment."""

    parameters: float
    entry: float
    gradients: float
    states: float
    copies: float
    plain: float
    saved: float
    others: float


def held(program: Program, graphs: Mapping[str, Program], rest: Rest) -> Held:
    """With one micro-batch under way. program: LOCAL. graphs: of a rank's actions, by kind. rest: what counts."""
    mesh = program.mesh
    stored = {entry.name: local_bytes(node, mesh) for node, entry in program.parameters() if rest.has(entry.name)}
    gradients = sum(
        local_bytes(node, mesh)
        for node, out in program.leaving
        if out.kind == "gradient" and node is not None and rest.has(out.name)
    )
    copies = _bytes(graphs["P"], filter(rest.counts, _leaving(graphs["P"], "step"))) if "P" in graphs else 0
    saved = _bytes(graphs["F"], filter(rest.counts, _leaving(graphs["F"], "saved")))
    read = {entry.name for kind in graphs if kind in "FBIW" for _, entry in graphs[kind].parameters()}
    others = max(_peak(graph, rest) for kind, graph in graphs.items() if kind in "FBIW")
    parameters = sum(stored.values())
    return Held(
        parameters, sum(stored[name] for name in _entry(program, rest) if name in stored), gradients,
        MOMENTS * parameters, copies, sum(stored[name] for name in read if name in stored), saved, others,
    )  # fmt: skip


def _entry(program: Program, rest: Rest) -> Iterator[str]:
    """The parameters that nothing in the forward pass reads but what comes before the first of the equal layers."""
    place = {node: i for i, node in enumerate(program.calls())}
    first = min((i for node, i in place.items() if rest.first and rest.layer(node) == rest.first), default=0)
    for node, entry in program.parameters():
        readers = [reader for user in node.users for reader in ([user] if user.target is not CAST else user.users)]
        places = [place[reader] for reader in readers if reader in place and not record(reader).is_backward]
        if places and max(places) < first:
            yield entry.name


def _leaving(program: Program, kind: str) -> list[fx.Node]:
    return [node for node, out in program.leaving if out.kind == kind and node is not None]


def _bytes(program: Program, nodes: Iterable[fx.Node]) -> int:
    """Of what some values lie in, but for what was there before."""
    roots = {root_of(node) for node in nodes}
    return sum(local_bytes(root, program.mesh) for root in roots if root.op == "call_function")


def _peak(program: Program, rest: Rest) -> int:
    """The most bytes of a graph's own values that are alive at once, beside those that it leaves."""
    leaving = {root_of(node) for node in program.results if node is not None}
    own = {
        node: local_bytes(node, program.mesh)
        for node in program.calls()
        if not is_getitem(node) and not is_view(node) and node not in leaving and rest.counts(node)
    }
    last: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        last.update(dict.fromkeys(map(root_of, node.all_input_nodes), node))
    dying: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        dying.setdefault(user, []).append(node)
    alive = most = 0
    for node in program.calls():
        alive += own.get(node, 0)
        most = max(most, alive)
        alive -= sum(own.get(gone, 0) for gone in dying.get(node, ()))
    return most
