"""The parameters of a program, in the order of their use: what ZeRO gathers and scatters of each, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.modules import unit_of
from autopar.ir.ops.measure import local_bytes
from autopar.ir.program import CAST, Program, record


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a rank. read: bytes as the step reads it, cast to `dtype`; gradient: bytes of it, 0 of a frozen
    one. again: True if the backward pass reads it too. unit: the layer that is gathered with it (`unit_of`). place: of
    its first use, among the places where its section may be cut; at: the share of the section's time before that.
    lent: True behind the equal layers, of one that is read before them too, where the compiler keeps it. name:
    of the parameter."""

    read: int
    dtype: str
    gradient: int
    again: bool
    unit: str = ""
    place: int = 0
    at: float = 0.0
    lent: bool = False
    name: str = ""


def weights_of(program: Program) -> Mapping[fx.Node, Weight]:
    """The weights of a LOCAL program without ZeRO, by the nodes of its parameters."""
    mesh = program.mesh
    leaving = {out.name: node for node, out in program.leaving if out.kind == "gradient" and node is not None}
    weights: dict[fx.Node, Weight] = {}
    for node, entry in program.parameters():
        casts = [user for user in node.users if user.target is CAST]
        read = casts[0] if casts else node
        readers = [reader for user in node.users for reader in (user.users if user in casts else (user,))]
        known = [record(reader) for reader in readers if reader.op != "output"]
        again, unit = any(each.is_backward for each in known), next((unit_of(each.module) for each in known), "")
        gradient = local_bytes(leaving[entry.name], mesh) if entry.name in leaving else 0
        weights[node] = Weight(
            local_bytes(read, mesh), str(record(read).type.dtype), gradient, again, unit, name=entry.name
        )
    return weights


def tied_weights(
    weights: Mapping[fx.Node, Weight], before: AbstractSet[fx.Node], behind: AbstractSet[fx.Node], mesh: Mesh
) -> tuple[Mapping[fx.Node, Weight], Mapping[fx.Node, Weight]]:
    """The weights read at both ends of a model, as either end reads them: an embedding the table, a head its cast.
    before, behind: the forward calls of the ends."""
    pairs = {node: (_read_by(before, node, of, mesh), _read_by(behind, node, of, mesh)) for node, of in weights.items()}
    tied = {node: (first, last) for node, (first, last) in pairs.items() if first and last}
    return {node: first for node, (first, _) in tied.items()}, {
        node: replace(last, lent=True) for node, (_, last) in tied.items()
    }


def first_read(node: fx.Node, calls: Sequence[fx.Node]) -> int:
    """Which of some calls is the first that reads a parameter or its cast."""
    return next(i for i, call in enumerate(calls) if any(call in value.users for value in _values(node)))


def _values(node: fx.Node) -> list[fx.Node]:
    """A parameter, and its casts."""
    return [node, *(user for user in node.users if user.target is CAST)]


def _read_by(calls: AbstractSet[fx.Node], node: fx.Node, weight: Weight, mesh: Mesh) -> Weight | None:
    """A weight as some forward calls read it, and the backward calls of their lines."""
    read = next((value for value in reversed(_values(node)) if not calls.isdisjoint(value.users)), None)
    if read is None:
        return None
    known = [record(user) for user in read.users if user.op != "output"]
    own = [record(user) for user in read.users if user in calls]
    lines, unit = {(one.module, one.source) for one in own}, unit_of(own[0].module)
    again = any(one.is_backward and (one.module, one.source) in lines for one in known)
    return replace(weight, read=local_bytes(read, mesh), dtype=str(record(read).type.dtype), again=again, unit=unit)
