"""prefetch: the parameters of the next layer are gathered while one computes."""

from __future__ import annotations

from itertools import groupby

from torch import fx

from autopar.ir.measure import local_bytes
from autopar.ir.modules import unit_of
from autopar.ir.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, is_given, record
from autopar.passes.coalesce import Coalesced

MADE_BY = "prefetch"


def prefetch(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. What ZeRO gathers is started a layer ahead and awaited where it is used.

        %all_gather: f32[64,8] = autopar.all_gather.default(%w, 'dp', 0, 1)      %w of layer 3
    becomes
        %all_gather_start = autopar.all_gather_start.default(%w, 'dp', 0, 1)     before layer 2 computes
        %wait = autopar.wait.default(%all_gather_start)                          where layer 3 uses it

    So no more than two layers are whole at once. Small parameters of a layer move together, if the copies that this
    takes cost less than the starts that it saves; `bucket_bytes` says otherwise. PyTorch FSDP, arXiv 2304.11277,
    section 3.3.
    """
    if plan.zero_axis is None:
        return program
    return _Prefetch(program, plan, plan.zero_axis).run()


class _Prefetch:
    def __init__(self, program: Program, plan: Plan, axis: str) -> None:
        self.program, self.axis = program, axis
        self.build = Builder(MADE_BY)
        self.flat = Coalesced(self.build, program.mesh)
        machine = plan.fixed.machine
        self.small = plan.options.bucket_bytes or machine.latency_us * machine.memory_bytes_per_us / 2
        self.starts: dict[fx.Node, fx.Node] = {}  # of the first node of a bundle

    def run(self) -> Program:
        layers = self._layers()
        place = {node: (i, bundle) for i, layer in enumerate(layers) for bundle in layer for node in bundle}
        begun = 0
        for node in self.program.graph.nodes:
            if node in place:
                i, bundle = place[node]
                begun = self._begin(layers, begun, i + 1)
                if bundle[0] in self.starts:
                    self.flat.finish(bundle, self.starts.pop(bundle[0]))
                begun = self._begin(layers, begun, i + 2)
            elif node not in self.build.value:
                self.build.copy(node)
        return self.program.with_(graph=self.build.graph)

    def _begin(self, layers: list[list[list[fx.Node]]], begun: int, end: int) -> int:
        """Start what layers gather, up to `end`."""
        for layer in layers[begun:end]:
            for bundle in layer:
                for node in bundle:
                    source = node.all_input_nodes[0]
                    if source not in self.build.value:
                        self.build.copy(source)
                self.starts[bundle[0]] = self.flat.start(bundle, record(bundle[0]).reason)
        return max(begun, min(end, len(layers)))

    def _layers(self) -> list[list[list[fx.Node]]]:
        """The gathers by layer, in the order of their first use; those of a layer in bundles that move together."""
        gathers = [node for node in self.program.calls() if self._is_early(node)]
        found = []
        for _, nodes in groupby(gathers, key=lambda node: (record(node).phase, unit_of(record(node).module))):
            bundles: list[list[fx.Node]] = []
            small: dict[object, list[fx.Node]] = {}
            for node in nodes:
                dtype = record(node).type.dtype
                if local_bytes(node, self.program.mesh) >= self.small:
                    bundles.append([node])
                elif dtype in small:
                    small[dtype].append(node)
                else:
                    small[dtype] = [node]
                    bundles.append(small[dtype])
            found.append(bundles)
        return found

    def _is_early(self, node: fx.Node) -> bool:
        """True for a gather of what is there before the step begins: a parameter, or one in another dtype."""
        moves = node.target is op("all_gather") and node.args[1] == self.axis
        return moves and is_given(node.all_input_nodes[0])
