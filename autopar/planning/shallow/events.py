"""What calls of a micro-batch read of parameters, and make of their gradients: the places between which data moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import fx

from autopar.ir.mesh import GRADIENT_AXES, Mesh, axes_of_group, is_in_time
from autopar.ir.modules import layer_of, unit_of
from autopar.ir.ops.measure import local_bytes, local_type
from autopar.ir.ops.op_facts import is_view, is_whole_view
from autopar.ir.ops.ops import op
from autopar.ir.ops.storage import root_of
from autopar.ir.program import CAST, Program, record
from autopar.passes.overlap.bucket import SUMS
from autopar.planning.shallow.depth import Rest
from autopar.planning.shallow.stage_graphs import Micro

OUTSIDE = -1
PARTS = (op("shard"), op("keep_first"))  # of a value, a rank's own: views of it


class Own(NamedTuple):
    """Whose a value is. layer: which of the program's equal layers, in their order; -1: none. name: of a parameter, or
    its cast, within the layer."""

    layer: int
    name: str


@dataclass(frozen=True, slots=True)
class ParameterRead:
    """A parameter as a graph reads it, or its cast. bytes_: of the whole. unit: the layer whose parameters are gathered
    with it (`unit_of`). trained: False if it is frozen. is_cast: False if it is read as it is."""

    own: Own
    bytes_: int
    dtype: str
    unit: str
    trained: bool
    is_cast: bool


@dataclass(frozen=True, slots=True)
class Gradient:
    """bytes_: of what a rank computes of it. over: axes over which it is a sum beside those of data. holds: bytes of
    the value that it is a part of, if it is one: all of that stays with it. is_turned: True if it is copied to be
    scattered: ranks of data divide another dim of it than the first (`split_over` of passes/collectives/zero.py), or
    it is a permutation of what was computed."""

    own: Own
    bytes_: int
    dtype: str
    over: tuple[str, ...]
    holds: int = 0
    is_turned: bool = False

    @property
    def alive(self) -> int:
        return max(self.bytes_, self.holds)


class Events(NamedTuple):
    """What begins and ends with a call. reads: values of which it is the first reader; ends: the last. gives:
    gradients that are there when it is done."""

    reads: tuple[ParameterRead, ...] = ()
    ends: tuple[Own, ...] = ()
    gives: tuple[Gradient, ...] = ()


NO_EVENTS = Events()


@dataclass(frozen=True, slots=True)
class Named:
    """layers: the paths of the equal layers. casts: of those that are made once a step, the names of their parameters,
    by their own. gradients: by the names that graphs have for them. trained: the names of parameters that have one."""

    layers: tuple[str, ...]
    casts: Mapping[str, str]
    gradients: Mapping[str, Gradient]
    trained: frozenset[str]

    @classmethod
    def of(cls, micro: Micro, rest: Rest) -> Named:
        """rest: all but one of the equal layers."""
        layers = tuple(rest.layers)
        once = micro.graphs.get("P")
        casts = {} if once is None else dict(_casts(once))
        own = dict(_gradients(micro.program, layers))
        parts = {} if (last := micro.graphs.get("E")) is None else dict(_parts(last))
        gradients = own | {part: own[name] for part, name in parts.items()}
        leaving = micro.program.leaving
        return cls(layers, casts, gradients, frozenset(out.name for _, out in leaving if out.kind == "gradient"))

    def events(self, program: Program) -> dict[fx.Node, Events]:
        """The events of the calls of a graph that have any."""
        reads: dict[fx.Node, list[ParameterRead]] = {}
        ends: dict[fx.Node, list[Own]] = {}
        gives: dict[fx.Node, list[Gradient]] = {}
        place = {node: i for i, node in enumerate(program.calls())}
        for value, parameter, is_cast in self._values(program):
            users = sorted((place[user], user) for user in _readers(value) if user in place)
            if not users:
                continue
            (_, first), (_, last) = users[0], users[-1]
            type_, unit = str(record(value).type.dtype), unit_of(record(first).module)
            size, is_trained = local_bytes(value, program.mesh), parameter in self.trained
            own = _own(f"{parameter} as {type_}" if is_cast else parameter, self.layers)
            reads.setdefault(first, []).append(ParameterRead(own, size, type_, unit, is_trained, is_cast))
            ends.setdefault(last, []).append(own)
        for node, out in program.leaving:
            if node in place and out.kind in ("part", "gradient") and out.name in self.gradients:
                found, source = self.gradients[out.name], node
                while source.target in PARTS:
                    source = root_of(source.all_input_nodes[0])
                holds = 0 if source is node or source not in place else local_bytes(source, program.mesh)
                gives.setdefault(node, []).append(replace(found, holds=holds))
        return {
            node: Events(tuple(reads.get(node, ())), tuple(ends.get(node, ())), tuple(gives.get(node, ())))
            for node in {**reads, **ends, **gives}
        }

    def _values(self, program: Program) -> Iterator[tuple[fx.Node, str, bool]]:
        """What a graph reads of parameters: (the value, the name of the parameter, True of a cast)."""
        for node, entry in program.entries:
            if entry.kind == "parameter":
                yield node, entry.name, False
                yield from ((user, entry.name, True) for user in node.users if user.target is CAST)
            elif entry.kind == "step" and entry.name in self.casts:
                yield node, self.casts[entry.name], True


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """Find the calls that compute with a parameter: a view of it reads nothing, and is made where it is read
    (`own_views`). A cast of it is a value of its own."""
    for user in value.users:
        if is_view(user.target):
            yield from _readers(user)
        elif user.target is not CAST:
            yield user


def _own(name: str, layers: Sequence[str]) -> Own:
    path = layer_of(name)
    return Own(layers.index(path), name.removeprefix(path)) if path in layers else Own(OUTSIDE, name)


def _casts(once: Program) -> Iterator[tuple[str, str]]:
    """Find the casts of parameters that are made once a step: (the name of what leaves, that of the parameter)."""
    names = {node: entry.name for node, entry in once.parameters()}
    for node, out in once.leaving:
        if out.kind == "step" and node is not None and node.target is CAST and node.all_input_nodes[0] in names:
            yield out.name, names[node.all_input_nodes[0]]


def _gradients(program: Program, layers: Sequence[str]) -> Iterator[tuple[str, Gradient]]:
    """Find the gradients of a LOCAL program: the name of the parameter, and the gradient before its sums."""
    for node, out in program.leaving:
        if out.kind == "gradient" and node is not None:
            source = _before_sums(node, over := list[str]())
            known, axes = record(source), tuple(reversed(over))
            dims = record(node).layout.dims
            is_turned = (len(dims) > 1 and bool(dims[0]) and not all(dims)) or _is_turned(node, program.mesh)
            own, bytes_ = _own(out.name, layers), local_bytes(source, program.mesh)
            yield out.name, Gradient(own, bytes_, str(known.type.dtype), axes, is_turned=is_turned)


def _is_turned(node: fx.Node, mesh: Mesh) -> bool:
    """True if a gradient is a permutation of what was computed."""
    views = []
    while is_whole_view(node.target) or node.target is CAST or node.target in SUMS:
        views += [node] * is_whole_view(node.target)
        node = node.all_input_nodes[0]
    value = torch.empty(local_type(node, mesh).shape, device="meta")
    for view in reversed(views):
        value = view.target(value, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    return not value.is_contiguous()


def _parts(last: Program) -> Iterator[tuple[str, str]]:
    """Find what micro-batches leave to the sums behind them: (its name, that of the parameter)."""
    named = {node: entry.name for node, entry in last.entries if entry.kind == "step"}
    for node, out in last.leaving:
        if out.kind == "gradient" and node is not None and (source := _before_sums(node, [])) in named:
            yield named[source], out.name


def _before_sums(node: fx.Node, over: list[str]) -> fx.Node:
    """What the sums add up by which a gradient leaves, as it is or by views. over: gets their axes, but for those of
    data, the last first."""
    shown = node
    while is_whole_view(shown.target):
        shown = shown.all_input_nodes[0]
    if shown.target is CAST and shown.all_input_nodes[0].target in SUMS:
        shown = shown.all_input_nodes[0]
    if shown.target in SUMS or shown.op == "placeholder":
        node = shown
    while node.target in SUMS:
        axes = axes_of_group(str(node.args[1]))
        over += [axis for axis in axes if axis not in GRADIENT_AXES and not is_in_time(axis)]
        node = node.all_input_nodes[0]
    return node
