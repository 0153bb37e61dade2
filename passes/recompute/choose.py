"""Choose the forward calls that the backward pass computes again."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import accumulate

from torch import fx

from autopar.ir.ops.ops import collective_of, is_collective, op
from autopar.ir.plan import Plan
from autopar.ir.program import Program, operand_nodes, record
from autopar.passes.costs.node_costs import local_bytes, node_times
from autopar.passes.offload.choose_moves import Kept, kept_of
from autopar.passes.offload.place_copies import CallLine, Ways, first_uses
from autopar.passes.pipeline.cuts.when import times_of
from autopar.passes.recompute.budget import Elsewhere, Layer, within
from autopar.passes.recompute.graph import Forward, ForwardCall, forward_of, inputs_that_vary, is_backward, is_costly
from autopar.passes.recompute.min_cut import CutChoice, CutValue, LayerProblem, least
from autopar.passes.recompute.policies import Policies, PolicyRule
from autopar.passes.recompute.rematerialize import RecomputedCall

# Find the attention core: cheap products of activations, and what lies between them.

# Operations for each byte of a product's result: about what a GPU does while it writes that byte and reads it again.
# Products over the width of a head (64 to 256 in 16 bits) are below, those over the width of a model are above.
_FLOPS_PER_BYTE = 256.0
WAIT = op("wait")


def attention_core(program: Program) -> frozenset[fx.Node]:
    """The nodes on a way from one product of two activations to another, without the last: q k^T, softmax and dropout
    where attention is written out (arXiv 2205.05198, section 5).

    Their values grow with the square of the sequence, and little work is in each. A product with a weight ends a way,
    and so does a collective. A product of activations that takes longer than its result's memory does not begin one.
    """
    varies: set[fx.Node] = set(inputs_that_vary(program))
    forward = [node for node in program.calls() if not is_backward(node)]
    products: set[fx.Node] = set()
    after: set[fx.Node] = set()
    for node in forward:
        operands = operand_nodes(node)
        if any(operand in varies for operand in node.all_input_nodes):
            varies.add(node)
        if record(node).flops and record(node).is_tensor and all(operand in varies for operand in operands):
            products.add(node)
            if record(node).flops <= _FLOPS_PER_BYTE * record(node).type.bytes_:
                after.add(node)
        elif not _ends(node) and any(operand in after for operand in node.all_input_nodes):
            after.add(node)
    before: set[fx.Node] = set()
    for node in reversed(forward):
        if any(user in products or (user in before and not _ends(user)) for user in node.users):
            before.add(node)
    return frozenset(after & before)


def routes_of(node: fx.Node) -> list[fx.Node]:
    """By which ways a collective sends rows to their owners, or back; and itself, if a row is a number (a weight)."""
    moves_rows = is_collective(node.target) and node.target is not WAIT and collective_of(node.target).owned is not None
    is_number = moves_rows and math.prod(record(node).type.shape[1:]) == 1
    return [*operand_nodes(node)[1:], *([node] if is_number else [])] if moves_rows else []


def _of_parameters(program: Program) -> frozenset[fx.Node]:
    """Parameters, and what is made of nothing else."""
    made = {node for node, _ in program.parameters()}
    for node in program.calls():
        if node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    return frozenset(made)


def _ends(node: fx.Node) -> bool:
    return bool(record(node).flops) or is_collective(node.target)


def choose(program: Program, plan: Plan, policies: Policies, full: Callable[[], int]) -> dict[fx.Node, RecomputedCall]:
    """The calls of the forward pass that the backward pass computes again, in the order of their policies.

    full: gives the bytes that are saved if all layers are computed again, for the message of a PlanError.
    """
    return _Choice(program, plan, policies, full).run()


class _Choice:
    def __init__(self, program: Program, plan: Plan, policies: Policies, full: Callable[[], int]) -> None:
        self.program, self.plan, self.policies, self.full = program, plan, policies, full
        self.forward: Forward = forward_of(program)
        self.once = self._once()
        self.whole = self._whole()
        self.parameters = _of_parameters(program)
        selective = any(rule.policy == "selective" for rule in policies.rules)
        self.core = attention_core(program) if selective else frozenset()

    def run(self) -> dict[fx.Node, RecomputedCall]:
        self.groups = self._groups()
        recomputed_calls = {
            node: RecomputedCall(group, f"recomputed: full ('{group}')") for node, group in self.whole.items()
        }
        for rule in self.policies.rules:
            if rule.policy == "selective":
                recomputed_calls |= self._selective(rule)
            elif not isinstance(rule.policy, str):
                recomputed_calls |= self._budget(rule, rule.policy)
        return recomputed_calls

    def _whole(self) -> dict[fx.Node, str]:
        """The calls in modules that are computed again as a whole, with the module."""
        found = {call.node: self.policies.whole(record(call.node).module) for call in self.forward.calls}
        return {node: group for node, group in found.items() if group and node not in self.once}

    def _once(self) -> frozenset[fx.Node]:
        """What a pipeline computes once, for all micro-batches, or beside its gradients: there is nothing to save. And
        the ways of rows to their experts, for which the host waits."""
        routes = frozenset(route for call in self.forward.calls for route in routes_of(call.node))
        if not self.plan.is_staged:
            return routes
        times = times_of(self.program, self.plan.parts)
        return routes.union(call.node for call in self.forward.calls if not times.is_forward(call.node))

    # -- who needs what -----------------------------------------------------------------------------------------

    def _groups(self) -> dict[fx.Node, frozenset[str]]:
        """The groups of the backward pass that need a call, maybe by way of what they compute again of it.

        A call that only one group needs can be computed again there, and dies there. One that several need would live
        as long as if it were kept, and so would all that is computed of it.
        """
        nodes: dict[fx.Node, frozenset[str]] = {}
        for call in reversed(self.forward.calls):
            groups: set[str] = set()
            for value in call.values:
                groups.update(self.policies.group(record(user).module) for user in self.forward.needed.get(value, ()))
                for user in self.forward.users.get(value, ()):
                    if user.node in self.whole:
                        groups.add(self.whole[user.node])
                    elif self._may(user, nodes[user.node]):
                        groups |= nodes[user.node]
            nodes[call.node] = frozenset(groups)
        return nodes

    def _may(self, call: ForwardCall, groups: frozenset[str]) -> bool:
        """True for a call that may be computed again where that is worth it."""
        policy = self.policies.policy(record(call.node).module)
        return (
            policy not in ("none", "full")
            and any(type_ is not None and type_.shape for type_ in record(call.node).types)  # a number is not worth it
            and len(groups) == 1
            and call.node not in self.once
            and (not is_costly(call.node) or (policy == "selective" and call.node in self.core))
            and not self._brings(call)
        )

    def _brings(self, call: ForwardCall) -> bool:
        """True for a call that would bring a parameter once more, from other ranks or from the host, and gives less
        than that: a table of embeddings."""
        if not (self.plan.gathers_again or self.plan.offloads("parameters")):
            return False
        given = sum(local_bytes(value, self.program.mesh) for value in call.values)
        parameters = (operand for operand in call.node.all_input_nodes if operand in self.parameters)
        return any(local_bytes(operand, self.program.mesh) > given for operand in parameters)

    def _stays(self, value: fx.Node) -> bool:
        """True for a value that is kept in any case: it enters modules that are computed again as a whole, or the
        backward pass reads it and it is not computed again."""
        call = self.forward.call_of[value]
        users = self.forward.users.get(value, ())
        if any(user.node in self.whole for user in users) and call.node not in self.whole:
            return True
        groups = self.groups[call.node]
        return value in self.forward.needed and not self._may(call, groups)

    # -- the problems of the layers -----------------------------------------------------------------------------

    def _layers(self, rule: PolicyRule) -> list[Layer]:
        """What is to be decided under a rule, group by group."""
        self.times = node_times(self.program, self.plan.fixed.machine)
        members: dict[str, list[ForwardCall]] = {}
        for call in self.forward.calls:
            groups = self.groups[call.node]
            if len(groups) == 1 and self.policies.rule(record(call.node).module) is rule:
                members.setdefault(next(iter(groups)), []).append(call)
        layers = []
        for group, calls in members.items():
            core = frozenset(call.node for call in calls if call.node in self.core)
            layer = self._layer(group, calls, core if rule.policy == "selective" else frozenset())
            if any(time is not None for time in layer.problem.times):
                layers.append(layer)
        return layers

    def _layer(self, group: str, calls: list[ForwardCall], core: frozenset[fx.Node]) -> Layer:
        """core: the only calls that may be computed again; empty for all cheap ones."""
        may = {
            call.node: call
            for call in calls
            if self._may(call, self.groups[call.node]) and (call.node in core if core else not is_costly(call.node))
        }
        read = {value: None for call in calls if call.node in may for value in call.reads}
        sources = (self.forward.call_of[value] for value in read)  # in other layers too: they would have to keep it
        known = list({call.node: call for call in (*calls, *sources)}.values())
        place = {call.node: i for i, call in enumerate(known)}
        values = [value for call in known for value in call.values if call.node in may or not self._stays(value)]
        position = {value: i for i, value in enumerate(values)}
        return Layer(
            group,
            tuple(call.node for call in known),
            LayerProblem(
                tuple(round(1e3 * self.times[call.node]) if call.node in may else None for call in known),
                tuple(tuple(position[value] for value in call.reads if value in position) for call in known),
                tuple(
                    CutValue(place[self.forward.call_of[value].node], self._bytes(value), value in self.forward.needed)
                    for value in values
                ),
            ),
            bool(core),
        )

    def _bytes(self, value: fx.Node) -> int:
        return local_bytes(value, self.program.mesh)

    # -- the policies -------------------------------------------------------------------------------------------

    def _selective(self, rule: PolicyRule) -> dict[fx.Node, RecomputedCall]:
        selective: dict[fx.Node, RecomputedCall] = {}
        solved: dict[LayerProblem, CutChoice] = {}
        for layer in self._layers(rule):
            point = solved.get(layer.problem) or least(layer.problem)
            solved[layer.problem] = point
            selective |= _again(layer, point, "selective, attention core" if layer.is_core else "selective")
        return selective

    def _budget(self, rule: PolicyRule, policy: int | float) -> dict[fx.Node, RecomputedCall]:
        mine = (value for value in self.forward.needed if self.policies.rule(record(value).module) is rule)
        kept = sum(map(self._bytes, mine))
        budget = int(policy * kept) if isinstance(policy, float) else policy
        if budget >= kept:
            return {}
        recomputed_calls: dict[fx.Node, RecomputedCall] = {}
        for layer, point in within(budget, kept, self._layers(rule), rule, self.full, self._elsewhere()):
            recomputed_calls |= _again(layer, point, f"budget of {budget} bytes")
        return recomputed_calls

    def _elsewhere(self) -> Elsewhere | None:
        """What may wait in the host's memory in place of being computed again, where one budget is for both."""
        if not self.plan.offloads("activations") or isinstance(self.plan.options.recompute, Mapping):
            return None
        machine, options = self.plan.fixed.machine, self.plan.options
        line = CallLine(self.program, Ways(options.horizon, machine, stays=not self.plan.is_staged))
        kept = kept_of(line)
        forward, backward = (
            1e3 * sum(time for node, time in self.times.items() if is_backward(node) == is_back)
            for is_back in (False, True)
        )
        most, waits = options.offloaded["activations"], _Waits(line, kept)
        return Elsewhere(most, kept.stays, forward, backward, 1e3 * machine.copy_us(1), waits)


class _Waits:
    """ns that calls wait for copies, by the bytes that move."""

    def __init__(self, line: CallLine, kept: Kept) -> None:
        nodes = {node.name: node for node in line.nodes}
        self.line, self.values = line, [nodes[name] for name in kept.order]
        self.ends = list(accumulate(kept.movable[name] for name in kept.order))
        self.uses = first_uses(line, self.values)

    def __call__(self, moved: int) -> float:
        values = self.values[: bisect_left(self.ends, moved) + 1]
        return 1e3 * self.line.waits_us(values, self.uses)


def _again(layer: Layer, point: CutChoice, what: str) -> dict[fx.Node, RecomputedCall]:
    where = f"'{layer.group}'" if layer.group else "outside of modules"
    return {layer.calls[place]: RecomputedCall(layer.group, f"recomputed: {what} ({where})") for place in point.again}
