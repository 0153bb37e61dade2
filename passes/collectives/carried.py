"""What slices of a sequence carry to one another: what causal attention reads of keys, and the gradients of that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.comparisons import All, Comparison, parse_condition
from autopar.ir.ops.ops import SEMANTIC, op
from autopar.ir.ops.semantic import SemanticOp
from autopar.ir.program import is_getitem, record
from autopar.torch_compat import schema_of


@dataclass(frozen=True, slots=True)
class AttentionPlaces:
    """Among the arguments of an attention: keys, values and `causal`; of a backward call the logsumexp; the mask, or of
    one that is known by a condition its vectors over the queries, and over the keys, and the condition."""

    k: int
    v: int
    causal: int
    lse: int | None = None
    mask: int | None = None
    vectors: tuple[int, int, int] | None = None


def _places_of(one: SemanticOp) -> AttentionPlaces | None:
    """Where an attention has them, by its schema; None for another op."""
    at = {argument.name: place for place, argument in enumerate(schema_of(op(one.name)).arguments)}
    if "causal" not in at:
        return None
    vectors = (at["rows"], at["columns"], at["compare"]) if "compare" in at else None
    return AttentionPlaces(at["k"], at["v"], at["causal"], at.get("lse"), at.get("mask"), vectors)


_PLACES: Mapping[object, AttentionPlaces] = {op(one.name): found for one in SEMANTIC if (found := _places_of(one))}


def carried(node: fx.Node, user: fx.Node) -> str | None:
    """The key under which slices keep `node`, keys or values or what a mask knows of keys, of which causal attention
    `user` reads what lies before its queries; None if it is nothing of the kind."""
    places = _PLACES.get(user.target)
    if places is None or not is_causal(user, places):
        return None
    at = next((name for name, place in _read_of_keys(user, places) if place is node), None)
    return at and f"{_forward_of(user).name}.{at}"


def _read_of_keys(user: fx.Node, places: AttentionPlaces) -> Iterator[tuple[str, object]]:
    """What an attention reads of each key, by its name: the key, its value, and what a mask compares."""
    yield "k", user.args[places.k]
    yield "v", user.args[places.v]
    if places.vectors is not None:
        columns = user.args[places.vectors[1]]
        assert isinstance(columns, (list, tuple))
        yield from ((f"c{i}", column) for i, column in enumerate(columns))


def carried_back(node: fx.Node) -> str | None:
    """The key of a gradient of keys or values to which each slice adds what it gives to slices before it."""
    call, at = node.args[:2] if is_getitem(node) else (None, 0)
    places = _PLACES.get(call.target) if isinstance(call, fx.Node) else None
    if places is None or places.lse is None or at not in (1, 2):
        return None
    assert isinstance(call, fx.Node)
    return f"{_forward_of(call).name}.{'dk' if at == 1 else 'dv'}" if is_causal(call, places) else None


def sees_before(node: fx.Node) -> bool:
    """True for causal attention, whose work grows with the positions before its queries: not for that of a window."""
    places = _PLACES.get(node.target)
    return places is not None and bool(node.args[places.causal]) and is_causal(node, places)


def places_in(user: fx.Node) -> AttentionPlaces | None:
    """Where an attention, or what makes its gradients, has its arguments; None for another op."""
    return _PLACES.get(user.target)


def is_causal(user: fx.Node, places: AttentionPlaces) -> bool:
    """True if query i sees none but the keys up to i, and there are as many queries as keys."""
    q, keys = user.args[places.k - 1], user.args[places.k]
    assert isinstance(q, fx.Node) and isinstance(keys, fx.Node)
    if record(q).type.shape[2] != record(keys).type.shape[2]:
        return False
    return bool(user.args[places.causal]) or (places.vectors is not None and _hides_later(user, places.vectors))


def _hides_later(user: fx.Node, vectors: tuple[int, int, int]) -> bool:
    """True if a part of a condition is `position of the key <= position of the query`, as in a window."""
    rows, columns, compare = (user.args[place] for place in vectors)
    condition = parse_condition(str(compare))
    return any(
        _behind(rows[int(part.row[1:])]) - _behind(columns[int(part.column[1:])]) <= (part.sign == "<")  # type: ignore[index, arg-type]
        for part in (condition.parts if isinstance(condition, All) else (condition,))
        if isinstance(part, Comparison) and part.sign in ("<", "<=")
    )


def _behind(vector: fx.Node) -> float:
    """By how much the elements of a vector are more than their own positions; nan if they are something else."""
    while vector.op == "call_function" and len(vector.all_input_nodes) == 1 and _is_as_it_was(vector):
        (vector,) = vector.all_input_nodes
    is_range = vector.target is torch.ops.aten.arange.start and all(isinstance(arg, int) for arg in vector.args)
    return float(vector.args[0]) if is_range else math.nan  # type: ignore[arg-type]


def _is_as_it_was(node: fx.Node) -> bool:
    """True for what has the elements of its operand, or a rank's piece of them."""
    return node.target in (torch.ops.aten.reshape.default, op("shard"))


def _forward_of(user: fx.Node) -> fx.Node:
    """The attention whose gradients a call makes; a forward one itself."""
    node = user
    while (places := _PLACES[node.target]).lse is not None:
        node = node.args[places.lse]  # type: ignore[assignment]
        while node.target not in _PLACES and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
    return node
