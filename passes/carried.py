"""What slices of a sequence carry to one another: keys and values of causal attention, and the gradients of these."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.ir.ops import op
from autopar.ir.program import is_getitem, record

# Of each attention: the positions of k, of v and of `causal` among its arguments.
_FORWARD: Mapping[object, tuple[int, int, int]] = {op("attention"): (1, 2, 4), op("dropped_attention"): (1, 2, 5)}
_BACKWARD: Mapping[object, tuple[int, int, int]] = {
    op("attention_backward"): (2, 3, 7),
    op("dropped_attention_backward"): (2, 3, 8),
}
_LSE = 6  # the position of the logsumexp among the arguments of a backward call


def carried(node: fx.Node, user: fx.Node) -> str | None:
    """The key under which slices keep `node`, of which causal attention `user` reads what lies before its queries;
    None if it is nothing of the kind."""
    places = {**_FORWARD, **_BACKWARD}.get(user.target)
    if places is None or not _is_causal(user, places):
        return None
    at = next((name for name, place in zip("kv", places, strict=False) if user.args[place] is node), None)
    return at and f"{_forward_of(user).name}.{at}"


def carried_back(node: fx.Node) -> str | None:
    """The key of a gradient of keys or values to which each slice adds what it gives to slices before it."""
    call, at = node.args[:2] if is_getitem(node) else (None, 0)
    if not isinstance(call, fx.Node) or call.target not in _BACKWARD or at not in (1, 2):
        return None
    is_causal = _is_causal(call, _BACKWARD[call.target])
    return f"{_forward_of(call).name}.{'dk' if at == 1 else 'dv'}" if is_causal else None


def sees_before(node: fx.Node) -> bool:
    """True for causal attention, whose work grows with the positions before its queries."""
    places = {**_FORWARD, **_BACKWARD}.get(node.target)
    return places is not None and _is_causal(node, places)


def _is_causal(user: fx.Node, places: tuple[int, int, int]) -> bool:
    """True if query i sees the keys up to i, and there are as many queries as keys."""
    k, _, causal = places
    q, keys = user.args[k - 1], user.args[k]
    assert isinstance(q, fx.Node) and isinstance(keys, fx.Node)
    return bool(user.args[causal]) and record(q).type.shape[2] == record(keys).type.shape[2]


def _forward_of(user: fx.Node) -> fx.Node:
    """The attention whose gradients a call makes; a forward one itself."""
    node = user
    while node.target in _BACKWARD:
        node = node.args[_LSE]  # type: ignore[assignment]
        while node.target not in _FORWARD and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
    return node
