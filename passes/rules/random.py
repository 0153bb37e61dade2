"""Random ops of our own: drawn per element of the whole tensor, so that every dim may be split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.passes.rules.build import FIRST, argument, build, named, names_of
from autopar.passes.rules.rule import Arguments, Call, Dims, Pieces, Row, Rule


def _dropout(call: Call) -> Rule:
    """The same mask wherever x is: linear in x."""
    dims, seed = named(call.operands[0].shape), named(call.operands[1].shape, "s")
    return build(call, [dims, seed], [dims], replicated=names_of(seed), linear=FIRST)


def _dropout_of_rows(call: Call) -> Rule:
    """What a row draws goes with it."""
    dims, seed = named(call.operands[0].shape), named(call.operands[1].shape, "s")
    return build(call, [dims, seed, dims[:1], dims[:1]], [dims], replicated=names_of(seed), linear=FIRST)


def _random(call: Call) -> Rule:
    seed = named(call.operands[0].shape, "s")
    return build(call, [seed], [named(call.results[0].shape)], replicated=names_of(seed))


def _cut(pieces: Pieces, dims: Dims, shape: tuple[int, ...]) -> list[list[Any]]:
    """Every dim as its name is cut: (3:tp) of 24 is read as dims of 3 and 8, of which the piece has 3 and 4."""
    cuts = [
        cut
        for dim, size in zip(dims, shape, strict=True)
        for cut in (pieces.reading(dim[0]) if dim else ((size, size, 0),))
    ]
    return [[cut[i] for cut in cuts] for i in range(3)]


def _dropout_local(pieces: Pieces) -> Arguments:
    call = pieces.call
    head = tuple(argument(call, i, name) for i, name in enumerate(("x", "seed", "key", "p")))
    return (*head, *_cut(pieces, pieces.rule.operands[0], call.operands[0].shape)), {}


def _dropout_of_rows_local(pieces: Pieces) -> Arguments:
    call = pieces.call
    whole, *rest = _cut(pieces, pieces.rule.operands[0][1:], call.operands[0].shape[1:])
    return (*call.args[:7], [call.args[7][0], *whole], *rest), {}


def _random_local(pieces: Pieces) -> Arguments:
    call = pieces.call
    head = tuple(argument(call, i, name) for i, name in enumerate(("seed", "key", "kind", "shape", "dtype")))
    return (*head, *_cut(pieces, pieces.rule.results[0], call.results[0].shape)), {}


ROWS: Mapping[str, Row] = {
    "autopar.dropout.default": Row(_dropout, local=_dropout_local, free_args=(2,)),
    "autopar.dropout_of_rows.default": Row(_dropout_of_rows, local=_dropout_of_rows_local, free_args=(2,)),
    "autopar.random.default": Row(_random, shape_arg=3, local=_random_local, free_args=(1,)),
}
