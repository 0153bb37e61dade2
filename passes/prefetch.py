"""prefetch: the parameters of the next layer are gathered while one computes."""

from __future__ import annotations

from itertools import groupby

from torch import fx

from autopar.ir.measure import group_of, local_bytes
from autopar.ir.mesh import axes_of_group
from autopar.ir.modules import unit_of
from autopar.ir.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, is_given, record
from autopar.machines import Machine
from autopar.machines.model import Group
from autopar.passes.coalesce import Coalesced

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


def small_limit(machine: Machine, group: Group, asked: int | None) -> float:
    """The bytes from which on a parameter moves alone: until then copying it, there and back, takes less than the start
    of a gather. asked: `StepOptions.bucket_bytes`."""
    return asked or machine.start_us("all_gather", group) * machine.device.bandwidth / 2e6


class _Prefetch:
    def __init__(self, program: Program, plan: Plan) -> None:
        self.program, self.axes = program, set(plan.zero_axes)
        self.build = Builder(MADE_BY)
        self.flat = Coalesced(self.build, program.mesh)
        self.plan = plan
        self.starts: dict[fx.Node, fx.Node] = {}  # of the first node of a bundle
        self.layers = self._layers()
        self.place = {node: (i, bundle) for i, layer in enumerate(self.layers) for bundle in layer for node in bundle}
        self.begun = 0  # layers whose gathers are started

    def run(self) -> Program:
        return self.build.rewrite(self.program, self._put)

    def _put(self, node: fx.Node) -> fx.Node | None:
        if node not in self.place:
            return None
        i, bundle = self.place[node]
        self._begin(i + 1)
        if bundle[0] in self.starts:
            self.flat.finish(bundle, self.starts.pop(bundle[0]))
        self._begin(i + 2)
        return self.build.value[node]

    def _begin(self, end: int) -> None:
        """Start what layers gather, up to `end`."""
        for layer in self.layers[self.begun : end]:
            for bundle in layer:
                for node in bundle:
                    source = node.all_input_nodes[0]
                    if source not in self.build.value:
                        self.build.copy(source)
                self.starts[bundle[0]] = self.flat.start(bundle, record(bundle[0]).reason)
        self.begun = max(self.begun, end)

    def _layers(self) -> list[list[list[fx.Node]]]:
        """The gathers by layer, in the order of their first use; those of a layer in bundles that move together."""
        gathers = [node for node in self.program.calls() if self._is_early(node)]
        found = []
        for _, nodes in groupby(gathers, key=lambda node: (record(node).phase, unit_of(record(node).module))):
            bundles: list[list[fx.Node]] = []
            small: dict[object, list[fx.Node]] = {}
            for node in nodes:
                alike = node.args[1], record(node).type.dtype  # what moves together
                if local_bytes(node, self.program.mesh) >= self._small(str(node.args[1])) or _is_mirrored(node):
                    bundles.append([node])
                elif alike in small:
                    small[alike].append(node)
                else:
                    small[alike] = [node]
                    bundles.append(small[alike])
            found.append(bundles)
        return found

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
