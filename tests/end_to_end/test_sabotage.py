"""Testing the tester: what is broken on purpose must be found, and by name.

Each test plants one mistake: a rule that is wrong, a collective that is missing, doubled, over another axis or of
another kind, operands or gradients that are swapped. (`test_sabotage_levels.py`: what the verifiers find without
running anything.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gpt import GPT, GPTConfig
from models import labels, square_loss, token_loss, tokens, uneven
from torch import Tensor, fx, nn

from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.errors import VerificationError
from autopar.ir.check.check_levels import verify as verify_level
from autopar.ir.layout import PARTIAL_KINDS
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Level, Program, record, set_record
from autopar.passes import run_passes
from autopar.passes.collectives.check_rules import check_rules
from autopar.passes.collectives.partition import partition
from autopar.passes.collectives.reshard import reshard
from autopar.passes.overlap.bucket import bucket
from autopar.passes.rules import TABLE
from autopar.passes.rules.rule import Call, Rule, Table
from autopar.passes.search.propagate import propagate
from autopar.verification.verify import Report, verify_compiled

ROWS, MESH = 6, "dp=2,tp=2"
REDUCTIONS = ("all_reduce", "all_reduce_start")
LossFn = Callable[..., Tensor]
Batch = tuple[Tensor, ...]


def measure(model: nn.Module, loss_fn: LossFn, batch: Batch, captured: Captured, compiled: Compiled) -> Report:
    return verify_compiled(model, captured, compiled, loss_fn=loss_fn, batch=batch, steps=1)


# A small GPT whose program is compiled once and broken many times.


@functools.cache
def small_gpt() -> tuple[nn.Module, LossFn, Batch, Captured, Compiled]:
    torch.manual_seed(3)
    model = uneven(GPT(GPTConfig(24, 4, layers=1, heads=2, width=8))).double()
    batch = (tokens(ROWS, 4, 24), labels(ROWS, 4, 24))
    captured = capture(model, token_loss, batch, {})
    plan = Plan(parse_mesh(MESH), options=StepOptions(bucket_bytes=800))  # several buckets
    return model, token_loss, batch, captured, Compiled(plan, run_passes(captured.program, plan))


def copied(program: Program) -> Program:
    """The same program, free to be broken."""
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    return program.with_(graph=graph)


def broken(change: Callable[[Program], None]) -> tuple[Report, Program]:
    model, loss_fn, batch, captured, compiled = small_gpt()
    program = copied(compiled.program)
    change(program)
    program.graph.lint()
    sabotaged = replace(compiled, history=(*compiled.history, ("sabotage", program)))
    return measure(model, loss_fn, batch, captured, sabotaged), program


def find(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def collectives(*kinds: str) -> list[str]:
    """The names of the nodes that move data in the small GPT."""
    found = [node for node in small_gpt()[4].program.calls() if is_collective(node.target)]
    return [node.name for node in found if str(node.target).split(".")[1] in (kinds or REDUCTIONS)]


def kind_of(name: str) -> str:
    return str(find(small_gpt()[4].program, name).args[2])


def assert_found(report: Report, what: str = "") -> None:
    """Wrong, and the node is named with the pass that made it and the user's line."""
    assert not report.ok, f"a sabotaged program passed: {what}\n{report}"
    assert report.mismatch is not None and report.mismatch.node, str(report)
    assert report.mismatch.pass_name in ("capture", "propagate", "reshard", "partition", "overlap", "bucket")
    assert report.mismatch.source.rsplit(":", 1)[-1].isdigit(), str(report.mismatch)
    assert "NOT EQUAL" in str(report) and f"%{report.mismatch.node}" in str(report)


def test_the_untouched_program_is_right() -> None:
    report, _ = broken(lambda program: None)
    assert report.ok and report.mismatch is None and report.max_error < 1e-12
    kinds = {str(find(small_gpt()[4].program, name).args[1]) for name in collectives()}
    assert kinds == {"dp", "tp"} and len(collectives("all_reduce_start")) > 2 and len(collectives("all_reduce")) > 8


def test_a_dropped_collective_is_found() -> None:
    for name in collectives():
        users: set[str] = set()
        report, program = broken(lambda program, name=name, users=users: drop(program, name, users))
        assert_found(report, name)
        # What leaves the program at once has no user: then the value itself is named.
        named = users | {str(find(small_gpt()[4].program, name).args[0])} if users == {"output"} else users
        assert report.mismatch is not None and report.mismatch.node in named, f"%{name}: {report.mismatch}"
        refused_statically(program, name)


def drop(program: Program, name: str, users: set[str]) -> None:
    node = find(program, name)
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    last = node
    if node.target is op("all_reduce_start"):
        (last,) = node.users  # its wait
    users.update(downstream(last))
    last.replace_all_uses_with(operand)
    program.graph.erase_node(last)
    if last is not node:
        program.graph.erase_node(node)


def refused_statically(program: Program, name: str) -> None:
    """And it would not have come so far."""
    try:
        verify_level(program, Level.LOCAL)
    except VerificationError:
        return
    pytest.fail(f"the verifier of the level does not see what was done to %{name}")


def downstream(node: fx.Node) -> set[str]:
    """The names of all that depends on a node: the first difference must be there."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found[user] = None
                pending.append(user)
    return {user.name for user in found}


def test_a_doubled_reduction_is_found() -> None:
    def double(program: Program, name: str) -> None:
        node = find(program, name)
        with program.graph.inserting_before(node):
            again = program.graph.call_function(op("all_reduce"), (node.args[0], *node.args[1:]))
        set_record(again, record(node).with_(origin=""))
        node.args = (again, *node.args[1:])

    names = [name for name in collectives() if kind_of(name) == "sum"]
    assert len(names) == len(collectives()) - 1  # but for the logsumexp
    for name in names:
        assert_found(broken(lambda program, name=name: double(program, name))[0], name)


def test_a_reduction_over_the_other_axis_is_found() -> None:
    def turn(program: Program, name: str) -> None:
        node = find(program, name)
        node.args = (node.args[0], "tp" if node.args[1] == "dp" else "dp", node.args[2])

    for name in collectives():
        report, program = broken(lambda program, name=name: turn(program, name))
        assert_found(report, name)
        refused_statically(program, name)


@pytest.mark.parametrize("kind", PARTIAL_KINDS)
def test_a_reduction_of_another_kind_is_found(kind: str) -> None:
    def turn(program: Program, name: str) -> None:
        node = find(program, name)
        node.args = (*node.args[:2], kind)

    for name in collectives():
        if kind_of(name) != kind:
            report, program = broken(lambda program, name=name: turn(program, name))
            assert_found(report, f"{name} {kind}")
            refused_statically(program, name)


def test_swapped_operands_are_found() -> None:
    """logsumexp - logit against logit - logsumexp."""

    def swap(program: Program) -> None:
        node = next(node for node in program.calls() if node.target is torch.ops.aten.sub.Tensor)
        node.args = (node.args[1], node.args[0])

    report, _ = broken(swap)
    assert_found(report)
    assert report.mismatch is not None and report.mismatch.node.startswith("sub")


def test_swapped_gradients_are_found() -> None:
    """Gradients of one shape, put back from a bucket in the wrong order: the loss of this step is right."""

    def swap(program: Program) -> None:
        output = program.graph.output_node()
        results = list(program.results)
        names = [out.name for out in program.outputs]
        q, k = names.index("blocks.0.attn.q.weight"), names.index("blocks.0.attn.k.weight")
        results[q], results[k] = results[k], results[q]
        output.args = (tuple(results),)

    report, _ = broken(swap)
    assert not report.ok
    wrong = {row.name for row in report.rows if row.kind == "gradient" and not row.ok}
    assert wrong == {"blocks.0.attn.q.weight", "blocks.0.attn.k.weight"}
    assert next(row for row in report.rows if row.kind == "loss").ok


def test_a_gradient_that_only_some_ranks_have_is_found() -> None:
    """Rank 0 is right, the others are not: replicas are compared too."""

    def spoil(program: Program) -> None:
        output = program.graph.output_node()
        results = list(program.results)
        place = [out.name for out in program.outputs].index("norm.bias")
        node = results[place]
        with program.graph.inserting_before(output):
            first = program.graph.call_function(op("keep_first"), (node, "tp"))
        set_record(first, record(node))
        results[place] = first
        output.args = (tuple(results),)

    report, _ = broken(spoil)
    (row,) = [row for row in report.rows if not row.ok]
    assert (row.kind, row.name, row.error) == ("gradient", "norm.bias", pytest.approx(0.0, abs=1e-10))
    assert row.replicas > 1e-3 and "ranks differ by" in str(report)


# Rules that are wrong on purpose.


def planted(name: str, change: Callable[[Rule, Call], Rule]) -> Table:
    """One row of the table with its rule changed."""
    row = TABLE[name]
    return {name: replace(row, rule=lambda call: change(row.rule(call), call))}


def all_may_split(rule: Rule, _: Call) -> Rule:
    return replace(rule, replicated=frozenset())


def linear_in_first(rule: Rule, _: Call) -> Rule:
    return replace(rule, linear=(*rule.linear, frozenset({0})))


def linear_in_both(rule: Rule, call: Call) -> Rule:
    return replace(rule, linear=(*rule.linear, frozenset(range(len(call.operands)))))


def of_kind(kind: str) -> Callable[[Rule, Call], Rule]:
    return lambda rule, _: replace(rule, partial=kind)


class Between(nn.Module):
    """Something between a weight split by columns and one split by rows, or after both."""

    def __init__(self, between: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.down(self.between(self.up(x))))


def same(x: Tensor) -> Tensor:
    return x


def apart(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """x + f(x) without the gradient of f: nothing but f needs the whole x."""
    return lambda x: x + f(x.detach())


def summed(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Sums of x and f(x): where f is not linear, x must be whole for it; else the sums can be small ones."""
    return lambda x: x.sum(-1, keepdim=True) + f(x.detach()).sum(-1, keepdim=True)


# name: (op, the change, what stands between, what stands after, mesh)
WRONG = {
    "softmax over a split dim": ("aten._softmax.default", all_may_split, apart(lambda x: x.softmax(-1)), same, "tp=2"),
    "softmax over the batch": ("aten._softmax.default", all_may_split, apart(lambda x: x.softmax(0)), same, "dp=2"),
    "cumulated sums": ("aten.cumsum.default", all_may_split, apart(lambda x: x.cumsum(0)), same, "dp=2"),
    "a sorted batch": ("aten.sort.default", all_may_split, apart(lambda x: x.sort(0).values), same, "dp=2"),
    "sum and number": ("aten.add.Tensor", linear_in_first, same, summed(lambda x: x + 10), "tp=2"),
    "tanh of a sum": ("aten.tanh.default", linear_in_first, same, summed(torch.tanh), "tp=2"),
    "product of sums": ("aten.mul.Tensor", linear_in_both, same, summed(lambda x: x * x), "tp=2"),
    "a sum that is called a maximum": ("autopar.einsum.default", of_kind("max"), same, same, "tp=2"),
    "a maximum that is called a sum": (
        "aten.amax.default", of_kind("sum"), same, lambda x: x + x.detach().amax(0, True), "dp=2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("checked", [True, False], ids=["rules checked", "table itself wrong"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_never_ok(name: str, checked: bool) -> None:
    """If only the search used it, the rule check refuses the program; if it stands in the table, the numbers do."""
    target, change, between, after, mesh = WRONG[name]
    torch.manual_seed(5)
    model = Between(between, after).double()
    x, y = torch.randn(ROWS, 8).double(), torch.randn(ROWS, 8).double()
    y = y[:, : after(x).shape[-1]]
    captured = capture(model, square_loss, (x, y), {})
    if not any(str(node.target) == target for node in captured.program.calls()):
        pytest.fail(f"the program has no {target}")
    plan = Plan(parse_mesh(mesh))
    right = Compiled(plan, run_passes(captured.program, plan))
    assert measure(model, square_loss, (x, y), captured, right).ok
    wrong = replace(plan, rules=planted(target, change))
    sharded = propagate(captured.program, wrong)
    if checked:
        with pytest.raises(VerificationError, match="breaks its rule on axis"):
            check_rules(sharded, plan)
        return
    check_rules(sharded, wrong)
    local = partition(reshard(sharded, wrong), wrong)
    final = bucket(local, plan)
    compiled = Compiled(plan, (("capture", captured.program), ("bucket", final)))
    report = measure(model, square_loss, (x, y), captured, compiled)
    assert_found(report)
