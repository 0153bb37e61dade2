"""reshard: any layout becomes any other one, by the collective that a textbook would take."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from test_golden import read
from torch import Tensor, fx

import autopar.runtime.executor.kernel_table  # noqa: F401  registers the kernels of our ops
from autopar.errors import LayoutError
from autopar.ir.check.check_levels import verify
from autopar.ir.layout import Factor, Layout, combine, factor_sizes, fits, local_part, parse_layout, replica_error
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.plan import Plan
from autopar.ir.program import Input, Level, Output, Program, Record, TensorType, record, set_record
from autopar.ir.text.text import parse_program
from autopar.passes.collectives.partition import partition
from autopar.passes.collectives.reshard import moves, reshard
from autopar.runtime.executor.executor import Executable
from autopar.runtime.ranks.virtual import VirtualMesh

MESH = parse_mesh("dp=2,tp=3")
SHAPES: list[tuple[int, ...]] = [(36,), (12, 36), (6, 12, 36), (), (24, 1), (6, 6)]


def program(has: Layout, wants: Layout, shape: tuple[int, ...], mesh: Mesh) -> Program:
    """An input that lies in one layout, made into a value, and a consumer that wants it in another."""
    graph = fx.Graph()
    types = (TensorType(shape, torch.float64),)
    start = graph.placeholder("x")
    set_record(start, Record(types, layouts=(has,), origin="x"))
    value = graph.call_function(torch.ops.aten.alias.default, (start,))
    set_record(value, Record(types, layouts=(has,), operands=(has,), origin="alias", source="model.py:1"))
    user = graph.call_function(torch.ops.aten.alias.default, (value,))
    set_record(user, Record(types, layouts=(wants,), operands=(wants,), origin="user", source="model.py:2"))
    set_record(graph.output((user,)), Record((None,), operands=(wants,)))
    return Program(graph, (Input("batch", ("0",)),), (Output("value", "0"),), Level.SHARDED, mesh)


def resharded(has: Layout, wants: Layout, shape: tuple[int, ...], mesh: Mesh = MESH) -> Program:
    plan = Plan(mesh)
    explicit = reshard(program(has, wants, shape, mesh), plan)
    for node in explicit.graph.nodes:
        if node.op != "output" and record(node).layouts:
            assert fits(shape, record(node).layout, mesh), f"{has} -> {wants} by way of {record(node).layout}"
    local = partition(explicit, plan)
    # an output in a split layout is no promise of a level: only operands and moves are checked
    verify(local.with_(outputs=()).with_(graph=without_results(local.graph)), Level.LOCAL)
    return local


def without_results(graph: fx.Graph) -> fx.Graph:
    made, value = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.op == "output":
            set_record(made.output(()), Record((None,)))
        else:
            value[node] = made.node_copy(node, value.__getitem__)
    return made


def steps(local: Program) -> list[str]:
    """The moves, e.g. `all_gather tp 1 1`."""
    mine = [node for node in local.calls() if record(node).made_by == "reshard"]
    names = [str(node.target).split(".")[1] for node in mine]
    return [" ".join([name, *map(str, node.args[1:])]) for name, node in zip(names, mine, strict=True)]


def held(layout: Layout, mesh: Mesh, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """What the ranks hold of a random value: partial kinds spread over them, each with parts of its own."""
    torch.manual_seed(seed)
    whole = torch.randn(shape, dtype=torch.float64)
    split = Layout(layout.dims)
    axes = [axis for axis, _ in layout.partial]
    shares: dict[tuple[int, ...], Tensor] = {}
    parts = []
    for coord in mesh.coords():
        key = tuple(coord[axis] for axis in axes)
        if key not in shares:
            shares[key] = whole + 3 * torch.randn(shape, dtype=torch.float64) if axes else whole
        parts.append(local_part(shares[key], split, mesh, coord).clone())
    return parts


def check(has: Layout, wants: Layout, shape: tuple[int, ...], seed: int, mesh: Mesh = MESH) -> list[str]:
    local = resharded(has, wants, shape, mesh)
    parts = held(has, mesh, shape, seed)
    expected = combine(parts, has, mesh)
    given = [list(outputs) for outputs in VirtualMesh(mesh).run(Executable(local.graph), [[p] for p in parts])]
    got = [outputs[0] for outputs in given]
    said = f"{has} -> {wants} on {mesh} of {shape} by {steps(local)}, seed {seed}"
    assert combine(got, wants, mesh).shape == expected.shape, said
    torch.testing.assert_close(combine(got, wants, mesh), expected, rtol=1e-12, atol=1e-12, msg=said)
    assert replica_error(got, wants, mesh) == 0.0, said
    return steps(local)


def draw_layout(draw: random.Random, shape: tuple[int, ...], mesh: Mesh, kinds: tuple[str, ...]) -> Layout:
    while True:
        dims: list[tuple[Factor, ...]] = [() for _ in shape]
        partial = []
        for axis in draw.sample(mesh.names, len(mesh.names)):
            where = draw.choice(["whole", "partial", "split", "split", "split"])
            if where == "partial" and kinds:
                partial.append((axis, draw.choice(kinds)))
            elif where == "split" and shape:
                dim = draw.randrange(len(shape))
                integer: tuple[Factor, ...] = (draw.choice([2, 3]),) if draw.random() < 0.35 else ()
                dims[dim] = (*dims[dim], *integer, axis)
        order = [name for name in mesh.names if name in dict(partial)]
        layout = Layout(tuple(dims), tuple((axis, dict(partial)[axis]) for axis in order))
        # sums of maxima are not maxima of sums: kinds are not mixed, as no rule gives such a value
        if fits(shape, layout, mesh) and len({kind for _, kind in partial}) < 2:
            return layout


@pytest.mark.parametrize(
    "mesh", ["dp=2,tp=3", "tp=3,dp=2", "dp=2,tp=2", "tp=4", "dp=2,cp=3", "dp=2,cp=2,tp=2", "cp=2,fsdp=2"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_pairs(shape: tuple[int, ...], mesh: str) -> None:
    seed = len(shape) * 100 + sum(map(ord, mesh))
    print(f"seed {seed}")
    draw, parsed = random.Random(seed), parse_mesh(mesh)
    for i in range(40):
        has = draw_layout(draw, shape, parsed, ("sum", "max", "min", "logsumexp"))
        wants = draw_layout(draw, shape, parsed, tuple({kind for _, kind in has.partial} & {"sum"}))
        check(has, wants, shape, seed + i, parsed)


ONE_MOVE = [
    # from, to, the moves
    ("[dp,-]", "[dp,-]", []),
    ("[dp,-] partial(tp)", "[dp,-]", ["all_reduce tp sum"]),
    ("[dp,-] partial(max:tp)", "[dp,-]", ["all_reduce tp max"]),
    ("[dp,-] partial(logsumexp:tp)", "[dp,-]", ["all_reduce tp logsumexp"]),
    ("[dp,-] partial(tp)", "[dp,tp]", ["reduce_scatter tp 1 1 sum"]),
    ("[dp,-] partial(tp)", "[dp:tp,-]", ["reduce_scatter tp 0 1 sum"]),
    ("[dp,-] partial(tp)", "[dp,3:tp]", ["reduce_scatter tp 1 3 sum"]),
    ("[dp,-] partial(max:tp)", "[dp,tp]", ["all_reduce tp max", "shard tp 1 1"]),
    ("[dp,tp]", "[dp,-]", ["all_gather tp 1 1"]),
    ("[dp,3:tp]", "[dp,-]", ["all_gather tp 1 3"]),
    ("[dp:tp,-]", "[dp,-]", ["all_gather tp 0 1"]),
    ("[dp,tp]", "[dp:tp,-]", ["all_to_all tp 1 1 0 1"]),
    ("[dp:tp,-]", "[dp,tp]", ["all_to_all tp 0 1 1 1"]),
    ("[tp,-]", "[-,2:tp]", ["all_to_all tp 0 1 1 2"]),
    ("[dp,-]", "[dp,tp]", ["shard tp 1 1"]),
    ("[dp,-]", "[dp,3:tp]", ["shard tp 1 3"]),
    ("[-,-]", "[dp:tp,-]", ["shard dp 0 1", "shard tp 0 1"]),
    ("[dp,-]", "[dp,-] partial(tp)", ["keep_first tp"]),
    ("[-,-] partial(dp)", "[tp,-]", ["shard tp 0 1", "all_reduce dp sum"]),  # less is reduced
    ("[dp,-]", "[-,tp]", ["shard tp 1 1", "all_gather dp 0 1"]),  # less is gathered
    ("[-,-] partial(dp,tp)", "[-,-]", ["all_reduce dp sum", "all_reduce tp sum"]),
    ("[-,-] partial(dp,tp)", "[-,-] partial(tp)", ["all_reduce dp sum"]),
    ("[-,-] partial(dp)", "[dp:tp,-]", ["reduce_scatter dp 0 1 sum", "shard tp 0 1"]),
    ("[tp:dp,-]", "[tp,-]", ["all_gather dp 0 1"]),
    # what lies inside of another split stays: rows of a sequence-major model, whose positions tp has
    ("[tp:2:dp,-]", "[6:dp,-]", ["all_gather tp 0 1"]),
    ("[6:dp,-]", "[tp:2:dp,-]", ["shard tp 0 1"]),
    ("[6:dp,-] partial(tp)", "[tp:2:dp,-]", ["reduce_scatter tp 0 1 sum"]),
    ("[tp:2:dp,-]", "[6:dp,2:tp]", ["all_to_all tp 0 1 1 2"]),
    ("[2:tp:dp,-]", "[6:dp,-]", ["all_gather tp 0 2"]),
    ("[tp:dp,-]", "[3:dp,-]", ["all_gather tp 0 1"]),
    ("[tp:2:dp,-]", "[3:dp,-]", ["all_gather dp 0 2", "all_gather tp 0 1", "shard dp 0 3"]),  # it lies elsewhere there
]


@pytest.mark.parametrize(("has", "wants", "expected"), ONE_MOVE)
def test_common_moves_take_the_expected_collectives(has: str, wants: str, expected: list[str]) -> None:
    assert check(parse_layout(has), parse_layout(wants), (12, 36), seed=1) == expected


JOINED = [
    # what moves alike over several data axes moves once; tp moves alone
    ("[-,-] partial(dp,cp)", "[-,-]", ["all_reduce dp:cp sum"]),
    ("[-,-] partial(max:dp,max:cp)", "[-,-]", ["all_reduce dp:cp max"]),
    ("[-,-] partial(dp,cp,tp)", "[-,-]", ["all_reduce dp:cp sum", "all_reduce tp sum"]),
    ("[-,-] partial(dp,cp)", "[dp:cp,-]", ["reduce_scatter dp:cp 0 1 sum"]),
    ("[-,-] partial(dp,cp)", "[-,3:dp:cp]", ["reduce_scatter dp:cp 1 3 sum"]),
    ("[tp,-] partial(dp,cp)", "[tp:dp:cp,-]", ["reduce_scatter dp:cp 0 1 sum"]),
    ("[-,-] partial(dp,cp)", "[cp:dp,-]", ["reduce_scatter cp:dp 0 1 sum"]),  # in the order of the layout
    ("[-,-] partial(dp,cp)", "[-,cp]", ["reduce_scatter cp 1 1 sum", "all_reduce dp sum"]),  # less is summed
    ("[-,-] partial(dp,cp)", "[dp,cp]", ["reduce_scatter dp 0 1 sum", "reduce_scatter cp 1 1 sum"]),
    ("[-,-] partial(dp)", "[dp:cp,-]", ["reduce_scatter dp 0 1 sum", "shard cp 0 1"]),
    (
        "[-,-] partial(dp,cp)",
        "[dp:tp:cp,-]",
        ["reduce_scatter dp 0 1 sum", "all_reduce cp sum", "shard tp 0 1", "shard cp 0 1"],
    ),
    ("[dp:cp,-]", "[-,-]", ["all_gather dp:cp 0 1"]),
    ("[tp:dp:cp,-]", "[tp,-]", ["all_gather dp:cp 0 1"]),
    ("[-,3:dp:cp]", "[-,-]", ["all_gather dp:cp 1 3"]),
    ("[dp:3:cp,-]", "[-,-]", ["all_gather cp 0 3", "all_gather dp 0 1"]),  # not side by side
    ("[dp:tp,-]", "[-,-]", ["all_gather tp 0 1", "all_gather dp 0 1"]),
    ("[dp:cp,-]", "[dp,-]", ["all_gather cp 0 1"]),
    ("[2~cp:dp,-]", "[-,-]", ["all_gather dp 0 2", "all_gather cp 0 -2"]),  # only cp is mirrored
    ("[-,-] partial(dp,cp)", "[2~cp:dp,-]", ["reduce_scatter cp 0 -2 sum", "reduce_scatter dp 0 2 sum"]),
    ("[dp:cp,-]", "[-,cp]", ["all_to_all cp 0 1 1 1", "all_gather dp 0 1"]),
]


@pytest.mark.parametrize(("has", "wants", "expected"), JOINED)
def test_data_axes_move_at_once(has: str, wants: str, expected: list[str]) -> None:
    mesh = parse_mesh("dp=2,cp=3,tp=2")
    assert check(parse_layout(has), parse_layout(wants), (36, 36), seed=2, mesh=mesh) == expected


def test_moves_end_where_they_should() -> None:
    """Each step names the layout that it gives; there are no more collectives than axes that change, both ways."""
    draw = random.Random(7)
    for _ in range(300):
        has, wants = (draw_layout(draw, (6, 36), MESH, ("sum",)) for _ in range(2))
        found = moves(has, wants, MESH)
        assert (found[-1].layout if found else has) == wants
        assert sum(is_collective(op(step.name)) for step in found) <= 4, (str(has), str(wants))


def test_what_lies_inside_of_other_splits_stays() -> None:
    """A dim that is split over some axes, and over others of the same places: no axis that both have is moved."""
    mesh, draw = parse_mesh("dp=2,cp=3,tp=2"), random.Random(11)
    for seed in range(60):
        names = draw.sample(mesh.names, 3)
        full = [each for axis in names for each in (*draw.sample([2, 3], draw.randrange(2)), axis)]
        has, wants = (as_split_over(full, {axis for axis in names if draw.random() < 0.7}, mesh) for _ in range(2))
        partial = tuple((axis, "sum") for axis in mesh.names if axis not in has.axes and draw.random() < 0.5)
        size = 2 * math.prod(factor_sizes(tuple(full), mesh))
        found = check(Layout(has.dims, partial), wants, (size, 2), seed, mesh)
        moved = {axis for step in found for axis in step.split()[1].split(":")}
        assert moved.isdisjoint(set(has.axes) & set(wants.axes)), (str(has), str(wants), found)


def as_split_over(factors: list[Factor], axes: set[str], mesh: Mesh) -> Layout:
    """The places of a dim that only some of its axes split."""
    found: list[Factor] = []
    for factor in factors:
        size = mesh[factor] if isinstance(factor, str) and factor not in axes else factor
        if isinstance(size, int) and found and isinstance(found[-1], int):
            found[-1] *= size
        else:
            found.append(size)
    while found and isinstance(found[-1], int):
        found.pop()
    return Layout((tuple(found), ()))


def test_reasons_name_value_user_and_layouts() -> None:
    local = resharded(parse_layout("[dp,-] partial(tp)"), parse_layout("[dp,-]"), (12, 36))
    (row,) = [record(node) for node in local.calls() if node.target is op("all_reduce")]
    assert row.reason == "%alias_default is [dp,-] partial(tp), but %alias_default_1 wants [dp,-]"
    assert (row.made_by, row.origin, row.source) == ("reshard", "alias", "model.py:1")


INDEX, AGAIN = "remainder.Scalar(%remainder, 4)", "remainder.Scalar(%again, 4)"
BATCH = '%batch_{0}: i64[8] [dp:ep] = batch "{0}"'
OTHERS: dict[str, dict[str, str]] = {
    "number": {AGAIN: "remainder.Scalar(%again, 3)"},
    "operand": {INDEX: "add.Tensor(%remainder, 4)", AGAIN: "add.Tensor(%again, %remainder)"},
    "op": {AGAIN: "fmod.Scalar(%again, 4)"},
    "number of arguments": {INDEX: "clamp.default(%remainder, 0)", AGAIN: "clamp.default(%again, 0, 3)"},
    "input": {BATCH.format(1): f"{BATCH.format(1)}\n{BATCH.format(2)}", AGAIN: "remainder.Scalar(%batch_2, 4)"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_rows_go_to_their_experts_by_one_index(name: str) -> None:
    """Of the two indices of a golden program, which are computed alike, one has another number, op, ..."""
    case = read("reshard/accompanying")
    text = case.given
    for old, new in OTHERS[name].items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    message = (
        "rows that went to their experts by %remainder_1 (model.py:3) are multiplied by those of %again_1 "
        "(model.py:4), at model.py:6 in : one layer has one index. Use the same one for all matrices of an expert."
    )
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        reshard(parse_program(text), case.plan)
