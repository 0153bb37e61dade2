"""ring: keys and values that attention alone gathers go round the ranks instead, under its products."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.layout import local_shape
from autopar.ir.mesh import CONTEXT_AXES, axes_of_group
from autopar.ir.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, record
from autopar.ir.ring_ops import RING_ATTENTION, RING_ATTENTION_BACKWARD
from autopar.passes.search.costs import BYTES_PER_FLOP

MADE_BY = "ring"
KEYS = 2  # the dim of keys and values that goes round
_FORWARD, _BACKWARD = op("attention"), op("attention_backward")
_DROPPED = (op("dropped_attention"), op("dropped_attention_backward"))
_GATHER, _SCATTER = op("all_gather"), op("reduce_scatter")


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
    a note where it cannot; "auto" where the products of a step take longer than its message (`hidden`).
    """  # noqa: E501
    asked = plan.options.attention
    if asked not in ("auto", "ring") or not any(axis in plan.mesh for axis in CONTEXT_AXES):
        return program
    return _Rings(program, is_forced=asked == "ring").run()


def hidden(queries: int, heads_of_key: int, itemsize: int, causal: bool) -> float:
    """The time of the products of a step as a multiple of its message's: `queries` on a rank, each with as many keys
    (half of them, if causal), for 2 (d + e) operations and, a head of keys, d + e elements on the link."""
    return 2 * queries * heads_of_key * BYTES_PER_FLOP / itemsize / (2 if causal else 1)


@dataclass(frozen=True, slots=True)
class _Found:
    """An attention whose keys and values may go round. scatters: the sums that leave its gradients, by their place."""

    gathers: tuple[fx.Node, fx.Node]
    causal: bool
    scale: float
    scatters: dict[int, fx.Node] = field(default_factory=dict)


class _Rings:
    def __init__(self, program: Program, is_forced: bool) -> None:
        self.program, self.is_forced = program, is_forced
        self.build = Builder(MADE_BY)
        self.notes: list[str] = []
        self.found: dict[fx.Node, _Found] = {}
        self.why: dict[fx.Node, str] = {}  # what is gathered and could go round, and why it does or does not

    def run(self) -> Program:
        self._choose()
        left = {gather for one in self.found.values() for gather in one.gathers}
        self.results = {
            user: one.scatters[user.args[1]]
            for node, one in self.found.items()
            for user in node.users
            if user.args[1] in one.scatters
        }
        self.scatters = {scatter: item for item, scatter in self.results.items()}
        if not self.found and not self.why and not self.notes:
            return self.program
        notes = (*self.program.notes, *self.notes)
        return self.build.rewrite(self.program, self._put, later=left, notes=notes)

    def _choose(self) -> None:
        """Find the attention that goes round; a gather that something else reads as well stays."""
        for node in self.program.calls():
            gathers = _gathers(node)
            if gathers:
                one = _found(node, gathers)
                if isinstance(one, str):
                    self._refuse(node, one)
                else:
                    self.found[node] = one
        while shared := [node for node, one in self.found.items() if self._shared(one)]:
            for node in shared:
                self._refuse(node, "other ops read the keys or values that are gathered for it")
        for node in [node for node in self.found if not self._pays(node)]:
            del self.found[node]

    def _refuse(self, node: fx.Node, why: str) -> None:
        self.found.pop(node, None)
        if self.is_forced:
            known = record(node)
            place = f"%{node.name} at {known.source} in {known.module or 'the model'}"
            self.notes.append(f"attention='ring': keys and values of {place} are gathered: {why}")

    def _shared(self, one: _Found) -> bool:
        return any(user not in self.found for gather in one.gathers for user in gather.users)

    def _pays(self, node: fx.Node) -> bool:
        """Whether a ring is asked for, or hides its messages; what decides is kept as the reason of the nodes."""
        q, k = (record(one).type for one in node.args[_first(node) : _first(node) + 2])  # type: ignore[union-attr]
        queries = local_shape(q.shape, record(node.args[_first(node)]).layout, self.program.mesh)[KEYS]
        times = hidden(queries, q.shape[1] // k.shape[1], q.dtype.itemsize, self.found[node].causal)
        is_ring = self.is_forced or times >= 1
        said = f"a step's products take {times:.3g} times as long as its message"
        self.why[node] = f"attention='ring'; {said}" if self.is_forced else said
        if not is_ring:
            for gather in self.found[node].gathers:
                self.why[gather] = f"gathered at once, since in a ring {said}"
        return is_ring

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node in self.found:
            return self._ring(node, self.found[node])
        if node in self.scatters:
            return self.build.value[self.scatters[node]]
        if node in self.results:  # a gradient in the pieces to which it was scattered
            like = record(self.results[node]).with_(operands=(), reason="")
            return self.build.call(operator.getitem, self.build.value[node.args[0]], node.args[1], like=like)  # type: ignore[index]
        if node in self.why and node.target is _GATHER and node.users:
            return self.build.copy(node, like=record(node).with_(reason=f"{record(node).reason}; {self.why[node]}"))
        return None

    def _ring(self, node: fx.Node, one: _Found) -> fx.Node:
        """The ring in place of an attention: the pieces of keys and values in place of the whole ones."""
        pieces = {gather: gather.args[0] for gather in one.gathers}
        first, forward = _first(node), node.target is _FORWARD
        operands = [pieces.get(arg, arg) for arg in node.args[: first + 3]]
        operands += () if forward else node.args[5:7]
        _, axis, _, outer = one.gathers[0].args
        layouts = [layout for layout in record(node).layouts]
        for place in () if forward else (1, 2):
            layouts[place] = record(one.scatters[place]).layout if place in one.scatters else record(operands[1 + place]).layout
        like = record(node).with_(
            layouts=tuple(layouts), operands=tuple(record(each).layout for each in operands), reason=self.why[node]
        )
        return self.build.call(
            RING_ATTENTION if forward else RING_ATTENTION_BACKWARD, *(self.build.value[each] for each in operands),
            axis, self.program.mesh[str(axis)], outer, one.causal, one.scale, like=like,
            name="ring_attention" if forward else "ring_attention_backward", **self.build.new(dict(node.kwargs)),
        )  # fmt: skip


def _first(node: fx.Node) -> int:
    """The place of the queries: a gradient stands before them in the backward pass."""
    return int(node.target is not _FORWARD and node.target is not _DROPPED[0])


def _gathers(node: fx.Node) -> tuple[fx.Node, ...]:
    """What gathers keys or values over an axis of the sequence, if the node is attention."""
    if node.target not in (_FORWARD, _BACKWARD, *_DROPPED):
        return ()
    first = _first(node)
    return tuple(one for one in node.args[first + 1 : first + 3] if isinstance(one, fx.Node) and _is_gather(one))


def _is_gather(node: fx.Node) -> bool:
    return node.target is _GATHER and not set(axes_of_group(str(node.args[1]))).isdisjoint(CONTEXT_AXES)


def _found(node: fx.Node, gathers: tuple[fx.Node, ...]) -> _Found | str:
    """What a ring needs to know of an attention; why there can be none."""
    if node.target in _DROPPED:
        return "its dropout counts the keys of the whole"
    first = _first(node)
    if node.args[first + 3] is not None:
        return "its mask is a tensor, with a column for each key of the whole"
    pairs = [(gather.args[1:], record(gather).type.dtype, record(gather).layout.dims[KEYS]) for gather in gathers]
    if len(gathers) < 2 or pairs[0] != pairs[1] or pairs[0][0][1] != KEYS or pairs[0][2]:
        return "its keys and values do not lie in the same pieces"
    causal, scale = node.args[-2:]
    one = _Found((gathers[0], gathers[1]), bool(causal), float(scale))  # type: ignore[arg-type]
    if node.target is _BACKWARD:
        for item in node.users:
            if item.args[1] == 0:
                continue
            users = list(item.users)
            if len(users) != 1 or users[0].target is not _SCATTER or users[0].args[1:] != (*gathers[0].args[1:], "sum"):
                return "the gradients of its keys and values are not scattered to the same pieces"
            one.scatters[int(item.args[1])] = users[0]  # type: ignore[call-overload]
    return one
