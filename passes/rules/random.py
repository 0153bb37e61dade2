"""Random ops. Only autopar.dropout may be split: its mask is drawn per element of the whole tensor."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.passes.rules.build import FIRST, argument, build, named, names_of
from autopar.passes.rules.rule import Arguments, Call, Pieces, Row, Rule


def _dropout(call: Call) -> Rule:
    """The same mask wherever x is: linear in x."""
    dims, seed = named(call.operands[0].shape), named(call.operands[1].shape, "s")
    return build(call, [dims, seed], [dims], whole=names_of(seed), linear=FIRST)


def _dropout_local(pieces: Pieces) -> Arguments:
    """Every dim as its name is cut: (3:tp) of 24 is read as dims of 3 and 8, of which the piece has 3 and 4."""
    call = pieces.call
    cuts = [
        cut
        for dim, size in zip(pieces.rule.operands[0], call.operands[0].shape, strict=True)
        for cut in (pieces.reading(dim[0]) if dim else ((size, size, 0),))
    ]
    whole, local, offsets = ([cut[i] for cut in cuts] for i in range(3))
    head = tuple(argument(call, i, name) for i, name in enumerate(("x", "seed", "key", "p")))
    return (*head, whole, local, offsets), {}


ROWS: Mapping[str, Row] = {
    "autopar.dropout.default": Row(_dropout, pointwise=True, local=_dropout_local),
}
