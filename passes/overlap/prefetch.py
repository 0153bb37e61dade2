"""prefetch: the parameters of the next layer are gathered while one computes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, TypeVar

from torch import fx

from autopar.ir.mesh import axes_of_group
from autopar.ir.modules import unit_of
from autopar.ir.ops.measure import group_of, local_bytes
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, is_given, record
from autopar.machines import Machine
from autopar.machines.model import RankGroup
from autopar.passes.overlap.coalesce import Coalesced, MovesNow, Together

T = TypeVar("T")
MADE_BY = "prefetch"


def prefetch(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. What ZeRO gathers is started a layer ahead and awaited where it is used.

        LOCAL program on fsdp=2
        %a: f32[4,8] of [8,8] [fsdp,-] = parameter "layers.0.weight"
        %b: f32[4,8] of [8,8] [fsdp,-] = parameter "layers.1.weight"
        %x: f32[2,8] of [4,8] [fsdp,-] = batch "0"
        %all_gather: f32[8,8] [-,-] = autopar.all_gather.default(%a, "fsdp", 0, 1)   # layers.0
        %einsum: f32[2,8] of [4,8] [fsdp,-] = autopar.einsum.default(%x, %all_gather, "ca,ba->cb")   # layers.0
        %all_gather_1: f32[8,8] [-,-] = autopar.all_gather.default(%b, "fsdp", 0, 1)   # layers.1
        %einsum_1: f32[2,8] of [4,8] [fsdp,-] = autopar.einsum.default(%einsum, %all_gather_1, "ca,ba->cb")
        %all_gather_2: f32[4,8] [-,-] = autopar.all_gather.default(%einsum_1, "fsdp", 0, 1)
        return value "y" = %all_gather_2
    becomes
        LOCAL program on fsdp=2
        %a: f32[4,8] of [8,8] [fsdp,-] = parameter "layers.0.weight"
        %b: f32[4,8] of [8,8] [fsdp,-] = parameter "layers.1.weight"
        %x: f32[2,8] of [4,8] [fsdp,-] = batch "0"
        %all_gather_start: f32[8,8] [-,-] = autopar.all_gather_start.default(%a, "fsdp", 0, 1)
        %wait: f32[8,8] [-,-] = autopar.wait.default(%all_gather_start)
        %all_gather_start_1: f32[8,8] [-,-] = autopar.all_gather_start.default(%b, "fsdp", 0, 1)
        %einsum: f32[2,8] of [4,8] [fsdp,-] = autopar.einsum.default(%x, %wait, "ca,ba->cb")
        %wait_1: f32[8,8] [-,-] = autopar.wait.default(%all_gather_start_1)
        %einsum_1: f32[2,8] of [4,8] [fsdp,-] = autopar.einsum.default(%einsum, %wait_1, "ca,ba->cb")
        %all_gather_2: f32[4,8] [-,-] = autopar.all_gather.default(%einsum_1, "fsdp", 0, 1)
        return value "y" = %all_gather_2

    So no more than two layers are whole at once. Small parameters of a layer move together, if the copies that this
    takes cost less than the starts that it saves; `bucket_bytes` says otherwise. PyTorch FSDP, arXiv 2304.11277,
    section 3.3.
    """
    return _Prefetch(program, plan).run() if plan.zero_axes else program


def small_limit(machine: Machine, group: RankGroup, asked: int | None) -> float:
    """The bytes from which on a parameter moves alone: until then copying it, there and back, takes less than the start
    of a gather. asked: `StepOptions.bucket_bytes`."""
    return asked or machine.start_us("all_gather", group) * machine.device.bandwidth / 2e6


@dataclass(slots=True, eq=False)  # frozen ones take twice as long to make, and a search of plans makes a million
class Gather(Generic[T]):
    """A gather of a parameter as `Ahead` takes it. of: whose. layer: what starts with it. over: of which ranks. alike:
    what those that move together have in common beside that. bytes_: of its result. alone: True if it moves with none.
    """

    of: T
    layer: Hashable
    over: Hashable
    alike: Hashable
    bytes_: float
    alone: bool = False


class Ahead(Generic[T]):
    """Decide when parameters are gathered, and which of them move as one. The pass writes nodes by these decisions,
    the planner counts their time and bytes."""

    def __init__(self, gathers: Iterable[Gather[T]], small: Callable[[Any], float]) -> None:
        """gathers: in the order of their uses. small: bytes from which on one moves alone, by ranks."""
        limits: dict[Hashable, float] = {}
        self.layers: list[list[Together[Gather[T]]]] = []
        self.place: dict[Gather[T], tuple[int, Together[Gather[T]]]] = {}
        for number, (_, own) in enumerate(groupby(gathers, key=lambda gather: gather.layer)):
            bundles: list[Together[Gather[T]]] = []
            open_: dict[Hashable, Together[Gather[T]]] = {}
            for gather in own:
                if gather.over not in limits:
                    limits[gather.over] = small(gather.over)
                key = gather.over, gather.alike
                is_alone = gather.alone or gather.bytes_ >= limits[gather.over]
                bundle = None if is_alone else open_.get(key)
                if bundle is None:
                    bundle = Together()
                    bundles.append(bundle)
                    if not is_alone:
                        open_[key] = bundle
                bundle.add(gather, gather.bytes_)
                self.place[gather] = number, bundle
            self.layers.append(bundles)
        self.begun = 0  # layers whose gathers are started
        self.there: set[Together[Gather[T]]] = set()  # those that were awaited

    def use(self, gather: Gather[T]) -> Iterator[MovesNow[Gather[T]]]:
        """What to do where a gathered parameter is used: no more than two layers are whole at once."""
        number, bundle = self.place[gather]
        if self.begun <= number:
            yield from self._begin(number + 1)
        if bundle not in self.there:
            self.there.add(bundle)
            yield MovesNow(False, bundle)
        if self.begun <= number + 1:
            yield from self._begin(number + 2)

    def _begin(self, end: int) -> Iterator[MovesNow[Gather[T]]]:
        """Start what layers gather, up to `end`."""
        for bundles in self.layers[self.begun : end]:
            for bundle in bundles:
                yield MovesNow(True, bundle)
        self.begun = end


class _Prefetch:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.axes = program, set(plan.zero_axes)
        self.build = Builder(MADE_BY)
        self.flat = Coalesced(self.build, program.mesh)
        self.plan = plan
        self.starts: dict[Together[Gather[fx.Node]], fx.Node] = {}
        self.gathers = {node: self._gather(node) for node in self.program.calls() if self._is_early(node)}
        self.ahead = Ahead(self.gathers.values(), self._small)

    def run(self) -> Program:
        return self.build.rewrite(self.program, self._put)

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node not in self.gathers:
            return None
        for starts, bundle in self.ahead.use(self.gathers[node]):
            nodes = [gather.of for gather in bundle.members]
            if starts:
                self._start(bundle, nodes)
            else:
                self.flat.finish(nodes, self.starts.pop(bundle))
        return self.build.value[node]

    def _start(self, bundle: Together[Gather[fx.Node]], nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            source = node.all_input_nodes[0]
            if source not in self.build.value:
                self.build.copy(source)
        self.starts[bundle] = self.flat.start(nodes, record(nodes[0]).reason)

    def _gather(self, node: fx.Node) -> Gather[fx.Node]:
        known, axis = record(node), str(node.args[1])
        layer, bytes_ = (known.phase, unit_of(known.module)), local_bytes(node, self.program.mesh)
        return Gather(node, layer, axis, known.type.dtype, bytes_, _is_mirrored(node))

    def _small(self, axis: str) -> float:
        machine, asked = self.plan.fixed.machine, self.plan.options.bucket_bytes
        return small_limit(machine, group_of(self.plan.mesh, axis, machine.ranks), asked)

    def _is_early(self, node: fx.Node) -> bool:
        """True for a gather of what is there before the step begins: a parameter, or one in another dtype."""
        moves = node.target is op("all_gather") and self.axes.issuperset(axes_of_group(str(node.args[1])))
        return moves and is_given(node.all_input_nodes[0])


def _is_mirrored(node: fx.Node) -> bool:
    """True for a gather of mirrored pieces, which are no rows of a flat value: of keys that a micro-batch saved."""
    outer = node.args[3]
    return isinstance(outer, int) and outer < 0
