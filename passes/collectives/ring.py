"""ring: keys and values that attention alone gathers go round the ranks instead, under its products."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import CONTEXT_AXES, axes_of_group
from autopar.ir.ops.op_facts import argument_place
from autopar.ir.ops.ops import op, op_name
from autopar.ir.ops.ring_ops import (
    RING_ATTENTION,
    RING_ATTENTION_BACKWARD,
    RING_COMPARED,
    RING_COMPARED_BACKWARD,
    is_ring_backward,
)
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, TensorType, record
from autopar.machines import Machine
from autopar.machines.model import ATTENTION

MADE_BY = "ring"
KEYS = 2  # the dim of keys and values that goes round
_SCATTER = op("reduce_scatter")
_RINGS: Mapping[bool, tuple[Any, Any]] = {  # forward and backward, without a mask and with a condition
    False: (RING_ATTENTION, RING_ATTENTION_BACKWARD), True: (RING_COMPARED, RING_COMPARED_BACKWARD),
}  # fmt: skip
_DROPPED = "its dropout counts the keys of the whole"


def ring(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. Attention to keys and values that are gathered for it alone becomes ring attention.

        attention: ring
        LOCAL program on cp=2
        %q: f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-] = batch "0"
        %k: f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-] = batch "1"
        %v: f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-] = batch "2"
        %gk: f32[1,1,8,2] [-,-,-,-] = autopar.all_gather.default(%k, "cp", 2, 1)
        %gv: f32[1,1,8,2] [-,-,-,-] = autopar.all_gather.default(%v, "cp", 2, 1)
        %a: (f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-], f32[1,1,4] of [1,1,8] [-,-,cp]) = autopar.attention.default(%q, %gk, %gv, None, False, 1.0)
        %out: f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-] = operator.getitem(%a, 0)
        %all_gather: f32[1,1,8,2] [-,-,-,-] = autopar.all_gather.default(%out, "cp", 2, 1)
        return value "out" = %all_gather
    becomes
        LOCAL program on cp=2
        %q: f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-] = batch "0"
        %k: f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-] = batch "1"
        %v: f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-] = batch "2"
        %ring_attention: (f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-], f32[1,1,4] of [1,1,8] [-,-,cp]) = autopar.ring_attention.default(%q, %k, %v, "cp", 2, 1, False, 1.0)
        %out: f32[1,1,4,2] of [1,1,8,2] [-,-,cp,-] = operator.getitem(%ring_attention, 0)
        %all_gather: f32[1,1,8,2] [-,-,-,-] = autopar.all_gather.default(%out, "cp", 2, 1)
        return value "out" = %all_gather

    At each of n - 1 steps a rank sends on the keys and values that it has while it computes with them (arXiv
    2310.01889), where a gather moves all of them before the first product. The backward pass sends them round again,
    and with them the sums of their gradients, which were scattered. `attention="ring"` does so wherever it can be, with
    a note where it cannot; "auto" where the products of a step take longer than its message (`hidden`). Of a mask that
    is a condition the vectors of the keys stay on every rank; a vector of bools that masks keys becomes one. Through a
    window keys go no farther than it is wide.
    """  # noqa: E501
    asked = plan.options.attention
    if asked not in ("auto", "ring") or not any(axis in plan.mesh for axis in CONTEXT_AXES):
        return program
    return _Rings(program, plan.weighed_on, is_forced=asked == "ring").run()


def hidden(queries: int, group: int, itemsize: int, causal: bool, machine: Machine) -> float:
    """The time of the products of a step as a multiple of its message's.

    For each of its keys a message has d + e elements; the products of the `queries` on a rank, of `group` heads for one
    of keys, have 2 (d + e) operations each, half of them under a causal mask.
    """
    return 2 * queries * group * machine.bytes_per_flop(ATTENTION) / itemsize / (2 if causal else 1)


@dataclass(frozen=True, slots=True)
class _Found:
    """An attention whose keys and values may go round.

    args: those of the ring up to `axis`, with the rank's pieces in place of what the gathers give. pads: a mask that is
    a vector over the keys, which becomes the first of `columns`. scatters: the sums by which its gradients leave, by
    their place among its results.
    """

    target: Any
    args: tuple[Any, ...]
    pads: fx.Node | None
    gathers: tuple[fx.Node, ...]
    axis: str
    outer: int
    causal: bool
    scale: float
    scatters: Mapping[int, fx.Node]

    @property
    def is_compared(self) -> bool:
        """True if the share of keys that are seen is known only in a run."""
        return self.target in _RINGS[True]

    @property
    def queries_and_keys(self) -> tuple[fx.Node, fx.Node]:
        first = int(is_ring_backward(self.target))  # behind the gradient of the output
        return self.args[first], self.args[first + 1]


class _Rings:
    def __init__(self, program: Program, machine: Machine, is_forced: bool) -> None:
        self.program, self.machine, self.is_forced = program, machine, is_forced
        self.build = Builder(MADE_BY)
        self.refused: dict[str, list[fx.Node]] = {}  # what stays gathered, by the reason
        self.found: dict[fx.Node, _Found] = {}
        self.why: dict[fx.Node, str] = {}  # the reason of a ring, and of a gather that could have been one
        self.vectors: dict[fx.Node, fx.Node] = {}  # of masks that are some
        self.pieces: dict[fx.Node, fx.Node] = {}  # the scatter of each gradient that is one rank's already

    def run(self) -> Program:
        self._choose()
        notes = tuple(_note(why, nodes) for why, nodes in self.refused.items()) if self.is_forced else ()
        if not self.found and not self.why and not notes:
            return self.program
        for node, one in self.found.items():
            self.pieces.update(
                {item: one.scatters[_place(item)] for item in node.users if _place(item) in one.scatters}
            )
        self.items = {scatter: item for item, scatter in self.pieces.items()}
        left = {gather for one in self.found.values() for gather in one.gathers}
        return self.build.rewrite(self.program, self._put, later=left, notes=(*self.program.notes, *notes))

    def _choose(self) -> None:
        """Find the attention that goes round; what something else reads as well stays gathered."""
        for node in self.program.calls():
            one = _found(node)
            if isinstance(one, _Found):
                self.found[node] = one
            elif one:
                self._refuse(node, one)
        while shared := [node for node, one in self.found.items() if self._is_shared(one)]:
            for node in shared:
                self._refuse(node, "another op reads the keys or values that are gathered for it")
        for node in [node for node, one in self.found.items() if not self._pays(node, one)]:
            del self.found[node]

    def _refuse(self, node: fx.Node, why: str) -> None:
        self.found.pop(node, None)
        self.refused.setdefault(why, []).append(node)

    def _is_shared(self, one: _Found) -> bool:
        return any(user not in self.found for gather in one.gathers for user in gather.users)

    def _pays(self, node: fx.Node, one: _Found) -> bool:
        """True where a ring is asked for, or hides its messages; the reason is kept for the nodes."""
        q, k = map(record, one.queries_and_keys)
        queries = local_shape(q.type.shape, q.layout, self.program.mesh)[KEYS]
        times = hidden(queries, q.type.shape[1] // k.type.shape[1], k.type.dtype.itemsize, one.causal, self.machine)
        most = " at most" if one.is_compared else ""
        said = f"a step's products take{most} {times:.3g} times as long as its message"
        if self.is_forced or (times >= 1 and not most):
            self.why[node] = f"attention='ring'; {said}" if self.is_forced else f"a ring: {said}"
            return True
        self.why.update(dict.fromkeys(one.gathers, f"gathered at once: in a ring {said}"))
        return False

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node in self.found:
            return self._ring(node, self.found[node])
        if node in self.items:
            return self.build.value[self.items[node]]
        known = record(node)
        if node in self.pieces:
            like = record(self.pieces[node]).with_(reason="")
            return self.build.lay(operator.getitem, *self.build.new(node.args), like=like, name=node.name)
        if node in self.why:
            return self.build.copy(node, like=known.with_(reason=f"{known.reason}; {self.why[node]}"))
        return None

    def _ring(self, node: fx.Node, one: _Found) -> fx.Node:
        """The ring in place of an attention; the gradients of keys and values are those of the rank's pieces."""
        layouts = list(record(node).layouts)
        first = int(is_ring_backward(one.target))
        if first:
            layouts[1:] = (record(piece).layout for piece in one.args[2:4])
        args = list(self.build.new(one.args))
        if one.pads is not None:
            args[first + 4] = [self._vector(one.pads)]
        like = record(node).with_(layouts=tuple(layouts), reason=self.why[node])
        return self.build.lay(
            one.target, *args, one.axis, self.program.mesh[one.axis], one.outer, one.causal, one.scale,
            like=like, name=op_name(one.target), **self.build.new(self._rest(node, one)),
        )  # fmt: skip

    def _rest(self, node: fx.Node, one: _Found) -> dict[str, Any]:
        """The other arguments. Of pieces in order, as queries have them, keys go on as far as queries look back."""
        rest = dict(node.kwargs)
        reach: Any = rest.pop("reach", None)
        q, k = map(record, one.queries_and_keys)
        if reach is not None and one.outer == 1 and q.layout.dims[KEYS] == k.layout.dims[KEYS]:
            size = self.program.mesh[one.axis]
            hops = -(-reach // (k.type.shape[KEYS] // size))
            rest |= {"hops": hops} if hops < size - 1 else {}
        return rest

    def _vector(self, mask: fx.Node) -> fx.Node:
        """A mask [.., 1, t], of which each rank has all keys, as [b|1, h|1, t]."""
        if mask not in self.vectors:
            known = record(mask)
            shape, dims = known.type.shape, known.layout.dims
            missing = 4 - len(shape)
            type_ = TensorType((*[1] * missing, *shape[:-2], shape[-1]), known.type.dtype)
            layout = Layout((*[()] * missing, *dims[:-2], ()))
            value, local = self.build.value[mask], list(local_shape(type_.shape, layout, self.program.mesh))
            self.vectors[mask] = self.build.lay(
                torch.ops.aten.reshape.default, value, local, type_=type_, layout=layout, name="columns",
                like=known.with_(flops=0, origin="", reason=""),
            )  # fmt: skip
        return self.vectors[mask]


def _found(node: fx.Node) -> _Found | str:
    """What a ring needs to know of an attention; why there can be none, or "" for all other nodes."""
    queries = argument_place(node.target, "q")
    if queries is None:
        return ""
    first = queries[0]  # keys, values and mask come after them
    args: tuple[Any, ...] = node.args
    gathers = [one for one in args[first + 1 : first + 3] if _is_gather(one)]
    if not gathers:
        return ""
    if op_name(node.target).startswith("dropped"):
        return _DROPPED
    is_compared = op_name(node.target).startswith("compared")
    pads = None if is_compared else args[first + 3]
    if pads is not None and not _is_vector(pads):
        return "its mask is a tensor, with a column for each key of the whole"
    if len(gathers) < 2 or _pieces(gathers[0]) != _pieces(gathers[1]) or gathers[0].args[2] != KEYS:
        return "they do not lie in the same pieces"
    _, axis, _, outer = gathers[0].args
    items = [item for item in node.users if first and _place(item)]
    if not all(_is_scattered(item, (axis, KEYS, outer, "sum")) for item in items):
        return "their gradients are not scattered to the same pieces"
    scatters = {_place(item): next(iter(item.users)) for item in items}
    given = fx.node.map_arg(args[:-2], lambda one: one.all_input_nodes[0] if one in gathers else one)
    if not is_compared:  # no mask, or the condition that it is
        vectors: list[list[fx.Node]] = [] if pads is None else [[], []]
        given = (*given[: first + 3], *vectors, *given[first + 4 :], *(() if pads is None else ("c0",)))
    target = _RINGS[is_compared or pads is not None][first]
    return _Found(target, given, pads, tuple(gathers), axis, outer, bool(args[-2]), float(args[-1]), scatters)


def _is_vector(mask: fx.Node) -> bool:
    """True for a mask of bools over the keys, the same for all queries."""
    type_ = record(mask).type
    return type_.dtype == torch.bool and len(type_.shape) > 1 and type_.shape[-2] == 1


def _note(why: str, nodes: Sequence[fx.Node]) -> str:
    known, more = record(nodes[0]), f" and {len(nodes) - 1} more" if nodes[1:] else ""
    place = f"%{nodes[0].name}" + "".join(
        f" {at} {what}" for at, what in (("at", known.source), ("in", known.module)) if what
    )
    return f"attention='ring': keys and values of {place}{more} are gathered: {why}"


def _is_scattered(item: fx.Node, wanted: tuple[object, ...]) -> bool:
    """True for what only one scatter reads, of these arguments."""
    return [(user.target, user.args[1:]) for user in item.users] == [(_SCATTER, wanted)]


def _is_gather(arg: Any) -> bool:
    """True for what is gathered over an axis of the sequence."""
    is_gather = isinstance(arg, fx.Node) and arg.target is op("all_gather")
    return is_gather and not set(axes_of_group(arg.args[1])).isdisjoint(CONTEXT_AXES)


def _pieces(gather: fx.Node) -> tuple[object, ...]:
    """How and of what a gather puts a whole together, and what is left of its layout."""
    known = record(gather)
    return *gather.args[1:], known.type.dtype, known.layout.dims[KEYS]


def _place(item: fx.Node) -> int:
    """Which of several results a node takes."""
    return int(item.args[1])  # type: ignore[arg-type]
