"""The virtual mesh: collectives against their definition, and mismatches that name who waits for what."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from torch import fx

from autopar.errors import RankError
from autopar.ir.layout import Layout, combine, local_part, parse_layout
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.ops.ops import op
from autopar.ir.program import Record, TensorType, set_record
from autopar.runtime.collectives.mesh_ops import axis_coord, axis_group, join, pieces
from autopar.runtime.executor.executor import Executable
from autopar.runtime.ranks.virtual import VirtualMesh

MESH = parse_mesh("dp=2,tp=3")


def program(*calls: tuple[str, Any], made_by: str = "reshard") -> Executable:
    """A chain of mesh ops on one input."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    note = Record((TensorType((6,), torch.float64),), module="blocks.0", source="gpt.py:41", made_by=made_by)
    set_record(value, note)
    for name, *args in calls:
        value = graph.call_function(op(name), (value, *args))
        set_record(value, note)
    graph.output((value,))
    return Executable(graph)


def on_mesh(executable: Executable, parts: list[torch.Tensor], mesh: Mesh = MESH) -> list[torch.Tensor]:
    return [outputs[0] for outputs in VirtualMesh(mesh).run(executable, [[part] for part in parts])]


def split(value: torch.Tensor, layout: str, mesh: Mesh = MESH) -> list[torch.Tensor]:
    return [local_part(value, parse_layout(layout), mesh, coord) for coord in mesh.coords()]


# From one layout to another by one collective: program, layout before, layout after, shape.
CHANGES = [
    (("all_gather", "tp", 0, 1), "[tp,-]", "[-,-]", (6, 4)),
    (("all_gather", "tp", 1, 1), "[dp,tp]", "[dp,-]", (6, 12)),
    (("all_gather", "tp", 1, 2), "[-,2:tp]", "[-,-]", (6, 12)),
    (("all_gather", "dp", 0, 3), "[3:dp,tp]", "[-,tp]", (12, 12)),
    (("all_gather", "dp:tp", 0, 1), "[dp:tp,-]", "[-,-]", (12, 4)),
    (("all_gather", "tp:dp", 1, 1), "[-,tp:dp]", "[-,-]", (4, 12)),
    (("all_gather", "tp", 0, 1), "[dp:tp,-]", "[dp,-]", (12, 4)),
    (("shard", "tp", 1, 1), "[dp,-]", "[dp,tp]", (6, 12)),
    (("shard", "tp", 1, 2), "[dp,-]", "[dp,2:tp]", (6, 12)),
    (("shard", "tp:dp", 0, 1), "[-,-]", "[tp:dp,-]", (6, 2)),
    (("keep_first", "tp"), "[dp,-]", "[dp,-] partial(tp)", (6, 2)),
    (("keep_first", "tp:dp"), "[-,-]", "[-,-] partial(dp,tp)", (6, 2)),
    (("all_to_all", "tp", 0, 1, 1, 1), "[tp,-]", "[-,tp]", (6, 12)),
    (("all_to_all", "tp", 1, 2, 0, 1), "[dp,2:tp]", "[dp:tp,-]", (12, 12)),
    (("all_to_all", "dp", 0, 1, 1, 3), "[dp,tp]", "[-,tp:3:dp]", (6, 36)),
    (("all_to_all", "dp:tp", 1, 1, 2, 1), "[-,dp:tp,-]", "[-,-,dp:tp]", (2, 6, 12)),
]


@pytest.mark.parametrize("call,before,after,shape", CHANGES, ids=lambda c: str(c[0]) if isinstance(c, tuple) else c)
def test_layout_changes(call: tuple[Any, ...], before: str, after: str, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape, dtype=torch.float64)
    got = on_mesh(program(call), split(value, before))
    want = split(value, after)
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), rank


@pytest.mark.parametrize("axis", ["dp", "tp", "dp:tp"])
@pytest.mark.parametrize("by", [1, 2, -1])
def test_a_shift_gives_what_the_rank_before_has(axis: str, by: int) -> None:
    parts = [torch.full((2, 3), float(rank)) for rank in range(6)]
    for calls in ([("shift", axis, by)], [("shift_start", axis, by), ("wait",)]):
        for rank, got in enumerate(on_mesh(program(*calls), parts)):
            group, place = axis_group(MESH, rank, axis), axis_coord(MESH, MESH.coord(rank), axis)
            assert torch.equal(got, parts[group[(place - by) % len(group)]])


@pytest.mark.parametrize("kind", ["sum", "max", "min", "logsumexp"])
@pytest.mark.parametrize("axis", ["dp", "tp", "dp:tp"])
def test_reductions(kind: str, axis: str) -> None:
    parts = [torch.randn(12, 4, dtype=torch.float64) for _ in range(6)]
    layout = Layout(((), ()), tuple((name, kind) for name in ("dp", "tp") if name in axis.split(":")))
    group_mesh = Mesh(tuple((name, MESH[name]) for name in axis.split(":")))
    want = [combine([parts[r] for r in axis_group(MESH, rank, axis)], layout, group_mesh) for rank in range(6)]
    for name in ("all_reduce", "all_reduce_start"):
        calls = [(name, axis, kind)] + ([("wait",)] if name.endswith("start") else [])
        for got, expected in zip(on_mesh(program(*calls), parts), want, strict=True):
            torch.testing.assert_close(got, expected)
    count = MESH[axis]
    for dim, outer in ((0, 1), (0, 2)):
        scattered = on_mesh(program(("reduce_scatter", axis, dim, outer, kind)), parts)
        for rank in range(6):
            place = axis_coord(MESH, MESH.coord(rank), axis)
            torch.testing.assert_close(scattered[rank], pieces(want[rank], count, dim, outer)[place])


def test_reductions_keep_the_dtype() -> None:
    for dtype in (torch.int32, torch.bfloat16, torch.bool):
        parts = [torch.ones(6, 2).to(dtype) for _ in range(6)]
        assert on_mesh(program(("all_reduce", "tp", "sum")), parts)[0].dtype == dtype


def test_coordinates() -> None:
    graph = fx.Graph()
    graph.output(tuple(graph.call_function(op("coord"), (axis,)) for axis in ("dp", "tp", "dp:tp", "tp:dp")))
    got = VirtualMesh(MESH).run(Executable(graph), [[]] * 6)
    assert got == [(dp, tp, dp * 3 + tp, tp * 2 + dp) for dp in range(2) for tp in range(3)]


def test_pieces_and_join_are_inverse() -> None:
    x = torch.arange(2 * 12 * 5).view(2, 12, 5)
    for outer in (1, 2, 4):
        assert torch.equal(join(pieces(x, 3, 1, outer), 1, outer), x)


def test_ranks_do_not_share_memory() -> None:
    """A rank may overwrite its answer: the others' must not change."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(op("all_reduce"), (x, "tp", "sum"))
    graph.output((graph.call_function(torch.Tensor.add_, (total, graph.call_function(op("coord"), ("tp",)))),))
    got = on_mesh(Executable(graph), [torch.ones(2)] * 6)
    assert [g[0].item() for g in got] == [3, 4, 5, 3, 4, 5]


def test_observer_knows_the_rank() -> None:
    seen: list[tuple[int, str]] = []
    executable = program(("all_reduce", "tp", "sum"))
    VirtualMesh(MESH).run(executable, [[torch.ones(2)]] * 6, lambda rank, node, _: seen.append((rank, node.name)))
    assert sorted(seen) == sorted((rank, name) for rank in range(6) for name in ("x", "all_reduce_default"))


def test_no_autograd_graph_is_built() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    (got, *_) = on_mesh(program(("all_reduce", "tp", "sum")), [weight] * 6)
    assert not got.requires_grad


def test_operands_and_answers_are_freed() -> None:
    """Neither the driver nor a request keeps what a mesh op took or gave."""
    watched: dict[str, weakref.ref[torch.Tensor]] = {}

    def watch(name: str, value: torch.Tensor) -> torch.Tensor:
        """A copy of the value; both are watched, as the answer of one mesh op and as the operand of the next."""
        copy = value.clone()
        watched[name], watched[f"{name}, copied"] = weakref.ref(value), weakref.ref(copy)
        return copy

    def check(*names: str) -> None:
        assert [name for name in names if watched[name]() is not None] == []

    graph = fx.Graph()
    value = graph.call_function(watch, ("input", graph.placeholder("x")))
    dead = ["input"]
    for name in ("all_reduce", "keep_first", "shard", "all_reduce_start", "wait"):
        args = {"keep_first": ("tp",), "shard": ("tp", 0, 1), "wait": ()}.get(name, ("tp", "sum"))
        given = graph.call_function(op(name), (value, *args))
        value = graph.call_function(watch, (name, given))
        dead += [f"{dead[-1]}, copied", name]
        graph.call_function(check, tuple(dead))
    graph.output((value,))
    VirtualMesh(parse_mesh("tp=1")).run(Executable(graph), [iter([torch.ones(6)])])
    assert len(watched) == 12


# --- disagreement


def mismatch(*others: Executable | None, first: tuple[str, Any], shapes: dict[int, int] | None = None) -> str:
    programs = [program(first)] * 6
    for rank, other in enumerate(others):
        if other is not None:
            programs[rank] = other
    inputs = [[torch.ones((shapes or {}).get(rank, 6), dtype=torch.float64)] for rank in range(6)]
    with pytest.raises(RankError) as caught:
        VirtualMesh(MESH).run(programs, inputs)
    return str(caught.value)


def test_mismatch_names_ranks_nodes_and_lines() -> None:
    message = mismatch(None, program(("all_reduce", "tp", "max"), made_by="bucket"), first=("all_reduce", "tp", "sum"))
    place = "# blocks.0  gpt.py:41"
    assert message == (
        "ranks that must ask for the same do not:\n"
        f"  rank 0 (dp=0,tp=0) waits at %all_reduce_default = autopar.all_reduce  (made by reshard)  {place}\n"
        "    with (float64[6], 'tp', 'sum')\n"
        f"  rank 1 (dp=0,tp=1) waits at %all_reduce_default = autopar.all_reduce  (made by bucket)  {place}\n"
        "    with (float64[6], 'tp', 'max')\n"
        f"  rank 2 (dp=0,tp=2) waits at %all_reduce_default = autopar.all_reduce  (made by reshard)  {place}\n"
        "    with (float64[6], 'tp', 'sum')"
    )


def test_mismatch_of_op_shape_and_dtype() -> None:
    assert "autopar.reduce_scatter" in mismatch(
        program(("reduce_scatter", "tp", 0, 1, "sum")), first=("all_reduce", "tp", "sum")
    )
    assert "float64[3]" in mismatch(first=("all_reduce", "tp", "sum"), shapes={2: 3})


def test_waiting_for_a_finished_rank() -> None:
    message = mismatch(None, program(), first=("all_reduce", "tp", "sum"))
    assert message.startswith("a rank waits for one that has finished:")
    assert "rank 1 (dp=0,tp=1) finished" in message


def test_ranks_that_wait_for_each_other() -> None:
    tp_first = program(("all_reduce", "tp", "sum"), ("all_reduce", "dp", "sum"))
    dp_first = program(("all_reduce", "dp", "sum"), ("all_reduce", "tp", "sum"))
    with pytest.raises(RankError) as caught:
        # 0 waits for 1 on tp, 1 for 4 on dp, 4 for 3 on tp, 3 for 0 on dp
        VirtualMesh(MESH).run([tp_first if r in (0, 4) else dp_first for r in range(6)], [[torch.ones(2)]] * 6)
    lines = str(caught.value).splitlines()
    assert lines[0] == "the ranks wait for each other:"
    assert lines[1].startswith("  rank 0 (dp=0,tp=0) waits at %all_reduce_default = autopar.all_reduce")
    assert lines[2] == "    with (float32[2], 'tp', 'sum')"
    assert "rank 3 (dp=1,tp=0) waits at" in lines[7] and lines[8] == "    with (float32[2], 'dp', 'sum')"


def test_different_orders_of_independent_groups_are_no_mismatch() -> None:
    """Rank (0,*) and rank (1,*) are different tp groups: they need not be at the same node."""
    two = program(("all_reduce", "tp", "sum"), ("all_reduce", "tp", "sum"), ("all_reduce", "dp", "sum"))
    one = program(("all_reduce", "tp", "sum"), ("all_reduce", "dp", "sum"))
    got = VirtualMesh(MESH).run([two] * 3 + [one] * 3, [[torch.ones(2)]] * 6)
    assert {out[0][0].item() for out in got} == {12.0}


def test_an_error_names_the_rank() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.view.default, (graph.placeholder("x"), [5])),))
    with pytest.raises(RuntimeError) as caught:
        on_mesh(Executable(graph), [torch.ones(5), torch.ones(4), *[torch.ones(5)] * 4])
    assert caught.value.__notes__ == ["in %view_default = aten.view", "on rank 1 at dp=0,tp=1"]


def test_wrong_number_of_programs() -> None:
    with pytest.raises(RankError, match="has 6 ranks, but there are programs for 6 and inputs for 2"):
        VirtualMesh(MESH).run(program(), [[torch.ones(2)]] * 2)


def test_sixty_four_ranks_are_quick() -> None:
    executable = program(*[("all_reduce", "dp", "sum"), ("all_gather", "tp", 0, 1), ("shard", "tp", 0, 1)] * 20)
    start = time.perf_counter()
    mesh = parse_mesh("dp=8,tp=8")
    on_mesh(executable, [torch.ones(8)] * 64, mesh)
    assert time.perf_counter() - start < 2
