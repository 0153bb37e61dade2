"""Ops that compute and talk to other ranks in between: ring attention, which sends keys and values on while it computes
with those that it has, and chains whose ranks take turns.

Each is one node, whatever the number of ranks. It has no kernel that is called and returns: its part of the executor's
generator asks for transfers between its products (`runtime/attention/ring_attention.py`). Of keys and values a rank
holds the piece at its place on `axis` of `size`: of the whole dim, read as (outer, size, rest), mirrored in every
second block if `outer` is negative, as for a gather. `starts`: where the runs of a rank's queries begin in the whole,
as attention has them. A mask that is a condition (see `compared.py`) is known to each rank: it has the vectors of its
queries, and those of all keys, which are O(S) and take no part in the transfers. `hops`: how often keys and values go
on, if nobody looks farther back; all the way round if it is not given.

A chain in turns has the arguments of `chain`, of rows those of a rank: the piece at its place on `axis`, as above.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.ir.mesh import Mesh
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.ops import NAMESPACE, is_collective, op
from autopar.ir.program import TensorType
from autopar.torch_compat import schema_of


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of consecutive rows: the place of the rank that has it, and which of its runs it is."""

    place: int
    run: int


def turns_of(size: int, outer: int, reverse: bool) -> tuple[Turn, ...]:
    """The runs of a dim that lies on `size` ranks as (outer, size, rest), mirrored in every second block if outer is
    negative, from the first row or from the last."""
    turns = [
        Turn(size - 1 - i if outer < 0 and block % 2 else i, block) for block in range(abs(outer)) for i in range(size)
    ]
    return tuple(reversed(turns) if reverse else turns)


def messages(size: int, outer: int) -> int:
    """How often the states go from one rank to another."""
    turns = turns_of(size, outer, reverse=False)
    return sum(one.place != other.place for one, other in pairwise(turns))


_RING = "str axis, int size, int outer, bool causal, float scale, *, SymInt[] starts=[]"
_MASK = "Tensor[] rows, Tensor[] columns"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _schema in (
    f"ring_attention(Tensor q, Tensor k, Tensor v, {_RING}) -> (Tensor, Tensor)",
    f"ring_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_RING}) -> "
    "(Tensor, Tensor, Tensor)",
    f"ring_compared_attention(Tensor q, Tensor k, Tensor v, {_MASK}, str compare, {_RING}, int? hops=None) -> "
    "(Tensor, Tensor)",
    f"ring_compared_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, {_MASK}, Tensor out, Tensor lse, "
    f"str compare, {_RING}, int? hops=None) -> (Tensor, Tensor, Tensor)",
    "chain_in_turns(Tensor[] start, Tensor[] rows, Tensor[] fixed, str step, bool reverse, str axis, int size, "
    "int outer) -> Tensor[]",
):
    _library.define(_schema)
RING_ATTENTION, RING_ATTENTION_BACKWARD = op("ring_attention"), op("ring_attention_backward")
RING_COMPARED, RING_COMPARED_BACKWARD = op("ring_compared_attention"), op("ring_compared_attention_backward")
CHAIN_IN_TURNS = op("chain_in_turns")
_BACKWARD = (RING_ATTENTION_BACKWARD, RING_COMPARED_BACKWARD)


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank sends `times` to the next one in a step: the same piece of keys and values, or what ranks add to its
    gradients. value: the node whose pieces go round."""

    value: fx.Node
    type: TensorType
    times: int


@dataclass(frozen=True, slots=True)
class Ring:
    """The arguments of a ring's node, by their names."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    axis: str
    size: int
    outer: int
    causal: bool
    hops: int

    @staticmethod
    def of(node: fx.Node) -> Ring:
        """Read a ring off a node for which `is_ring` is true."""
        names = [argument.name for argument in schema_of(node.target).arguments]  # type: ignore[arg-type]
        given: dict[str, Any] = {"hops": None, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        given["hops"] = given["size"] - 1 if given["hops"] is None else given["hops"]
        return Ring(**{name: given[name] for name in Ring.__slots__})


def is_ring(target: object) -> bool:
    """True for an op that computes and talks to other ranks in between."""
    return target in (RING_ATTENTION, RING_COMPARED, CHAIN_IN_TURNS) or is_ring_backward(target)


def is_attention(target: object) -> bool:
    """True for ring attention, forwards or backwards."""
    return is_ring(target) and target is not CHAIN_IN_TURNS


def is_ring_backward(target: object) -> bool:
    """True for the gradients of one."""
    return target in _BACKWARD


def messages_of(node: fx.Node, mesh: Mesh) -> tuple[Message, ...]:
    """What goes round in a ring: keys and values n - 1 times, or as far as queries look back; in the backward pass as
    often again their gradients, in the dtype in which they are added up, the last time back to where they belong. In
    turns the states go from each rank to the next."""
    if node.target is CHAIN_IN_TURNS:
        return tuple(_states_sent(node, mesh))
    ring = Ring.of(node)
    parts = [local_type(each, mesh) for each in (ring.k, ring.v)]
    sent = TensorType((sum(part.numel for part in parts),), parts[0].dtype)
    found = [Message(ring.k, sent, ring.hops)]
    if is_ring_backward(node.target):
        wide = TensorType(sent.shape, torch.promote_types(sent.dtype, torch.float32))
        found.append(Message(ring.k, wide, ring.hops))
    return tuple(found) if ring.hops else ()


def _states_sent(node: fx.Node, mesh: Mesh) -> Iterator[Message]:
    start: Any
    start, _, _, _, _, _, size, outer = node.args
    for dtype in dict.fromkeys(local_type(one, mesh).dtype for one in start):
        some = [one for one in start if local_type(one, mesh).dtype == dtype]
        sent = TensorType((sum(local_type(one, mesh).numel for one in some),), dtype)
        yield Message(some[0], sent, messages(size, outer))  # type: ignore[arg-type]


def axis_of(node: fx.Node) -> str:
    """The axis over which a node for which `is_ring` is true talks."""
    return str(node.args[5]) if node.target is CHAIN_IN_TURNS else Ring.of(node).axis


def axes_of(graph: fx.Graph) -> tuple[str, ...]:
    """The axes (also joined ones, "dp:cp") over which a graph moves data, in the order of their first use."""
    return tuple(dict.fromkeys(_axes(graph)))


def _axes(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if is_ring(node.target):
            yield axis_of(node)
        elif is_collective(node.target) and node.target != op("wait"):
            yield str(node.args[1]) if len(node.args) > 1 else str(node.kwargs["axis"])
