"""Testing the verifiers: every promise of every level is broken once, and found without running anything."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from models import mlp
from torch import fx

from autopar.capture import capture
from autopar.errors import VerificationError
from autopar.ir.check.check_levels import verify
from autopar.ir.layout import parse_layout, replicated
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ops import op
from autopar.ir.plan import Plan
from autopar.ir.program import Input, Level, Output, Program, Record, TensorType, record, set_record
from autopar.passes import run_passes
from autopar.passes.collectives.check_rules import check_rules

Break = Callable[[Program], Program | None]
PLAN = Plan(parse_mesh("dp=2,tp=2"))


@functools.cache
def history() -> dict[Level, Program]:
    """The program of an MLP on dp=2,tp=2 at each level."""
    model, loss_fn, batch = mlp()
    programs = run_passes(capture(model, loss_fn, batch, {}).program, PLAN)
    return {program.level: program for name, program in programs if name != "bucket"}


def at(level: Level) -> Program:
    """A copy of the program at a level, free to be broken."""
    program = history()[level]
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    return program.with_(graph=graph)


def first(program: Program, target: object) -> fx.Node:
    return next(node for node in program.calls() if node.target is target)


def refused(level: Level, change: Break, message: str) -> None:
    program = at(level)
    verify(program, level)
    program = change(program) or program
    with pytest.raises(VerificationError, match=message):
        verify(program, level)


GELU, REDUCE, EINSUM = torch.ops.aten.gelu.default, op("all_reduce"), op("einsum")
EVERY = [Level.CAPTURED, Level.SHARDED, Level.EXPLICIT, Level.LOCAL]


def with_record(program: Program, node: fx.Node, **changes: object) -> None:
    set_record(node, record(node).with_(**changes))


@pytest.mark.parametrize("level", EVERY)
def test_every_level_has_its_name(level: Level) -> None:
    other = Level.CAPTURED if level else Level.SHARDED
    refused(level, lambda p: p.with_(level=other), f"at level {other.name}, not {level.name}")


@pytest.mark.parametrize("level", EVERY)
def test_every_node_has_a_record(level: Level) -> None:
    def change(program: Program) -> None:
        first(program, GELU).meta.clear()

    refused(level, change, "nodes without a record: gelu")


@pytest.mark.parametrize("level", EVERY)
def test_every_placeholder_is_an_input(level: Level) -> None:
    refused(level, lambda p: p.with_(inputs=p.inputs[1:]), "8 placeholders for 7 inputs")


@pytest.mark.parametrize("level", EVERY)
def test_every_result_is_an_output(level: Level) -> None:
    refused(level, lambda p: p.with_(outputs=(*p.outputs, Output("buffer", "x"))), "7 results for 8 outputs")


@pytest.mark.parametrize("level", EVERY)
def test_the_graph_is_in_order(level: Level) -> None:
    program = at(level)
    first(program, GELU).append(program.placeholders[0])
    with pytest.raises(RuntimeError):
        verify(program, level)


def test_every_result_has_a_layout() -> None:
    refused(Level.SHARDED, lambda p: with_record(p, first(p, GELU), layouts=()), "%gelu .*1 results, but 0 layouts")


def test_only_tensors_have_a_layout() -> None:
    refused(Level.SHARDED, lambda p: with_record(p, first(p, GELU), layouts=(None,)), "%gelu .*with layout None")


@pytest.mark.parametrize("layout", ["[dp]", "[dp,-,-]", "[dp,5:tp]", "[-,2:dp:5:tp]"])
def test_layouts_fit_shapes(layout: str) -> None:
    def change(program: Program) -> None:
        with_record(program, first(program, GELU), layouts=(parse_layout(layout),))

    refused(Level.SHARDED, change, r"%gelu .*layout \[.*\] does not fit shape \[12, 32\] on mesh dp=2,tp=2")


@pytest.mark.parametrize(("kind", "place"), [("gradient", 1), ("loss", 0)])
@pytest.mark.parametrize("level", EVERY[1:])
def test_nothing_leaves_as_a_partial_sum(level: Level, kind: str, place: int) -> None:
    def change(program: Program) -> None:
        output = program.graph.output_node()
        wanted = list(record(output).operands)
        dims = wanted[place].dims
        wanted[place] = type(wanted[place])(dims, (("dp", "sum"),))
        with_record(program, output, operands=tuple(wanted))

    refused(level, change, rf"{kind} '.*' leaves in .* partial\(dp\), not in \[")


def test_a_gradient_leaves_as_its_parameter_lies() -> None:
    def change(program: Program) -> None:
        parameter = program.placeholders[0]
        assert str(record(parameter).layout) == "[tp,-]"
        with_record(program, parameter, layouts=(replicated(2),))

    refused(Level.SHARDED, change, r"gradient '0.weight' leaves in \[tp,-\], not in \[-,-\]")


def test_every_operand_has_a_wanted_layout() -> None:
    refused(Level.EXPLICIT, lambda p: with_record(p, first(p, GELU), operands=()), "1 operands, but 0 wanted layouts")


@pytest.mark.parametrize("level", EVERY[2:])
def test_every_operand_lies_as_it_is_wanted(level: Level) -> None:
    def change(program: Program) -> None:
        with_record(program, first(program, GELU), operands=(replicated(2),))

    refused(level, change, r"%gelu .*wants %\w+ in \[-,-\], which is in \[dp,tp\]")


@pytest.mark.parametrize("level", EVERY[2:])
@pytest.mark.parametrize("args", [("dp", "sum"), ("tp", "max"), ("tp", "logsumexp")])
def test_a_reduction_reduces_what_is_partial(level: Level, args: tuple[str, str]) -> None:
    def change(program: Program) -> None:
        node = first(program, REDUCE)
        assert node.args[1:] == ("tp", "sum")
        node.args = (node.args[0], *args)

    refused(level, change, r"%all_reduce .*cannot be applied to \[dp,-\] partial\(tp\)")


def test_so_does_a_reduction_of_scalars() -> None:
    """The loss has no dim that could tell."""

    def change(program: Program) -> None:
        node = next(n for n in program.calls() if n.target is REDUCE and record(n).type.shape == ())
        node.args = (*node.args[:2], "max")

    refused(Level.EXPLICIT, change, r"cannot be applied to \[\] partial\(dp,tp\)")


def test_a_reduction_gives_what_it_says() -> None:
    """Its users believe it, too: only the move itself tells."""

    def change(program: Program) -> None:
        node = first(program, REDUCE)
        wrong = parse_layout("[-,dp]")
        with_record(program, node, layouts=(wrong,))
        for user in node.users:
            operands = tuple(wrong if arg is node else lay for arg, lay in zip(
                user.all_input_nodes, record(user).operands, strict=True))  # fmt: skip
            with_record(program, user, operands=operands)

    refused(Level.EXPLICIT, change, r"%all_reduce .*turns \[dp,-\] partial\(tp\) into \[dp,-\], not into \[-,dp\]")


MOVES = [
    # op, arguments, what it is given, what it is said to give
    ("all_gather", ("tp", 1, 1), "[dp,tp]", "[dp,-]", None),
    ("all_gather", ("tp", 0, 1), "[dp,tp]", "[dp,-]", "turns"),
    ("all_gather", ("tp", 1, 2), "[dp,tp]", "[dp,-]", "turns"),
    ("all_gather", ("tp", 1, 3), "[dp,3:tp]", "[dp,-]", None),
    ("all_gather", ("dp", 0, 1), "[dp:tp,-]", "[tp,-]", "turns"),
    ("reduce_scatter", ("tp", 1, 1, "sum"), "[dp,-] partial(tp)", "[dp,tp]", None),
    ("reduce_scatter", ("tp", 0, 1, "sum"), "[dp,-] partial(tp)", "[dp,tp]", "turns"),
    ("reduce_scatter", ("tp", 0, 1, "sum"), "[dp,-] partial(tp)", "[dp:tp,-]", None),
    ("reduce_scatter", ("tp", 1, 1, "sum"), "[dp,-]", "[dp,tp]", "cannot be applied"),
    ("all_to_all", ("tp", 1, 1, 0, 1), "[dp,tp]", "[dp:tp,-]", None),
    ("all_to_all", ("tp", 1, 1, 0, 1), "[dp,tp]", "[tp:dp,-]", "turns"),
    ("all_to_all", ("tp", 1, 1, 0, 1), "[dp,tp]", "[dp,tp]", "turns"),
    ("shard", ("tp", 1, 1), "[dp,-]", "[dp,tp]", None),
    ("shard", ("tp", 1, 3), "[dp,-]", "[dp,tp]", "turns"),
    ("shard", ("tp", 1, 3), "[dp,-]", "[dp,3:tp]", None),
    ("keep_first", ("tp",), "[dp,-]", "[dp,-] partial(tp)", None),
    ("keep_first", ("dp",), "[dp,-]", "[dp,-] partial(tp)", "turns"),
]


@pytest.mark.parametrize(("name", "args", "has", "gives", "message"), MOVES)
def test_every_move_gives_what_it_says(
    name: str, args: tuple[str | int, ...], has: str, gives: str, message: str | None
) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    given = Record((TensorType((24, 48), torch.float32),), layouts=(parse_layout(has),))
    set_record(x, given)
    move = graph.call_function(op(name), (x, *args))
    set_record(move, given.with_(layouts=(parse_layout(gives),), operands=given.layouts))
    set_record(graph.output(()), Record((None,)))
    small = Program(graph, (Input("batch", ("0",)),), (), Level.EXPLICIT, parse_mesh("dp=2,tp=2"))
    if message is None:
        verify(small, Level.EXPLICIT)
    else:
        with pytest.raises(VerificationError, match=message):
            verify(small, Level.EXPLICIT)


# The check of rules, on a SHARDED program.


def rules_refuse(change: Callable[[Program], None], message: str) -> None:
    program = at(Level.SHARDED)
    check_rules(program, PLAN)
    change(program)
    with pytest.raises(VerificationError, match=message):
        check_rules(program, PLAN)


@pytest.mark.parametrize(("layout", "axis"), [("[dp,-] partial(tp)", "tp"), ("[-,tp] partial(dp)", "dp")])
def test_gelu_of_a_partial_sum_is_refused(layout: str, axis: str) -> None:
    def change(program: Program) -> None:
        wanted = (parse_layout(layout),)
        with_record(program, first(program, GELU), operands=wanted, layouts=wanted)

    rules_refuse(change, rf"%gelu = aten.gelu.default at models.py:\d+ \(1\) breaks its rule on axis '{axis}'")


@pytest.mark.parametrize(
    ("operands", "gives"),
    [
        ("[dp,-] [-,-]", "[dp,tp]"),  # a split from nowhere
        ("[dp,-] [tp,-]", "[dp,-]"),  # a split that is lost
        ("[dp,tp] [-,tp]", "[dp,-]"),  # a contraction that leaves no partial sum
        ("[dp,tp] [-,-]", "[dp,-] partial(tp)"),  # contracted on one side only
        ("[dp,-] partial(tp) [-,-] partial(tp)", "[dp,-] partial(tp)"),  # not linear in both
        ("[dp,tp] [tp,-]", "[dp,tp]"),  # two names on one axis
        ("[dp,tp] [-,tp]", "[dp,-] partial(max:tp)"),
    ],
)
def test_a_contraction_that_breaks_its_rule_is_refused(operands: str, gives: str) -> None:
    left, _, right = operands.replace("] [", "]|[").replace(") [", ")|[").partition("|")

    def change(program: Program) -> None:
        node = first(program, EINSUM)
        wanted = (parse_layout(left), parse_layout(right))
        with_record(program, node, operands=wanted, layouts=(parse_layout(gives),))

    rules_refuse(change, "%einsum = autopar.einsum.default .*breaks its rule on axis 'tp'")
