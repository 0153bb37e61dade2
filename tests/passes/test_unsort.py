"""Experts on sorted rows: the sort is left out where nobody sees it, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from experts import PERMUTED, SEEN, UNSEEN, experts_case
from torch import Tensor, nn

from autopar.api import compile
from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.meshes import mesh_of
from autopar.ir.ops.op_facts import facts_of
from autopar.ir.ops.ops import op_name
from autopar.ir.plan import Plan
from autopar.ir.program import Program, record
from autopar.ir.text.text import parse_program
from autopar.passes.sorts.sorted_keys import Keys, Of
from autopar.passes.sorts.unsort import unsort
from autopar.verification.verify import verify

TOPK = "aten.topk.default"  # of the router


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def sorts(program: Program) -> set[str]:
    return {str(node.target) for node in program.calls() if facts_of(node.target).moves == "sorted"}


def compiled(way: str, mesh: str) -> Compiled:
    model, batch = experts_case(way)
    return compile(model, mesh, loss_fn=loss_fn, batch=batch)


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=3", "dp=2,tp=3", "tp=4"])
@pytest.mark.parametrize("way", UNSEEN)
def test_the_numbers_are_those_of_one_device(way: str, mesh: str) -> None:
    model, batch = experts_case(way)
    report = verify(model, mesh, loss_fn=loss_fn, batch=batch)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3,tp=2"])
@pytest.mark.parametrize("way", PERMUTED)
def test_a_permutation_is_known_however_it_is_made(way: str, mesh: str) -> None:
    model, batch = experts_case(way)
    report = verify(model, mesh, loss_fn=loss_fn, batch=batch)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize("way", [*UNSEEN, *PERMUTED])
def test_nothing_is_sorted_and_every_product_is_split(way: str) -> None:
    found = compiled(way, "dp=3,tp=2")
    assert sorts(found.program) <= {TOPK}
    sharded = dict(found.history)["propagate"]
    products = [node for node in sharded.calls() if str(node.target).startswith("autopar.expert_mm")]
    assert len(products) == 6
    for node in products:
        axes = {axis for layout in (*record(node).operands, record(node).layout) for axis in layout.axes}
        assert {"dp", "tp"} <= axes
    assert not [row for row in found.collectives if row.op == "all_gather" and row.axis == "dp"]


@pytest.mark.parametrize("way", SEEN)
def test_a_sort_that_shows_stays(way: str) -> None:
    model, batch = experts_case(way)
    captured = capture(model, loss_fn, batch, {}).program
    plan = Plan(mesh_of("dp=2"), {})
    assert unsort(captured, plan) is captured
    assert sorts(captured)
    report = verify(model, "dp=2", loss_fn=loss_fn, batch=batch)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize(("mesh", "options"), [("dp=3,tp=2", {}), ("ep=2,tp=2", {}), ("ep=2", {"microbatches": 3})])
def test_rows_that_draw_are_told_their_places(mesh: str, options: dict[str, Any]) -> None:
    """Where their order is the only thing that shows: the keys of all are gathered for it, and no row."""
    model, batch = experts_case("dropped")
    report = verify(model, mesh, loss_fn=loss_fn, batch=batch, **options)
    assert report.ok and report.max_error < 1e-10, report
    program = compile(model, mesh, loss_fn=loss_fn, batch=batch, **options).program
    gathered = [node for node in program.calls() if op_name(node.target) == "all_gather"]
    assert not [one for one in gathered if record(one).type.dtype.is_floating_point and one.args[1] in ("dp", "ep")]


def test_without_others_rows_rows_draw_in_one_kernel() -> None:
    model, batch = experts_case("dropped")
    captured = capture(model, loss_fn, batch, {}).program
    assert unsort(captured, Plan(mesh_of("tp=2"), {})) is captured


def test_counts_are_no_ends() -> None:
    """Of a program that is wrong already: it must not become another one."""
    model, batch = experts_case("counts")
    captured = capture(model, loss_fn, batch, {}).program
    assert unsort(captured, Plan(mesh_of("dp=2"), {})) is captured


def test_a_wrong_count_is_no_proof() -> None:
    """Ends that count something else than the sorted rows say nothing of their experts."""

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 12, 12))

        def forward(self, x: Tensor, experts: Tensor, other: Tensor) -> Tensor:
            _, order = torch.sort(experts)
            ends = torch.histc(other.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
            y = nn.functional.grouped_mm(x[order], self.up, offs=ends)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.shape[0])
            return y[inverse].square().mean()

    batch = (torch.randn(12, 12), torch.arange(12) % 4, torch.arange(12) // 4)
    captured = capture(Other(), None, batch, {}).program
    assert unsort(captured, Plan(mesh_of("dp=2"), {})) is captured
    assert verify(Other(), "dp=2", batch=batch).ok


def test_keys_added_up_are_no_ends() -> None:
    """Each row is a group of its own: the ends are the sum of keys, and not of how many of each there are."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(12, 12, 12))

        def forward(self, x: Tensor, experts: Tensor) -> Tensor:
            _, order = torch.sort(experts)
            y = nn.functional.grouped_mm(x[order], self.up, offs=experts.cumsum(0, dtype=torch.int32))
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(order.shape[0])
            return y[inverse].square().mean()

    captured = capture(Own(), None, (torch.randn(12, 12), torch.ones(12, dtype=torch.long)), {}).program
    assert unsort(captured, Plan(mesh_of("dp=2"), {})) is captured


KEYS = """\
CAPTURED program
%keys: i64[24] = batch "0"
%weight: f32[4] = parameter "w"
%one: i64[24,1] = aten.view.default(%keys, [24, 1])
%wide: i32[24] = aten._to_copy.default(%keys, dtype=i32)
%short: i16[24] = aten._to_copy.default(%keys, dtype=i16)
%half: f16[24] = aten._to_copy.default(%keys, dtype=f16)
%single: f32[24] = aten._to_copy.default(%keys, dtype=f32)
%groups: i64[4] = aten.arange.default(4)
%others: i64[4] = aten.arange.start(1, 5)
%hits: b8[24,4] = aten.eq.Tensor(%one, %groups)
%shifted: b8[24,4] = aten.eq.Tensor(%one, %others)
%octets: u8[24,4] = aten._to_copy.default(%hits, dtype=u8)
%counts: i64[4] = aten.sum.dim_IntList(%octets, [0])
%narrow: i16[4] = aten.sum.dim_IntList(%octets, [0], dtype=i16)
%by_row: i64[24] = aten.sum.dim_IntList(%octets, [1])
%cut: i16[4] = aten._to_copy.default(%counts, dtype=i16)
%kept: i32[4] = aten._to_copy.default(%counts, dtype=i32)
%turned: i64[2,2] = aten.view.default(%counts, [2, 2])
%ends: i32[4] = aten.cumsum.default(%kept, 0, dtype=i32)
%sums: i64[24] = aten.cumsum.default(%keys, 0)
%rows: i64[24] = aten.arange.default(24)
%fewer: i64[23] = aten.arange.default(23)
%group: i64[24] = aten.searchsorted.Tensor(%ends, %rows, right=True)
%left: i64[24] = aten.searchsorted.Tensor(%ends, %rows)
%part: i64[23] = aten.searchsorted.Tensor(%ends, %fewer, right=True)
%histogram: f32[4] = aten.histc.default(%single, 4, 0, 3)
%histogram_4: f32[4] = aten.histc.default(%single, 4, 0, 4)
%histogram_5: f32[4] = aten.histc.default(%single, 4, 0, 5)
%histogram_1: f32[4] = aten.histc.default(%single, 4, 1, 4)
%of_all: f32[4] = aten.histc.default(%single, 4)
%ones: i64[24] = aten.ones.default([24])
%twos: i64[24] = aten.full.default([24], 2)
%zeros: i64[4] = aten.zeros.default([4])
%added: i64[4] = aten.index_add.default(%zeros, 0, %keys, %ones)
%doubled: i64[4] = aten.index_add.default(%zeros, 0, %keys, %twos)
%more: i64[4] = aten.index_add.default(%groups, 0, %keys, %ones)
%elsewhere: i64[4] = aten.index_add.default(%zeros, 0, %rows, %ones)
return value "x" = %added
"""
SAID = {
    "keys": Of.KEYS, "one": Of.KEYS, "wide": Of.KEYS, "single": Of.KEYS, "hits": Of.HITS, "octets": Of.HITS,
    "counts": Of.COUNTS, "kept": Of.COUNTS, "ends": Of.ENDS, "group": Of.KEYS, "histogram": Of.COUNTS,
    "histogram_4": Of.COUNTS, "added": Of.COUNTS,
}  # fmt: skip


def test_what_values_say_of_keys() -> None:
    """And what of it is left out: casts that round, sums along rows, other groups, numbers other than one."""
    program = parse_program(KEYS)
    keys = Keys(program.placeholders[0])
    for node in program.calls():
        keys.learn(node)
    assert {node.name: said for node, said in keys.of.items()} == SAID


HOT = """\
CAPTURED program
%scores: f32[24,4] = batch "0"
%topk: (f32[24,2], i64[24,2]) = aten.topk.default(%scores, 2)
%index: i64[24,2] = operator.getitem(%topk, 1)
%zeros: f32[24,4] = aten.zeros.default([24, 4])
%full: f32[24,4] = aten.full.default([24, 4], 1.0)
%hot: f32[24,4] = aten.scatter.value(%zeros, 1, %index, 1)
%last: f32[24,4] = aten.scatter.value(%zeros, -1, %index, 1)
%twos: f32[24,4] = aten.scatter.value(%zeros, 1, %index, 2)
%rows: f32[24,4] = aten.scatter.value(%zeros, 0, %index, 1)
%more: f32[24,4] = aten.scatter.value(%full, 1, %index, 1)
return value "x" = %hot
"""


@pytest.mark.parametrize(
    ("op", "hits"),
    [("aten.topk.default(%scores, 2)", {"hot", "last"}), ("aten.mode.default(%scores, 1)", set())],
)  # fmt: skip
def test_a_table_of_which_keys_a_row_has(op: str, hits: set[str]) -> None:
    """Of keys that differ in each row, as those of topk do: not of another op's."""
    program = parse_program(HOT.replace("aten.topk.default(%scores, 2)", op))
    nodes = {node.name: node for node in program.nodes}
    keys = Keys(nodes["index"])
    for node in program.calls():
        keys.learn(node)
    assert {node.name for node, said in keys.of.items() if said is Of.HITS} == hits
