"""Check a chain: its step takes its operands and gives its results, and what ranks hand on has a place to go to."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from autopar.errors import ArtifactError, VerificationError
from autopar.ir.layout import outer_of
from autopar.ir.mesh import Mesh, axes_of_group
from autopar.ir.ops.chain import result_types
from autopar.ir.ops.measure import local_type, local_types
from autopar.ir.ops.ops import op
from autopar.ir.ops.ring_ops import CHAIN_IN_TURNS
from autopar.ir.program import Level, Program, record

CHAIN = op("chain")


def check_chains(program: Program) -> None:
    """Raise VerificationError if a chain of a program is not what its record says."""
    for node in program.calls():
        if node.target in (CHAIN, CHAIN_IN_TURNS):
            _check_step(node, program)
        if node.target is CHAIN_IN_TURNS:
            _check_turns(node, program.mesh)


def _fail(node: fx.Node, text: str) -> None:
    raise VerificationError(f"chain %{node.name} ({record(node).source}): {text}")


def _check_step(node: fx.Node, program: Program) -> None:
    """The results are of the types that the step gives for the operands: one rank's from LOCAL on."""
    is_local, mesh = program.level >= Level.LOCAL, program.mesh
    given: Any = node.args[:3]
    operands = [[local_type(one, mesh) if is_local else record(one).type for one in ones] for ones in given]
    said = tuple(local_types(node, mesh)) if is_local else record(node).types
    try:
        made = result_types(str(node.args[3]), *operands)
    except (ArtifactError, ValueError) as error:
        _fail(node, str(error))
        return
    if made != said:
        _fail(node, f"its step gives {_text(made)}, and it says {_text(said)}")


def _check_turns(node: fx.Node, mesh: Mesh) -> None:
    """The rows lie in the pieces over which the ranks take turns, and the states on all of them."""
    args: Any = node.args
    start, rows, fixed, _, _, axis, size, outer = args
    axes = axes_of_group(str(axis))
    count = math.prod(mesh[one] for one in axes) if all(one in mesh for one in axes) else 0
    if count != size:
        _fail(node, f"{size} ranks of '{axis}' take turns, of which mesh '{mesh}' has {count}")
    for one in rows:
        steps = record(one).layout.dims[0]
        if tuple(factor for factor in steps if isinstance(factor, str)) != axes or outer_of(steps, axes[0]) != outer:
            _fail(node, f"%{one.name} lies as {record(one).layout}, not in {outer} pieces over '{axis}'")
    for one in (*start, *fixed):
        if not set(record(one).layout.axes).isdisjoint(axes):
            _fail(node, f"%{one.name} is split over '{axis}', and all its ranks read it")


def _text(types: Any) -> str:
    return ", ".join(f"{one.dtype}{list(one.shape)}" for one in types)
