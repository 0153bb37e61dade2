"""Experts split over `ep`: steps on the virtual mesh beside one device, what moves, what is refused and found."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from mixtures import Kind, Mixture, mixture_case
from torch import Tensor, nn
from verified import Once

import autopar
from autopar.errors import BatchError, LayoutError, MeshError, PlanError, RankError, ScheduleError
from autopar.ir.ops.ops import op, op_name
from autopar.ir.plan import Fixed
from autopar.ir.program import Program, record
from autopar.passes.collectives.routing import Routing
from autopar.runtime.collectives import collectives, mesh_ops, rows_to_owners
from autopar.runtime.executor import executor
from autopar.runtime.kernels.experts import expert_mm_backward
from autopar.verification.judge.comparison import Report
from autopar.verification.verify import verify
from benchmarks.mixtures import AT_ONCE

PLAIN = Kind()
# Meshes and options for one model; then ways of routing, each on two sizes of ep.
MESHES: list[tuple[str, dict[str, Any]]] = [
    ("ep=8", {}),
    ("dp=2,ep=2", {"zero": 1}),
    ("dp=2,ep=2", {"zero": 2}),
    ("dp=2,ep=2", {"zero": 3}),
    ("ep=2,dp=2", {}),
    ("fsdp=2,ep=2", {}),
    ("ep=2,tp=2", {}),
    ("ep=2,tp=2", {"sequence_parallel": True}),
    ("ep=2,cp=2", {}),
    ("ep=2,cp=2", {"zero": 2}),
    ("ep=2", {"microbatches": 2, "zero": 3}),
    ("pp=2,ep=2", {"microbatches": 4, "schedule": "1f1b"}),
    ("pp=2,ep=2", {"microbatches": 4, "schedule": "gpipe"}),
    ("pp=2,ep=2", {"microbatches": 4, "schedule": "zb-v"}),
    ("pp=2,ep=2", {"microbatches": 4, "schedule": "interleaved-1f1b"}),
    ("pp=2,dp=2,ep=2,tp=2", {"zero": 1}),
    ("ep=2", {"recompute": "full"}),
    ("ep=2", {"recompute": "selective"}),
    ("ep=2", {"recompute": 0.9, "chunked_loss": True}),
    ("ep=2,tp=2", {"compile": "triton"}),
    ("dp=4", {"experts": "dp", "zero": 2}),
    ("dp=2,fsdp=2", {"experts": "fsdp"}),
    ("dp=2,cp=2,tp=2", {"experts": "cp", "zero": 1}),
    ("pp=2,dp=2", {"experts": "dp", "microbatches": 4, "zero": 1}),
    ("dp=2,fsdp=2", {"experts": "dp:fsdp"}),
    ("dp=2,cp=2,tp=2", {"experts": "dp:cp", "zero": 1, "expert_rows": 4.0}),
    ("pp=2,dp=2,cp=2", {"experts": "dp:cp", "microbatches": 2, "recompute": "full"}),
    ("ep=4", {"expert_rows": 4.0}),
    ("dp=2,ep=2", {"expert_rows": 2.0, "zero": 3, "compile": "triton"}),
    ("ep=2,tp=2", {"expert_rows": 2.0, "sequence_parallel": True}),
    ("ep=2,cp=2", {"expert_rows": 2, "recompute": "full"}),
    ("pp=2,ep=2", {"expert_rows": 2.0, "microbatches": 2, "schedule": "1f1b"}),
]
ROUTINGS = [
    PLAIN,
    Kind(chosen=1),
    Kind(chosen=8),
    Kind(experts=4, chosen=3),  # one expert a rank on ep=4
    Kind(skew=-1),  # ties
    Kind(skew=50),  # two experts, of one rank
    Kind(chosen=1, skew=50),
    Kind(bias=True),
    Kind(shared=True, aux=True),
]


@functools.cache
def _once(kind: Kind) -> Once:
    model, batch = mixture_case(kind)
    return Once.of(model, None, batch)


def _verified(kind: Kind, mesh: str, **options: Any) -> Report:
    once = _once(kind)
    return once.report(once.compiled(mesh, Fixed(machine=AT_ONCE), **options))


@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
def test_a_step_on_a_mesh_is_that_of_one_device(mesh: str, options: dict[str, Any]) -> None:
    report = _verified(PLAIN, mesh, **options)
    assert report.ok and report.max_error < 1e-10, report


@pytest.mark.parametrize("mesh", ["ep=2", "ep=4"])
@pytest.mark.parametrize("kind", ROUTINGS, ids=str)
def test_a_step_of_any_routing_is_that_of_one_device(kind: Kind, mesh: str) -> None:
    report = _verified(kind, mesh)
    assert report.ok and report.max_error < 1e-10, report


# Losses of the router are those of the global batch, and its noise that of one device.
OF_ROUTERS: list[tuple[Kind, str, dict[str, Any]]] = [
    (Kind(z=True), "dp=2,ep=2", {}),
    (Kind(z=True, aux=True), "ep=2", {"microbatches": 2, "zero": 1}),
    (Kind(jitter=True, aux=True), "dp=2,ep=2", {"recompute": "full"}),
    (Kind(jitter=True, z=True, way="loop"), "ep=2", {"microbatches": 2}),
    (Kind(aux=True, z=True, jitter=True), "pp=2,ep=2", {"microbatches": 4, "schedule": "gpipe"}),
    (Kind(aux=True), "pp=2,ep=2", {"microbatches": 4, "schedule": "1f1b"}),
    (Kind(aux=True, way="loop", skew=50), "dp=2,ep=2", {}),
]


@pytest.mark.parametrize(("kind", "mesh", "options"), OF_ROUTERS, ids=str)
def test_losses_and_noise_of_a_router_are_those_of_one_device(kind: Kind, mesh: str, options: dict[str, Any]) -> None:
    report = _verified(kind, mesh, **options)
    assert report.ok and report.max_error < 1e-10, report


def test_a_loss_over_the_batch_with_a_schedule_that_cannot_wait_names_both_ways_out() -> None:
    with pytest.raises(ScheduleError) as error:
        _program(Kind(aux=True), "pp=2,ep=2", microbatches=4, schedule="zb-v")
    assert re.sub(r"py:\d+", "py:N", str(error.value)) == (
        "schedule 'zb-v' lets micro-batches go back before all have come forward, but op 'aten.sum.dim_IntList' "
        "('mixed.0' at mixtures.py:N) needs the whole batch (%all_reduce), and 'mixed.0' at mixtures.py:N uses it "
        "before the micro-batch is done (%mul_1). Use schedule 'gpipe', which lets all come forward first, or "
        "microbatches=1."
    )


def test_biases_of_experts_are_split_as_these_are() -> None:
    """Red when tp split them over again, and when they were looked up at home: two more trips each."""
    report = _verified(Kind(bias=True), "dp=2,ep=2,tp=2")
    assert report.ok and report.max_error < 1e-10, report
    program = _program(Kind(bias=True), "ep=2,tp=2")
    layouts = {entry.name: str(record(node).layout) for node, entry in program.parameters()}
    assert layouts["mixed.0.up_bias"] == "[ep,tp]" and layouts["mixed.0.down_bias"] == "[ep,-]"
    assert _count(program, "dispatch") == _count(program, "combine") == 3 * PLAIN.blocks, "biases do not go"


def test_products_by_expert_and_sums_in_short_floats() -> None:
    """Within twice what autocast is off, and no gradient is summed short."""
    model, batch = mixture_case(PLAIN)
    assert verify(model, "dp=2,ep=2", batch=batch, machine=AT_ONCE, precision="bf16").ok


@pytest.mark.parametrize("kind", [*ROUTINGS, Kind(bias=True, aux=True, skew=50)], ids=str)
def test_padded_messages_carry_any_routing(kind: Kind) -> None:
    report = _verified(kind, "ep=2", expert_rows=2.0)
    assert report.ok and report.max_error < 1e-10, report


def test_more_rows_than_the_bound_are_an_error() -> None:
    with pytest.raises(BatchError) as error:
        _verified(Kind(chosen=1, skew=50), "ep=4", expert_rows=1.25)
    assert re.sub(r"py:\d+", "py:N", str(error.value)) == (
        "12 rows go from part 0 of the batch to the experts of part 0 on axis 'ep', and there is room for 4: 3 go to "
        "each on average. expert_rows=4 would do for these, or leave it out where the host may read how many there "
        "are. It is at mixtures.py:N in mixed.0."
    )
    with pytest.raises(PlanError, match=r"^expert_rows=0.5: write a factor of the mean rows, 1.0 or more, as 1.25; "):
        autopar.compile(nn.Linear(4, 4), "dp=1", batch=(torch.randn(4, 4),), loss_fn=_mean, expert_rows=0.5)


def test_padding_is_added_up_by_nobody() -> None:
    """Rows of no expert are zeros, and their cosine is not."""
    torch.manual_seed(0)
    batch = (torch.randn(8, 6), torch.tensor([3, 0, 1, 0, 2, 0, 0, 3]))
    for options in ({}, {"expert_rows": 2.0}):
        report = verify(_Cosine(), "ep=2", batch=batch, **options)
        assert report.ok and report.max_error < 1e-10, (options, report)


def _mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def _program(kind: Kind, mesh: str, **options: Any) -> Program:
    return _once(kind).compiled(mesh, Fixed(machine=AT_ONCE), **options).program


def _count(program: Program, name: str) -> int:
    return sum(node.target in (op(name), op(f"{name}_start")) for node in program.calls())


@pytest.mark.parametrize("options", [{}, {"zero": 3}, {"recompute": "full"}], ids=str)
def test_two_trips_there_and_two_back_and_one_route_a_layer(options: dict[str, Any]) -> None:
    """Of rows; of tokens, with the weights and their gradient, and no way back of what is computed again."""
    again = PLAIN.blocks if options.get("recompute") == "full" else 0
    for kind, trips, back in ((Kind(chosen=1), 2, again), (PLAIN, 3, 0)):
        program = _program(kind, "dp=2,ep=2", **options)
        assert _count(program, "route") == kind.blocks, "also for the backward pass, and what is computed again"
        assert _count(program, "token_places") == (kind.chosen > 1) * kind.blocks
        assert _count(program, "dispatch") == trips * kind.blocks + again
        assert _count(program, "combine") == trips * kind.blocks + back


def test_rows_go_along_joined_axes_at_once() -> None:
    """As over an axis of all these ranks: no row makes two trips."""
    program = _program(PLAIN, "dp=2,fsdp=2", experts="dp:fsdp")
    ways = tuple(op(f"{name}{half}") for name in ("dispatch", "combine") for half in ("", "_start"))
    moved = [str(node.args[1]) for node in program.calls() if node.target in ways]
    assert moved == ["dp:fsdp"] * 4 * PLAIN.blocks
    layouts = {entry.name: str(record(node).layout) for node, entry in program.parameters()}
    assert layouts["mixed.0.up"] == layouts["mixed.0.down"] == "[dp:fsdp,-,-]"


FOLDED = [
    ("cp=2", "cp", "ep=2"), ("dp=2,cp=2", "cp", "dp=2,ep=2"), ("dp=2,cp=2", "dp:cp", "ep=4"),
    ("fsdp=2", "fsdp", "ep=2"),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "axis", "own"), FOLDED)
def test_rows_go_from_where_they_lie_to_experts_on_an_axis_that_is_there(mesh: str, axis: str, own: str) -> None:
    """Byte for byte as over an axis of their own: where a rank has a piece of each sample no row is gathered first."""
    model, batch = mixture_case(PLAIN)
    made = partial(autopar.compile, model, batch=batch, machine=AT_ONCE)
    moved = [
        [(one.op, one.bytes, one.phase) for one in made(*given, **options).collectives
         if one.op != "all_reduce" and "weight" not in one.reason]
        for given, options in (((mesh,), {"experts": axis}), ((own,), {}))
    ]  # fmt: skip
    found, wanted = (
        [one for one in rows if one[0] in ("route", "dispatch", "combine", "all_to_all")] for rows in moved
    )
    weights = 0 if own == "ep=4" else 2  # over more ranks they would cost more than they save
    assert found == wanted and len(wanted) == (5 + weights) * PLAIN.blocks
    if "fsdp" not in mesh:  # which gathers weights
        assert not any(name in ("all_gather", "reduce_scatter") for name, *_ in moved[0])


def test_experts_over_an_axis_that_is_there_lie_as_over_one_of_their_own() -> None:
    own = {entry.name: record(node).layout for node, entry in _program(PLAIN, "ep=2", zero=2).parameters()}
    folded = _program(PLAIN, "dp=2", zero=2, experts="dp")
    assert {entry.name: str(record(node).layout) for node, entry in folded.parameters()} == {
        name: str(layout).replace("ep", "dp") for name, layout in own.items()
    }
    assert _count(folded, "route") == PLAIN.blocks and _count(folded, "dispatch") == 3 * PLAIN.blocks


def test_experts_lie_split_and_their_gradients_are_summed_over_other_axes_alone() -> None:
    program = _program(PLAIN, "dp=2,ep=2")
    layouts = {entry.name: str(record(node).layout) for node, entry in program.parameters()}
    assert layouts["mixed.0.up"] == "[ep,-,-]" and layouts["mixed.0.router.weight"] == "[-,-]"
    stored = {entry.name: str(record(node).layout) for node, entry in _program(PLAIN, "dp=2,ep=2", zero=1).parameters()}
    assert stored["mixed.0.up"] == "[ep,dp,-]" and stored["head.weight"] == "[dp:ep,-]"
    assert not any(
        "ep" in str(node.args[1]).split(":") and record(node).type.shape == (8, 12, 20)
        for node in program.calls()
        if node.target in (op("all_reduce"), op("all_reduce_start"))
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_that_of_as_many_rows_as_on_average(device: str) -> None:
    """Without data: what the host would read of counts is their mean. An odd number of rows is divided, too."""
    model, batch = mixture_case(PLAIN)
    for rows in (8, 4):
        compiled = autopar.compile(model, "ep=4", batch=tuple(part[:rows] for part in batch))
        assert compiled.memory(device=device).peak > 1000 and str(compiled.time())


def test_the_time_of_a_step_is_that_of_the_busiest_rank() -> None:
    model, (tokens, labels) = mixture_case(replace(PLAIN, width=512))
    batch = tokens.repeat(8, 40), labels.repeat(8, 40)
    for mesh, options in (("ep=4", {}), ("pp=2,ep=2", {"microbatches": 2})):
        compiled = autopar.compile(model, mesh, batch=batch, **options)
        padded = autopar.compile(model, mesh, batch=batch, expert_rows=3.0, **options)
        times = [compiled.time("h100-80g", imbalance).total for imbalance in (1.0, 2.0, 3.0)]
        assert times[0] < times[1] < times[2], (mesh, times)
        assert padded.time("h100-80g").total > times[0]
    whole = autopar.compile(model, "dp=4", batch=batch)
    assert whole.time("h100-80g", 3.0).total == whole.time("h100-80g").total


def test_explain_says_why_a_row_moves() -> None:
    model, batch = mixture_case(PLAIN)
    compiled = autopar.compile(model, "ep=2", batch=batch, machine=AT_ONCE)
    why = "'ep' splits the experts, and a row is computed by the rank that has its expert"
    text = str(compiled.explain("expert_mm"))
    assert re.search(rf"\[ep,-\] +forbidden +{re.escape(why)}\n", text), text
    assert re.search(r"dispatch +ep .* its operand is moved: a token goes once to a rank that has", text), text
    assert f"has each row of dim 0 where its expert is, decided by intent: {why}" in text
    assert why in str(compiled.explain("mixed.0.up"))


def test_rows_are_under_way_while_gradients_are_computed() -> None:
    """In both halves, where there is something to hide: the gradients of the experts' matrices."""
    model, (tokens, labels) = mixture_case(replace(PLAIN, width=256))
    program = autopar.compile(model, "ep=2", batch=(tokens.repeat(4, 40), labels.repeat(4, 40))).program
    assert {node.target for node in program.calls()} >= {op("dispatch_start"), op("combine_start")}


class _Early(Mixture):
    """The shared expert stands before the router in the code, as in some models, and not behind the experts."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.shared(x)
        routed, balance = Mixture.forward(self, x)
        return routed + y, balance


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("options", [{}, {"microbatches": 2}], ids=str)
def test_a_shared_expert_is_computed_while_rows_go_to_the_others(is_early: bool, options: dict[str, Any]) -> None:
    kind = Kind(shared=True, width=256)
    model, (tokens, labels) = mixture_case(kind)
    if is_early:
        for mixed in model.mixed:
            mixed.kind, mixed.__class__ = replace(kind, shared=False), _Early
    compiled = autopar.compile(model, "ep=2", batch=(tokens.repeat(4, 40), labels.repeat(4, 40)), **options)
    graphs = compiled.pipeline.graphs.values() if compiled.pipeline else [compiled.program]
    (order,) = (
        found
        for graph in graphs
        if (found := [(op_name(node.target), record(node)) for node in graph.calls()])
        and any(name == "expert_mm" and not known.is_backward for name, known in found)
    )
    order = [one for one in order if not one[1].is_backward]
    begun = [i for i, (name, known) in enumerate(order) if name == "dispatch_start" and known.type.shape[1] > 1]
    assert len(begun) == kind.blocks
    for block, at in enumerate(begun):
        end = next(i for i in range(at, len(order)) if order[i][0] == "wait")
        assert [known.module for name, known in order[at:end] if name == "einsum"] == [f"mixed.{block}.shared"]


def test_a_step_with_shared_experts_under_way_is_that_of_one_device() -> None:
    model, (tokens, labels) = mixture_case(Kind(shared=True, width=64))
    report = verify(model, "dp=2,ep=2", batch=(tokens.repeat(1, 8), labels.repeat(1, 8)), zero=1)
    assert report.ok and report.max_error < 1e-10, report


REFUSED: list[tuple[Kind, str, dict[str, Any], type[Exception], str]] = [
    (
        Kind(experts=6), "ep=4", {}, LayoutError,
        "axis 'ep' (size 4) splits experts, and can split none of the model:\n"
        "  ep=4 does not divide the 6 experts of mixed.0.up: ep may be 1, 2, 3 or 6\n"
        "  ep=4 does not divide the 6 experts of mixed.0.down: ep may be 1, 2, 3 or 6",
    ),
    (
        Kind(experts=3), "ep=2", {}, LayoutError,
        "axis 'ep' (size 2) splits experts, and can split none of the model:\n"
        "  ep=2 does not divide the 3 experts of mixed.0.up: ep may be 1 or 3\n"
        "  ep=2 does not divide the 3 experts of mixed.0.down: ep may be 1 or 3",
    ),
    (
        Kind(way="mask"), "ep=2", {}, LayoutError,
        "axis 'ep' (size 2) splits experts, and can split none of the model:\n"
        "  the model has no product that takes the matrix of each row by an index: sort rows by expert and use "
        'F.grouped_mm, with transformers experts_implementation="grouped_mm"; or stack the matrices, [experts, ..], '
        "and multiply rows that are put together by expert, [experts, rows, ..], by torch.bmm; or give the ranks to "
        "dp or tp",
    ),
    (
        PLAIN, "cp=2,ep=2,tp=2", {}, MeshError,
        "mesh 'cp=2,ep=2,tp=2': ep splits the batch, and cp what it leaves of a sample: write 'ep=2,cp=2,tp=2'.",
    ),
    (
        PLAIN, "tp=2,ep=2", {}, MeshError,
        "mesh 'tp=2,ep=2': ep splits the batch, and tp what it leaves of a sample: write 'ep=2,tp=2'.",
    ),
    (
        Kind(), "ep=3", {}, BatchError,
        "the batch has 8 samples (dim 0 of [8, 6], [8, 6]), which axis 'ep' (size 3) cannot divide. Use a batch size "
        "that is a multiple of 3, or a ep of 1, 2, 4 or 8.",
    ),
    (
        PLAIN, "ep=2", {"compile": "inductor"}, PlanError,
        'compile="inductor" is for shapes that are known, and on mesh \'ep=2\' as many rows come to a rank as choose '
        "its experts. Bound them with expert_rows=1.25, in a step of one graph (without pp and micro-batches), leave "
        "compile out, or give the ranks of ep to dp or tp.",
    ),
    (
        PLAIN, "ep=2", {"compile": "inductor", "expert_rows": 2.0, "microbatches": 2}, PlanError,
        'compile="inductor" is for shapes that are known, and on mesh \'ep=2\' as many rows come to a rank as choose '
        "its experts. Bound them with expert_rows=1.25, in a step of one graph (without pp and micro-batches), leave "
        "compile out, or give the ranks of ep to dp or tp.",
    ),
    (
        PLAIN, "dp=2", {"experts": "dp", "compile": "inductor"}, PlanError,
        'compile="inductor" is for shapes that are known, and on mesh \'dp=2\' as many rows come to a rank as choose '
        "its experts. Bound them with expert_rows=1.25, in a step of one graph (without pp and micro-batches), leave "
        "compile out, or leave experts out.",
    ),
    (
        PLAIN, "dp=2,cp=2,tp=2", {"experts": "dp:tp"}, PlanError,
        "experts='dp:tp' is no axis of mesh 'dp=2,cp=2,tp=2' that splits rows. It may be dp or cp, or both, 'dp:cp'.",
    ),
    (
        Kind(experts=6), "dp=2,cp=2", {"experts": "dp:cp"}, LayoutError,
        "axis 'cp' (size 2) splits experts, and can split none of the model:\n"
        "  cp=2 does not divide the 6 experts of mixed.0.up, 3 in each piece: cp may be 1 or 3\n"
        "  cp=2 does not divide the 6 experts of mixed.0.down, 3 in each piece: cp may be 1 or 3",
    ),
    (
        PLAIN, "dp=2,tp=2", {"experts": "tp"}, PlanError,
        "experts='tp' is no axis of mesh 'dp=2,tp=2' that splits rows. It may be dp.",
    ),
    (
        PLAIN, "tp=2", {"experts": "dp"}, PlanError,
        "experts='dp' is no axis of mesh 'tp=2' that splits rows. Add ep, or dp, to the mesh.",
    ),
    (
        PLAIN, "dp=2,ep=2", {"experts": "dp"}, PlanError,
        "experts='dp', and mesh 'dp=2,ep=2' has an axis ep for them: leave one of both out.",
    ),
    (
        Kind(experts=6), "dp=4", {"experts": "dp"}, LayoutError,
        "axis 'dp' (size 4) splits experts, and can split none of the model:\n"
        "  dp=4 does not divide the 6 experts of mixed.0.up: dp may be 1, 2, 3 or 6\n"
        "  dp=4 does not divide the 6 experts of mixed.0.down: dp may be 1, 2, 3 or 6",
    ),
    (
        PLAIN, "ep=2", {"shard": {"mixed.0.up": "[@ep,-,-]"}}, LayoutError,
        "'mixed.0.up': a parameter has no owners ('@'), as layout [@ep,-,-] says. From "
        'shard={"mixed.0.up": "[@ep,-,-]"}, used at mixtures.py:N.',
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[1]} {case[3].__name__}")
def test_what_is_refused(case: tuple[Kind, str, dict[str, Any], type[Exception], str]) -> None:
    kind, mesh, options, error, text = case
    model, batch = mixture_case(kind)
    with pytest.raises(error) as found:
        autopar.compile(model, mesh, batch=batch, **options)
    assert re.sub(r"py:\d+", "py:N", str(found.value)) == text


class _Seen(nn.Module):
    """The order of the sorted rows shows, and each product computes anew whose they are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, 6, 6) * 0.3) for _ in range(2))

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        experts, order = torch.sort(experts, stable=True)
        counts = torch.histc(experts.float(), 4, 0, 3)
        y = x[order]
        for w in (self.up, self.down):
            y = torch.tanh(nn.functional.grouped_mm(y, w, offs=counts.cumsum(0, dtype=torch.int32)))
        return (y.cumsum(0) * y).mean()


class _Cosine(nn.Module):
    """What each row gives is added up, and not one for a row that is zero; log and root have no gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, 6, 6) * 0.3) for _ in range(2))

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        experts, order = torch.sort(experts, stable=True)
        ends = torch.histc(experts.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = nn.functional.grouped_mm(x[order], self.up, offs=ends).abs().sqrt().log()
        y = nn.functional.grouped_mm(y, self.down, offs=ends).cos()
        return y.sum() + (y**2).mean()


def test_an_index_that_is_computed_twice_is_one() -> None:
    """Red before: an error that rows of one index are multiplied by those of another."""
    torch.manual_seed(0)
    report = verify(_Seen(), "ep=2", batch=(torch.randn(8, 6), torch.tensor([3, 0, 1, 0, 2, 0, 0, 3])))
    assert report.ok and report.max_error < 1e-10, report


class _Copied(nn.Module):
    """Each row gets a copy of its expert's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 6))

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        return torch.bmm(x.unsqueeze(1), self.up[experts]).square().mean()


def test_a_batched_product_is_named() -> None:
    with pytest.raises(LayoutError, match=r"'up' .4, 6, 6. is looked up for each row at .*, a batched"):
        autopar.compile(_Copied(), "ep=2", batch=(torch.randn(8, 6), torch.arange(8) % 4))


# -- sabotage: what may go wrong on the way of rows is seen, and where -------------------------------------------------


def _backwards(x: Tensor, member: Any, owned: bool, order: Tensor, counts: Tensor, *rest: Any) -> Any:
    return rows_to_owners.combine(x, member, owned, order.flip(0), counts, *rest)


def _dropped(x: Tensor, member: Any, owned: bool, order: Tensor, counts: Tensor, *rest: Any) -> Any:
    return torch.zeros(len(order), *x.shape[1:], dtype=x.dtype)


def _lost_row(x: Tensor, member: Any, owned: bool, order: Tensor, counts: Tensor, *rest: Any) -> Any:
    step = rows_to_owners.combine(x, member, owned, order, counts, *rest)
    then = step.then
    return collectives.Move(
        "rows", step.x, lambda rows: then(rows).index_fill_(0, torch.tensor([1]), 0.0), sent=step.sent,
        received=step.received,
    )  # fmt: skip


def _neighbours(index: Tensor, size: int, place: int, counts: Tensor, bound: int) -> Tensor:
    return rows_to_owners.owned_index(index, size, place, counts.roll(1, 1))


@pytest.mark.parametrize(("mesh", "options"), [("ep=2", {}), ("cp=2", {"experts": "cp"})], ids=str)
@pytest.mark.parametrize("way", [_backwards, _dropped, _lost_row])
def test_rows_that_come_back_wrong_are_found(
    way: Callable[..., Any], mesh: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(collectives._BEGIN, op("combine"), way)  # type: ignore[arg-type]
    report = _verified(PLAIN, mesh, **options)
    assert not report.ok and report.mismatch is not None and report.mismatch.module == "mixed.0"


def _swapped(x: Tensor, member: Any, owned: bool, order: Tensor, counts: Tensor, *rest: Any) -> Any:
    step = rows_to_owners.dispatch(x, member, owned, order, counts, *rest)
    return replace(step, sent=step.received, received=step.sent)  # type: ignore[type-var]


def test_rows_that_are_sent_as_they_are_received_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(collectives._BEGIN, op("dispatch"), _swapped)  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"awaits \(\d+, \d+\) rows and \(\d+, \d+\) are sent") as error:
        _verified(PLAIN, "ep=2")
    assert "%dispatch" in "".join(getattr(error.value, "__notes__", [])), error.value


def test_the_route_of_another_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    index_of, seen = Routing.index_of, dict[int, Any]()
    monkeypatch.setattr(
        Routing, "index_of", lambda self, *nodes: seen.setdefault(id(self), index_of(self, *nodes)),
    )  # fmt: skip
    report = _verified(PLAIN, "ep=2")
    assert not report.ok and report.mismatch is not None and report.mismatch.module == "mixed.1"


def _summed(x: Tensor, grad: Tensor, index: Tensor, groups: int, **rest: Any) -> Tensor:
    """Twice as much on ranks that hold some of the experts."""
    return expert_mm_backward(x, grad, index, groups, **rest) * (1 + (groups < PLAIN.experts))


def test_gradients_of_experts_that_are_as_many_times_too_large_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are where they are summed over ep, or divided by it and not."""
    monkeypatch.setattr(executor, "function_of", _instead(executor.function_of))
    report = _verified(PLAIN, "ep=2")
    assert not report.ok and report.mismatch is not None and report.mismatch.node == "expert_mm_backward", report


def _instead(function_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda target: _summed if target is op("expert_mm_backward") else function_of(target)


def test_rows_that_are_not_put_together_by_expert_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts cut rows into, and in which order: as they came, of which products would take runs of others."""
    monkeypatch.setattr(rows_to_owners, "_regrouped", lambda rows, runs: rows)
    report = _verified(PLAIN, "ep=2")
    assert not report.ok and report.mismatch is not None and report.mismatch.module == "mixed.0"


def test_an_index_of_other_places_of_a_sequence_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where experts lie over cp, rows lie at home as their index does: each rank's are those of its neighbour here."""

    def shifted(index: Tensor, size: int, groups: int, bound: int) -> Tensor:
        return rows_to_owners.order_by_owner(index, size, groups, bound).roll(1, 0)

    monkeypatch.setattr(mesh_ops, "order_by_owner", shifted)
    report = _verified(Kind(chosen=1), "cp=2", experts="cp")
    assert not report.ok and report.mismatch is not None and report.mismatch.module == "mixed.0"


def test_rows_of_another_expert_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_ops, "owned_index", _neighbours)
    report = _verified(PLAIN, "ep=2")
    assert not report.ok and report.mismatch is not None and report.mismatch.module == "mixed.0"
