"""host_parameters: parameters wait in the host's memory until a layer reads them, and gradients leave as they come."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from autopar.ir.modules import unit_of
from autopar.ir.ops.ops import AWAITED, TO_DEVICE, TO_HOST
from autopar.ir.ops.storage import is_view
from autopar.ir.plan import Plan
from autopar.ir.program import CAST, HOST, PARTNER, Builder, Program, Record, record, set_record
from autopar.passes.offload.place_copies import BEHIND, CallLine, Ways

MADE_BY = "host_parameters"
AHEAD = 1  # layers that a parameter comes before its use, as one that is gathered does


def host_parameters(program: Program, plan: Plan) -> Program:
    """LOCAL -> LOCAL. Parameters lie in the host's memory: a copy comes a layer ahead, for each pass anew, and their
    gradients leave as soon as they are there.

        offload: "parameters"
        LOCAL program
        %a: f32[8,8] [-,-] = parameter "layers.0.weight"
        %x: f32[4,8] [-,-] = batch "0"
        %einsum: f32[4,8] [-,-] = autopar.einsum.default(%x, %a, "ca,ba->cb")   # layers.0
        %sum_1: f32[] [] = aten.sum.default(%einsum)   # loss
        %einsum_1: f32[8,8] [-,-] = autopar.einsum.default(%einsum, %x, "cb,ca->ba")   # layers.0  backward
        return loss "loss" = %sum_1
        return gradient "layers.0.weight" = %einsum_1
    becomes
        LOCAL program
        %a: f32[8,8] [-,-] in host = parameter "layers.0.weight"
        %x: f32[4,8] [-,-] = batch "0"
        %a_load: f32[8,8] [-,-] = autopar.to_device_start.default(%a)
        %a_here: f32[8,8] [-,-] = autopar.wait.default(%a_load)
        %einsum: f32[4,8] [-,-] = autopar.einsum.default(%x, %a_here, "ca,ba->cb")   # layers.0
        %sum_1: f32[] [] = aten.sum.default(%einsum)
        %einsum_1: f32[8,8] [-,-] = autopar.einsum.default(%einsum, %x, "cb,ca->ba")   # layers.0  backward
        %einsum_1_out: f32[8,8] [-,-] in host = autopar.to_host_start.default(%einsum_1, True)
        %einsum_1_left: f32[8,8] [-,-] in host = autopar.wait.default(%einsum_1_out)
        return loss "loss" = %sum_1
        return gradient "layers.0.weight" = %einsum_1_left

    - Casts and views of a parameter are made of what came, each time.
    - What the last layer reads in both passes comes once: no other layer lies between.
    - With ZeRO-3 it is a rank's part that comes, and that is gathered a layer ahead then.

    It stands behind `prefetch` and `bucket`: what comes, comes before the gather that reads it; what leaves has been
    summed. ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857.
    """
    if not plan.offloads("parameters"):
        return program
    return _HostParameters(program, plan).run()


@dataclass(eq=False, slots=True)
class _Stay:
    """One time that a parameter is on the device: from the first to the last call that reads it. value: what stands for
    it, and for casts and views of it, there."""

    parameter: fx.Node
    uses: list[fx.Node] = field(default_factory=list)
    load: fx.Node | None = None
    value: dict[fx.Node, fx.Node] = field(default_factory=dict)


class _HostParameters:
    def __init__(self, program: Program, plan: Plan) -> None:
        horizon = plan.options.horizon
        self.line = CallLine(program, Ways(horizon, plan.fixed.machine))
        self.ahead = AHEAD if horizon == "auto" else horizon
        self.program, self.build = program, Builder(MADE_BY)
        self.own = {node: node for node, entry in program.parameters() if not entry.name.startswith(PARTNER)}
        for node in program.calls():  # casts and views, by what they are of
            source = node.all_input_nodes[0] if node.all_input_nodes else None
            if source in self.own and (node.target is CAST or is_view(node)):
                self.own[node] = self.own[source]
        self.stays: dict[tuple[fx.Node, fx.Node], _Stay] = {}  # by user and parameter
        self.begins: dict[int, list[_Stay]] = defaultdict(list)
        self.first = next(i for i, node in enumerate(self.line.nodes) if node.op != "placeholder")
        for stay in self._stays():
            self.begins[self._begin(stay)].append(stay)
        self.leaving = {node for node, out in program.leaving if out.kind == "gradient" and node is not None}
        self.ends: dict[int, list[fx.Node]] = defaultdict(list)
        self.left: dict[fx.Node, fx.Node] = {}  # gradients -> what goes, and has gone

    def run(self) -> Program:
        for place, node in enumerate(self.line.nodes):
            for gradient in self.ends.pop(place, ()):
                self._end(gradient)
            for stay in self.begins.get(place, ()):
                self._load(stay)
            if node.op == "output":
                self._output(node)
            elif node.op == "placeholder" and node in self.own:
                self.build.copy(node, like=record(node).with_(tier=HOST))
            elif node not in self.own:
                self.build.copy(node, partial(self._read, user=node))
            if node in self.leaving and node not in self.own:
                self._leave(node, place)
        return self.program.with_(graph=self.build.graph)

    def _stays(self) -> list[_Stay]:
        """All of them, of each parameter in the order of its uses: one for each layer and pass that reads it, but for
        what is read again before another layer is."""
        found, users = list[_Stay](), defaultdict[fx.Node, list[fx.Node]](list)
        for node in self.line.nodes:
            if node not in self.own:
                for parameter in dict.fromkeys(self.own[one] for one in node.all_input_nodes if one in self.own):
                    users[parameter].append(node)
        for parameter, reading in users.items():
            last: _Stay | None = None
            known: dict[tuple[bool, str], _Stay] = {}
            for user in reading:
                key = self.line.position[user] >= self.line.begins_back, unit_of(record(user).module)
                stay = known.get(key)
                if stay is None and last is not None and self._is_near(last.uses[-1], user):
                    stay = last
                if stay is None:
                    stay = _Stay(parameter)
                    found.append(stay)
                last = known[key] = stay
                stay.uses.append(user)
                self.stays[user, parameter] = stay
        return found

    def _is_near(self, before: fx.Node, user: fx.Node) -> bool:
        """True if at most one other layer (the loss) computes between two calls."""
        between = self.line.nodes[self.line.position[before] : self.line.position[user]]
        own = {unit_of(record(node).module) for node in (before, user)}
        others = set[str]()
        for node in between:
            others |= {unit_of(record(node).module)} - own
            if len(others) > 1:
                return False
        return True

    def _begin(self, stay: _Stay) -> int:
        """The place where a copy starts: some layers ahead of its first use, in the same pass."""
        line, use = self.line, self.line.position[stay.uses[0]]
        begin = line.begins_back if use >= line.begins_back else self.first
        return min(use, line.first(begin, line.end, line.begun[use] - self.ahead))

    def _load(self, stay: _Stay) -> None:
        parameter = stay.parameter
        like = _like(record(parameter), stay.uses[0], reason="parameters wait in the host's memory")
        stay.load = self.build.call(TO_DEVICE, self.build.value[parameter], like=like, name=f"{parameter.name}_load")

    def _read(self, old: fx.Node, user: fx.Node) -> fx.Node:
        """What a call reads in place of an old operand."""
        return self._here(old, self.stays[user, self.own[old]]) if old in self.own else self.build.value[old]

    def _here(self, old: fx.Node, stay: _Stay) -> fx.Node:
        """A parameter, or a cast or view of it, on the device."""
        if old not in stay.value:
            if old is stay.parameter:
                like = _like(record(old), stay.uses[0])
                made = self.build.call(AWAITED, stay.load, like=like, name=f"{old.name}_here")
            else:
                args, kwargs = fx.node.map_arg((old.args, dict(old.kwargs)), lambda one: self._here(one, stay))
                like = record(old).with_(phase=record(stay.uses[0]).phase)
                made = self.build.call(old.target, *args, like=like, name=old.name, **kwargs)  # type: ignore[arg-type]
            stay.value[old] = made
        return stay.value[old]

    def _leave(self, gradient: fx.Node, place: int) -> None:
        """Start to copy a gradient out; it is awaited a layer later."""
        like = record(gradient).with_(origin="", operands=record(gradient).layouts, flops=0, tier=HOST,
                                      reason="gradients wait in the host's memory")  # fmt: skip
        made = self.build.value[gradient]
        self.left[gradient] = self.build.call(TO_HOST, made, True, like=like, name=f"{gradient.name}_out")
        line = self.line
        self.ends[max(place + 1, line.first(place, line.end, line.begun[place] + BEHIND + 1))].append(gradient)

    def _end(self, gradient: fx.Node) -> None:
        started = self.left[gradient]
        like = record(started).with_(reason="")
        self.left[gradient] = self.build.call(AWAITED, started, like=like, name=f"{gradient.name}_left")

    def _output(self, node: fx.Node) -> None:
        results = list[Any]()
        for result, out in self.program.leaving:
            if out.kind == "gradient" and result is not None and result not in self.own:
                results.append(self.left[result])
            else:
                results.append(result and self._read(result, node))
        made = self.build.graph.output(tuple(results))
        set_record(made, record(node))


def _like(known: Record, user: fx.Node, reason: str = "") -> Record:
    """The record of a parameter that comes for a call."""
    where = record(user)
    return known.with_(
        origin="", operands=known.layouts, flops=0, reason=reason, phase=where.phase, module=where.module
    )
