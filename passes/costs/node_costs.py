"""Estimate the time of a node on one rank, in microseconds of a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from autopar.ir.layout import Factor, is_mirrored
from autopar.ir.mesh import SLICE, Mesh
from autopar.ir.ops.fused import fused_of
from autopar.ir.ops.measure import goes_to_one, group_of, local_bytes, local_types, moved_type
from autopar.ir.ops.ops import COPIES, collective_of, is_collective, is_mesh_op, op
from autopar.ir.ops.ring_ops import (
    CHAIN_IN_TURNS,
    RING_ATTENTION,
    RING_ATTENTION_BACKWARD,
    axis_of,
    is_ring,
    messages_of,
)
from autopar.ir.ops.storage import is_view
from autopar.ir.program import Program, is_getitem, operand_nodes, record
from autopar.machines import Machine
from autopar.machines.model import ATTENTION, CONVOLUTION, FRESH, MESSAGE, NORM, RankGroup
from autopar.passes.costs.moved import APART, NORMS, OVER, moved_bytes
from autopar.torch_compat import schema_of

# How much of causal attention a rank computes: its kernels leave out the blocks of keys that no query of them sees.

_KERNELS = (op("attention"), op("attention_backward"), RING_ATTENTION, RING_ATTENTION_BACKWARD)
_LENGTH = 2  # the dim of queries and keys


@dataclass(frozen=True, slots=True)
class Pairs:
    """What the rank whose queries lie last computes, as shares of all pairs of a query and a key. before: with keys
    before a run of its queries. squares: of each run with its own keys, half of which are masked. width: of a run.
    ranks: among which queries are divided."""

    before: float
    squares: float
    width: int
    ranks: int


def causal_pairs(node: fx.Node, mesh: Mesh) -> Pairs | None:
    """The pairs of an attention that is causal and has no other mask; None of any other call.

    A rank's queries are runs of consecutive ones (`runtime/attention/blocks.py`). Ranks with
    pieces in order wait for the last one, which has (1 + (1 - 1/n)) / 2n of the pairs; mirrored pieces have 1 / 2n
    each. Of a slice of a sequence, whatever its length, the pairs are those of one in the middle.
    """
    if node.target not in _KERNELS:
        return None
    names = [argument.name for argument in schema_of(node.target).arguments]  # type: ignore[arg-type]
    given = dict(zip(names, node.args, strict=False))
    q, k = given["q"], given["k"]
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node)
    length, layout = record(q).type.shape[_LENGTH], record(q).layout
    factors = () if layout is None else layout.dims[_LENGTH]
    is_square = SLICE in factors or record(k).type.shape[_LENGTH] == length
    if not given["causal"] or given.get("mask") is not None or not is_square:
        return None
    starts, width = _runs(factors, length, mesh)
    ranks = math.prod(mesh[factor] for factor in factors if isinstance(factor, str))
    return Pairs(width * sum(starts) / length**2, len(starts) * (width / length) ** 2, width, ranks)


def _runs(factors: Sequence[Factor], length: int, mesh: Mesh) -> tuple[list[float], int]:
    """Where the runs of the last rank's queries begin, and how wide each is."""
    found, stride = [(0.0, 0)], length  # (start, its place in the factor before)
    for at, factor in enumerate(factors):
        count = mesh[factor] if isinstance(factor, str) else abs(factor)
        stride //= count
        if isinstance(factor, int):
            found = [(start + i * stride, i) for start, _ in found for i in range(count)]
        elif factor == SLICE:
            found = [(start + (count - 1) / 2 * stride, 0) for start, _ in found]
        else:
            mirrored = is_mirrored(factors, at)
            found = [(start + (0 if mirrored and i % 2 else count - 1) * stride, 0) for start, i in found]
    return [start for start, _ in found], stride


RING, TURNS = "ring", "turns"  # messages beside the products of a call; messages that ranks wait for one by one
COPY = "copy"  # between the memories of the device and its host


class Load(NamedTuple):  # a search of plans makes a hundred thousand
    """What a call asks of a rank and its links, whatever the machine. Bytes and FLOPs are one rank's.

    flops: of its product, in `dtype`; kind: of a fused attention, a convolution or the gradient of a norm, as of
    `Machine.call_us`. squares: of these those of a causal mask's squares, of `width` queries and keys each; a kernel
    computes little more than half of one. moved: bytes read and written. total: bytes of a sum over micro-batches that
    it adds to. apart: times that calls of a CPU go through its first result, 0 where these move no more than `moved`.
    results: bytes of each result. link: how it talks over `axis`: a collective's name, MESSAGE to one rank, RING,
    TURNS, or COPY without any axis; "" not at all. sent: (times, bytes) of its messages, or once the value that a
    collective moves.
    """

    flops: float = 0.0
    squares: float = 0.0
    width: int = 0
    dtype: str = ""
    kind: str = ""
    moved: float = 0.0
    total: float = 0.0
    apart: int = 0
    results: tuple[float, ...] = ()
    link: str = ""
    axis: str = ""
    sent: tuple[tuple[int, float], ...] = ()

    def between(self, other: Load, share: float) -> Load | None:
        """What lies at a share of the way from here to another one, 0 to 1, on a straight line; None of another kind
        of call."""
        if self == other:
            return self
        if _kind(self) != _kind(other):
            return None

        def line(low: float, high: float) -> float:
            return low + (high - low) * share

        sent = tuple(
            (times, line(low, high)) for (times, low), (_, high) in zip(self.sent, other.sent, strict=True)
        )  # fmt: skip
        return self._replace(
            flops=line(self.flops, other.flops), squares=line(self.squares, other.squares),
            moved=line(self.moved, other.moved), total=line(self.total, other.total),
            results=tuple(map(line, self.results, other.results)), sent=sent,
        )  # fmt: skip


def _kind(load: Load) -> tuple[object, ...]:
    times = tuple(times for times, _ in load.sent)
    return load.flops > 0, load.dtype, load.kind, load.width, load.apart, len(load.results), load.link, load.axis, times


def node_times(program: Program, machine: Machine, adds: bool = False, rows: float = 1.0) -> dict[fx.Node, float]:
    """The time of every call of a LOCAL program on one micro-batch, in us (roofline: products or memory). adds: of a
    later one, as of `loads_of`. rows: how many times the mean the busiest rank has of those that are with their
    experts."""
    times = {node: load_us(load, program.mesh, machine) for node, load in loads_of(program, adds).items()}
    return times if rows == 1 else {node: us * (rows if _has_owned(node) else 1) for node, us in times.items()}


def _has_owned(node: fx.Node) -> bool:
    """True for a call on rows that are with their owners, or go there or come back."""
    layouts = (layout for one in (node, *operand_nodes(node)) for layout in record(one).layouts)
    return any(layout is not None and layout.owned for layout in layouts)


def loads_of(program: Program, adds: bool = False) -> dict[fx.Node, Load | None]:
    """What every call of a LOCAL program asks for on one micro-batch; None of those that take no time. adds: of one
    that reads what earlier micro-batches made of the values that it leaves as parts of sums."""
    sizes = _Sizes(program.mesh)
    loads = {node: _load(node, program.mesh, sizes) for node in program.calls()}
    parts = (node for node, out in program.leaving if adds and out.kind == "part")
    for node in parts:
        load = loads.get(node) if node is not None else None
        if node is not None and load is not None and not load.link:
            loads[node] = load._replace(total=float(sizes[node]))
    return loads


class LazyTimes(dict[fx.Node, float]):
    """The times of `node_times`, each worked out when it is asked for."""

    def __init__(self, program: Program, machine: Machine) -> None:
        super().__init__()
        self.mesh, self.machine, self.sizes = program.mesh, machine, _Sizes(program.mesh)

    def __missing__(self, node: fx.Node) -> float:
        self[node] = load_us(_load(node, self.mesh, self.sizes), self.mesh, self.machine)
        return self[node]


class _Sizes(dict[fx.Node, int]):
    """Bytes of a rank's part of values, each worked out when it is asked for."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def __missing__(self, node: fx.Node) -> int:
        self[node] = local_bytes(node, self.mesh)
        return self[node]


def load_us(load: Load | None, mesh: Mesh, machine: Machine) -> float:
    """The time of a call on a machine."""
    if load is None:
        return 0.0
    if not load.link:
        return _computed_us(load, machine)
    if load.link == COPY:
        return sum(times * machine.copy_us(size) for times, size in load.sent)
    group = group_of(mesh, load.axis, machine.ranks)
    if load.link not in (RING, TURNS):
        return _moved_us(load, group, machine)
    on_link = sum(times * machine.message_us(size, group) for times, size in load.sent)
    if load.link == TURNS:  # each rank waits for those before it, and those after it for each
        return on_link + mesh[load.axis] * _computed_us(load, machine)
    return max(on_link, _computed_us(load, machine))  # the slower one, which hides the other


def _computed_us(load: Load, machine: Machine) -> float:
    hidden = load.squares * (1 - machine.square(load.width)) if load.squares else 0.0
    took = machine.call_us(load.flops - hidden, load.dtype, load.moved + load.total, load.kind)
    if load.apart and machine.is_host:  # each reads and writes as much
        took = load.apart / 2 * machine.call_us(0.0, load.dtype, 2 * load.results[0])
    if sum(load.results) < FRESH:
        return took
    return took + sum(map(machine.fresh_us, load.results))


def _moved_us(load: Load, group: RankGroup, machine: Machine) -> float:
    """The time of a collective; what one rank adds up, or has, moves nothing."""
    ((_, bytes_),) = load.sent
    if group.size == 1:
        return 0.0
    if load.link == MESSAGE:
        return machine.message_us(bytes_, group)
    whole = bytes_ * (group.size if load.link == "all_to_all" else 1)  # of which each rank has a part before and after
    return machine.collective_us(load.link, whole, group)


def _load(node: fx.Node, mesh: Mesh, sizes: Mapping[fx.Node, int]) -> Load | None:
    if is_getitem(node) or is_view(node):
        return None
    if node.target in COPIES:
        return Load(link=COPY, sent=((1, sizes[node]),))
    if is_mesh_op(node.target):
        if not is_collective(node.target):
            return None
        link = MESSAGE if goes_to_one(node, mesh) else collective_of(node.target).timed_as
        return Load(link=link, axis=str(node.args[1]), sent=((1, moved_type(node, mesh).bytes_),))
    computed = _computed(node, mesh, sizes)
    if not is_ring(node.target):
        return computed
    sent = tuple((message.times, message.type.bytes_) for message in messages_of(node, mesh))
    return computed._replace(link=TURNS if node.target is CHAIN_IN_TURNS else RING, axis=axis_of(node), sent=sent)


def _computed(node: fx.Node, mesh: Mesh, sizes: Mapping[fx.Node, int]) -> Load:
    operands = operand_nodes(node)
    moved, results = moved_bytes(node, operands, sizes), _results(node, mesh, sizes)
    if not record(node).flops:
        return Load(moved=moved, kind=_kind_of_norm(node), apart=APART.get(node.target, 0), results=results)
    dtype = str(record(operands[0]).type.dtype).removeprefix("torch.")
    kind = next((kind for kind in (ATTENTION, CONVOLUTION) if kind in str(node.target)), "")
    return Load(*_flops(node, mesh), dtype, kind, moved, results=results)


def _kind_of_norm(node: fx.Node) -> str:
    group = fused_of(node)
    targets = {node.target} if group is None else {call.target for call in group.graph.nodes}
    return "" if NORMS.isdisjoint(targets) else NORM


def _flops(node: fx.Node, mesh: Mesh) -> tuple[float, float, int]:
    """`flops`, `squares` and `width` of a product's load."""
    each, pairs = record(node).flops / ranks_of(node, mesh), causal_pairs(node, mesh)
    if pairs is None:
        return each, 0.0, 0
    whole = each * pairs.ranks
    return whole * (pairs.before + pairs.squares), whole * pairs.squares, pairs.width


def least_flops(node: fx.Node, mesh: Mesh) -> float:
    """The FLOPs of a product on one rank, of causal attention without what its mask hides."""
    flops, squares, _ = _flops(node, mesh)
    return flops - squares / 2


def _results(node: fx.Node, mesh: Mesh, sizes: Mapping[fx.Node, int]) -> tuple[float, ...]:
    if node.target in OVER:
        return ()
    if len(record(node).types) == 1:
        return (sizes[node],)
    return tuple(type_.bytes_ for type_ in local_types(node, mesh))


def ranks_of(node: fx.Node, mesh: Mesh) -> int:
    """The ranks among which a product is divided."""
    known = record(node)
    layouts = [layout for layout in (*known.layouts, *known.operands) if layout is not None]
    return math.prod(mesh[axis] for axis in {axis for layout in layouts for axis in layout.axes})


def by_origin(program: Program, times: Mapping[fx.Node, float]) -> dict[tuple[str, str], float]:
    """The time of the backward pass by module and source line: it belongs to the forward calls of that line."""
    found: dict[tuple[str, str], float] = {}
    for node, time in times.items():
        known = record(node)
        if known.is_backward:
            key = (known.module, known.source)
            found[key] = found.get(key, 0.0) + time
    return found
