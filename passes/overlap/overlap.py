"""overlap: collectives between layers are started early, with gradients of weights computed while they move."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autopar.ir.mesh import is_in_time
from autopar.ir.ops.collective_ops import COLLECTIVES
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.plan import Plan
from autopar.ir.program import Builder, Program, record
from autopar.passes.costs.node_costs import LazyTimes
from autopar.passes.overlap.bucket import sums_of_gradients
from autopar.passes.overlap.coalesce import Coalesced

MADE_BY = "overlap"
WINDOW = 2  # collectives that a gradient waits for at most: its operands live as long
_EINSUM = op("einsum")
_MOVES = frozenset(op(one.name) for one in COLLECTIVES if one.halves and not one.to_one)


def overlap(program: Program, plan: Plan, beside: bool = False) -> Program:
    """LOCAL -> LOCAL. A collective is started as soon as its operand is there, and awaited where it is used.

        machine: 1e3 1e2 1e1 1 0.1
        LOCAL program on tp=2
        %w: f32[2,4] of [4,4] [tp,-] = parameter "w"
        %g: f32[6,2] of [6,4] [-,tp] = batch "0"
        %x: f32[6,4] [-,-] = batch "1"
        %einsum: f32[2,4] of [4,4] [tp,-] = autopar.einsum.default(%g, %x, "cb,ca->ba")   # backward
        %einsum_1: f32[6,4] [-,-] partial(tp) = autopar.einsum.default(%g, %w, "cb,ba->ca")   # backward
        %all_reduce: f32[6,4] [-,-] = autopar.all_reduce.default(%einsum_1, "tp", "sum")   # backward
        %relu: f32[6,4] [-,-] = aten.relu.default(%all_reduce)   # backward
        return gradient "w" = %einsum
        return value "y" = %relu
    becomes
        LOCAL program on tp=2
        %w: f32[2,4] of [4,4] [tp,-] = parameter "w"
        %g: f32[6,2] of [6,4] [-,tp] = batch "0"
        %x: f32[6,4] [-,-] = batch "1"
        %einsum_1: f32[6,4] [-,-] partial(tp) = autopar.einsum.default(%g, %w, "cb,ba->ca")
        %all_reduce_start: f32[6,4] [-,-] = autopar.all_reduce_start.default(%einsum_1, "tp", "sum")
        %einsum: f32[2,4] of [4,4] [tp,-] = autopar.einsum.default(%g, %x, "cb,ca->ba")
        %wait: f32[6,4] [-,-] = autopar.wait.default(%all_reduce_start)
        %relu: f32[6,4] [-,-] = aten.relu.default(%wait)
        return gradient "w" = %einsum
        return value "y" = %relu

    What stands between the two is computed while it moves. Gradients of weights are read by nothing before the end of
    the step: where too little stands between, those of before are computed after the start. This is the overlap that
    Megatron-LM writes by hand for tensor parallel layers (arXiv 2205.05198, section 4.2.2, and its option
    `async_tensor_model_parallel_allreduce`). A collective that nothing could hide stays as it is; beside another graph
    (`beside`), which goes on at each wait of this one, every collective is started.
    """
    return _Overlap(program, plan, beside).run() if any(map(_moves, program.nodes)) else program


class _Overlap:
    def __init__(self, program: Program, plan: Plan, beside: bool) -> None:
        self.program, self.beside = program, beside
        self.build = Builder(MADE_BY)
        self.flat = Coalesced(self.build, program.mesh)
        self.nodes = program.nodes
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.times = LazyTimes(program, plan.fixed.machine)
        self.least = plan.fixed.machine.latency_us  # what two halves may cost more than one whole
        self.sums, _ = sums_of_gradients(program)  # they move in buckets
        self.weights = _gradients_of_weights(program)
        self.starts: dict[fx.Node, list[fx.Node]] = defaultdict(list)  # the collectives that start before a node
        self.sunk: dict[fx.Node, list[fx.Node]] = {}  # what is computed behind the start of a collective
        self.planned: set[fx.Node] = set()
        self.position_after: dict[fx.Node, int] = {}  # of what is sunk: behind this place
        self.under_way: dict[fx.Node, fx.Node] = {}

    def run(self) -> Program:
        self._plan()
        if not self.starts:
            return self.program
        self.late = {node for nodes in (*self.starts.values(), *self.sunk.values()) for node in nodes}
        return self.build.rewrite(self.program, self._put, later=self.late)

    def _put(self, node: fx.Node) -> fx.Node | None:
        for collective in self.starts.get(node, ()):
            self._start(collective)
        return None if node in self.late else self._copy(node)

    def _start(self, collective: fx.Node) -> None:
        self._await(collective)
        self.under_way[collective] = self.flat.start([collective], record(collective).reason)
        for node in self.sunk.get(collective, ()):
            self._copy(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        self._await(node)
        return self.build.copy(node)

    def _await(self, node: fx.Node) -> None:
        """Wait for what a node reads."""
        for operand in node.all_input_nodes:
            if operand in self.under_way:
                self.flat.finish([operand], self.under_way.pop(operand))

    def _plan(self) -> None:
        """Choose where collectives start, and what is computed later for their sake."""
        passed = [0, 0]  # where collectives stood
        for node in self.program.calls():
            if _moves(node) and node not in self.sums:
                begin, hidden = self._begin(node)
                weights, more = self._sinkable(node, passed[-WINDOW], begin, self.times[node] - hidden)
                if self.beside or hidden + more > self.least:
                    self._plan_start(node, begin, weights)
                passed.append(self.position[node])

    def _plan_start(self, node: fx.Node, begin: int, weights: set[fx.Node]) -> None:
        self.starts[self.nodes[begin]].append(node)
        self.sunk[node] = self._with_followers(weights, begin)
        self.planned.add(node)
        self.position_after.update(dict.fromkeys(self.sunk[node], begin - 1))

    def _begin(self, node: fx.Node) -> tuple[int, float]:
        """(The place of the start, the time of what is computed from there to the first use).

        It is the latest that hides the whole collective, and not behind the place where the collective stands.
        """
        begin, wanted = self.position[node], self.times[node]
        first_use = min(self.position[user] for user in node.users)
        ready = max(self.position_after.get(operand, self.position[operand]) for operand in node.all_input_nodes)
        hidden = sum(self._compute(other) for other in self.nodes[begin:first_use])
        while hidden < wanted and begin - 1 > ready:
            begin -= 1
            hidden += self._compute(self.nodes[begin])
        return begin, hidden

    def _sinkable(self, collective: fx.Node, first: int, begin: int, missing: float) -> tuple[set[fx.Node], float]:
        """Gradients of weights that stand between the places `first` and `begin`, the last that take the time that is
        missing; and their time."""
        found, time, read = set[fx.Node](), 0.0, {collective}
        for node in reversed(self.nodes[first:begin]):
            if time >= missing:
                break
            if not read.isdisjoint(node.users):
                read.add(node)  # the collective moves what is made of it
            elif self._may_wait(node, begin):
                found.add(node)
                time += self.times[node]
        return found, time

    def _may_wait(self, node: fx.Node, begin: int) -> bool:
        """True for the gradient of a weight that waits for nothing yet, and for which neither a start nor what was sunk
        before waits (the sum of this term and an earlier one)."""
        if node not in self.weights or node in self.position_after:
            return False
        followers = self._with_followers({node}, begin)
        return self.planned.isdisjoint(followers) and self.position_after.keys().isdisjoint(followers)

    def _with_followers(self, weights: set[fx.Node], begin: int) -> list[fx.Node]:
        """Gradients, and what is made of them before `begin`, in the order of the program."""
        found = set(weights)
        first = min((self.position[node] for node in weights), default=begin)
        for node in self.nodes[first:begin]:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return [node for node in self.nodes[first:begin] if node in found]

    def _compute(self, node: fx.Node) -> float:
        return 0.0 if is_collective(node.target) or node.op != "call_function" else self.times[node]


def _moves(node: fx.Node) -> bool:
    return node.target in _MOVES and not is_in_time(str(node.args[1]))


def _gradients_of_weights(program: Program) -> set[fx.Node]:
    """The products that nothing reads before the end of the step: what is made of them is no product."""
    output = program.graph.output_node()
    others = {node for node, out in program.leaving if out.kind not in ("gradient", "part")}
    gradients, after = set[fx.Node](), {output}  # what stands between a product and the end
    for node in reversed(program.nodes):
        if node.op == "call_function" and node.users and node not in others and after.issuperset(node.users):
            (gradients if is_product(node) else after).add(node)
    return gradients


def is_product(node: fx.Node) -> bool:
    """True for a matrix product, which has work worth hiding a collective under."""
    return node.target is _EINSUM or record(node).flops > 0  # a program that was read from its text has no flops
