"""The parameters of a program, in the order of their use: what ZeRO gathers and scatters of each, and where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.measure import local_bytes
from autopar.ir.modules import unit_of
from autopar.ir.program import CAST, Program, record


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of a rank. read: bytes as the step reads it, cast to `dtype`; gradient: bytes of it, 0 of a frozen
    one. again: True if the backward pass reads it too. unit: the layer that is gathered with it (`unit_of`). place: of
    its first use, among the places where its section may be cut; at: the share of the section's time before that."""

    read: int
    dtype: str
    gradient: int
    again: bool
    unit: str = ""
    place: int = 0
    at: float = 0.0


def weights_of(program: Program) -> Mapping[fx.Node, Weight]:
    """Those of a LOCAL program without ZeRO, by the nodes of its parameters."""
    mesh = program.mesh
    leaving = {out.name: node for node, out in program.leaving if out.kind == "gradient" and node is not None}
    found: dict[fx.Node, Weight] = {}
    for node, entry in program.parameters():
        casts = [user for user in node.users if user.target is CAST]
        read = casts[0] if casts else node
        readers = [reader for user in node.users for reader in (user.users if user in casts else (user,))]
        known = [record(reader) for reader in readers if reader.op != "output"]
        again, unit = any(each.is_backward for each in known), next((unit_of(each.module) for each in known), "")
        gradient = local_bytes(leaving[entry.name], mesh) if entry.name in leaving else 0
        found[node] = Weight(local_bytes(read, mesh), str(record(read).type.dtype), gradient, again, unit)
    return found
