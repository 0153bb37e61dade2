"""What hangs on the logits of a product token by token: what `chunk_loss` computes chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.ir.ops.ops import is_mesh_op, op
from autopar.ir.plan import Plan
from autopar.ir.program import Program, is_getitem, operand_nodes, record
from autopar.passes.collectives.partition import cuts_of
from autopar.passes.rules import call_of, rule_of, table_of
from autopar.passes.rules.local import local_call
from autopar.passes.rules.rule import Arguments, Call, Row, Rule, Table
from autopar.passes.rules.splits import Choice, choice_at, place
from autopar.passes.rules.states import State, may_split

_EINSUM, _SUM_OVER_RANKS = op("einsum"), op("all_reduce")
READS = ", another product of the forward pass, reads them"
ENOUGH = 64  # tokens to cut between
_WIDENS = 2  # times the elements that its activations have: what the result of a head has at least


@dataclass(frozen=True, slots=True)
class Taken:
    """How one call is cut into chunks: the choice of its rule, and what that makes of operands and results."""

    call: Call
    rule: Rule | None  # None: of a collective, which takes chunks as it takes the whole
    row: Row | None
    choice: Choice | None
    operands: tuple[State, ...]
    results: tuple[State, ...]

    def arguments(self, count: int) -> Arguments:
        """The arguments of one of `count` chunks."""
        if self.rule is None or self.row is None or self.choice is None:
            return self.call.args, dict(self.call.kwargs)
        sizes = {**self.rule.sizes, self.choice[0]: self.rule.sizes[self.choice[0]] // count}
        shapes = []
        for type_, state in zip(self.call.results, self.results, strict=True):
            shape = list(type_.shape)
            if isinstance(state, tuple):
                shape[state[0]] //= count
            shapes.append(tuple(shape))
        return local_call(self.call, self.row, self.rule, shapes, sizes)


@dataclass(frozen=True, slots=True)
class Region:
    """head: the product. members: what is computed in chunks, in order. large: those of them whose values are as large
    as the logits. exits: the members that others read. sums: of those, the ones that are summed over chunks. rest: the
    tokens that lie behind each other in a rank's part. outer: the blocks of them that lie behind each other."""

    head: fx.Node
    members: Mapping[fx.Node, Taken]
    large: tuple[fx.Node, ...]
    exits: tuple[fx.Node, ...]
    sums: frozenset[fx.Node]
    rest: int
    outer: int


def regions(program: Program, plan: Plan) -> Iterator[tuple[fx.Node, Region | str]]:
    """Products of the forward pass, each with what may be computed in chunks of tokens, or why it has nothing."""
    table = table_of(plan)
    for node in program.calls():
        if node.target is _EINSUM and not record(node).is_backward and _widens(node):
            yield node, _Search(program, table, node).run()


def _widens(node: fx.Node) -> bool:
    """True for a product that makes much more of its activations than they are."""
    activations = record(operand_nodes(node)[0]).type
    return record(node).type.numel >= _WIDENS * activations.numel


def _is_product(node: fx.Node) -> bool:
    return node.target is _EINSUM or record(node).flops > 0  # a program that was read from its text has no flops


def _named(node: fx.Node) -> str:
    known = record(node)
    return f"%{node.name} at {known.source}" if known.source else f"%{node.name}"


class _Search:
    """The region of one product, if it has one."""

    def __init__(self, program: Program, table: Table, head: fx.Node) -> None:
        self.program, self.table, self.head = program, table, head
        self.order = {node: i for i, node in enumerate(program.nodes)}
        self.least = record(head).type.numel // 2  # elements of what counts as large

    def run(self) -> Region | str:
        rule = rule_of(call_of(self.head), self.table)
        assert rule is not None
        found = [self._region(choice) for choice in self._choices(rule[0])]
        cut = [region for region in found if isinstance(region, Region)]
        if not cut:
            return next((reason for reason in found if isinstance(reason, str)), "it has no tokens")
        return max(cut, key=lambda region: (min(region.rest, ENOUGH), -region.outer))

    def _choices(self, rule: Rule) -> Iterator[Choice]:
        """The dims of the tokens: those of the result that the activations have; behind what the axes cut of them."""
        activations = {name for dim in rule.operands[0] for name in dim}
        for dim, names in enumerate(rule.results[0]):
            factors = record(self.head).layout.dims[dim]
            if len(names) == 1 and names[0] in activations:
                mesh = self.program.mesh
                yield names[0], math.prod(abs(f) if isinstance(f, int) else mesh[f] for f in factors)

    def _region(self, choice: Choice) -> Region | str:
        """The region cut along one name of the head, or why it cannot be cut so."""
        taken = self._spread(choice)
        large = [node for node, found in taken.items() if self._passes(node) and self._is_large(node, found)]
        members = sorted(self._members(large), key=self.order.__getitem__)
        for node in members:
            if node.op == "output":
                return "they leave the step"
            if node not in taken and any(operand in large for operand in node.all_input_nodes):
                return f"{_named(node)} takes them whole"
            if node not in taken:
                return f"their gradient hangs on {_named(node)}, and that on all tokens"
            if node is not self.head and _is_product(node) and not record(node).is_backward:
                return f"{_named(node)}{READS}"
        known = set(members)
        if self._needs_itself(known):
            return "their gradient hangs on all tokens"
        exits = tuple(node for node in members if any(user not in known for user in node.users))
        sums = frozenset(node for node in members if "sum" in taken[node].results)
        several = next((node for node in (*exits, *sums) if len(taken[node].results) > 1), None)
        if several is not None:
            return f"{_named(several)} has several results"
        rule = taken[self.head].rule
        assert rule is not None
        rest = rule.sizes[choice[0]] // choice[1]
        if rest == 1:
            return "a rank has one of its tokens alone"
        return Region(self.head, {node: taken[node] for node in members}, tuple(large), exits, sums, rest, choice[1])

    def _spread(self, choice: Choice) -> dict[fx.Node, Taken]:
        """All that can be cut as the head is cut, by what hangs on it; of products that read it no more than these."""
        spread: dict[fx.Node, Taken] = {}
        for node in self.program.nodes[self.order[self.head] :]:
            if node is self.head or any(operand in spread for operand in self._passing(node)):
                taken = self._take(node, spread, choice if node is self.head else None)
                if taken is not None:
                    spread[node] = taken
        return spread

    def _passing(self, node: fx.Node) -> list[fx.Node]:
        """The operands but for products, behind which a region ends."""
        return [operand for operand in node.all_input_nodes if self._passes(operand)]

    def _passes(self, node: fx.Node) -> bool:
        return node is self.head or not _is_product(node)

    def _members(self, large: list[fx.Node]) -> set[fx.Node]:
        """What is large, what lies between such values, and what reads them."""
        below, above = {self.head}, set(large)
        for node in self.program.nodes[self.order[self.head] + 1 :]:
            if any(operand in below for operand in self._passing(node)):
                below.add(node)
        for node in reversed(self.program.nodes):
            if node.op == "call_function" and node in below and any(user in above for user in node.users):
                above.add(node)
        return above | {user for node in large for user in node.users}

    def _needs_itself(self, members: set[fx.Node]) -> bool:
        """True if what a member reads from outside hangs on the region."""
        below: set[fx.Node] = set()
        for node in self.program.nodes[self.order[self.head] :]:
            if node in members or any(operand in below for operand in node.all_input_nodes):
                if node in members and any(o in below and o not in members for o in node.all_input_nodes):
                    return True
                below.add(node)
        return False

    def _is_large(self, node: fx.Node, taken: Taken) -> bool:
        pairs = zip((type_ for type_ in record(node).types if type_ is not None), taken.results, strict=True)
        return any(isinstance(state, tuple) and type_.numel >= self.least for type_, state in pairs)

    def _take(self, node: fx.Node, known: Mapping[fx.Node, Taken], choice: Choice | None) -> Taken | None:
        """How a call is cut, by its operands that are; None if it cannot be."""
        if node.op != "call_function":
            return None
        call, operands = call_of(node), operand_nodes(node)
        if is_getitem(node):
            source, index = node.args
            return Taken(call, None, None, None, (), (known[source].results[index],))  # type: ignore[index]
        states = {operand: known[operand].results[0] for operand in operands if operand in known}
        if "sum" in states.values() or not (states or choice):
            return None
        if is_mesh_op(node.target):
            (state,) = states.values()
            return Taken(call, None, None, None, (state,), (state,)) if node.target is _SUM_OVER_RANKS else None
        pair = rule_of(call, self.table)
        if pair is None or pair[1].free_args:  # a draw hangs on where its piece lies
            return None
        rule, row = pair
        sizes = dict(rule.sizes)
        for operand, dims in zip(operands, rule.operands, strict=True):
            state = states.get(operand)
            if choice is None and isinstance(state, tuple):
                choice = choice_at(dims, state, sizes)
        if choice is None or choice[0] in rule.ordered or not self._may(node, rule, choice):
            return None
        wanted = tuple(place(dims, choice, sizes) for dims in rule.operands)
        if any(operand in states and states[operand] != state for operand, state in zip(operands, wanted, strict=True)):
            return None
        results = tuple(place(dims, choice, sizes) or rule.partial for dims in rule.results)
        is_right = all(isinstance(state, tuple) or state == "sum" for state in results)
        return Taken(call, rule, row, choice, wanted, results) if is_right else None

    def _may(self, node: fx.Node, rule: Rule, choice: Choice) -> bool:
        """True if the name may be cut in two behind what the axes cut of it."""
        layouts = tuple(layout for layout in record(node).layouts if layout is not None)
        mesh = self.program.mesh
        cuts = cuts_of(rule, record(node).operands, layouts, mesh)
        taken = tuple(((name, outer), mesh[axis]) for name, cut in cuts.items() for outer, _, axis in cut)
        return may_split(rule, choice, 1, taken)
