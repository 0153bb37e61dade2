"""What is computed again: the same numbers, fewer bytes, never more than was allowed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch
from live import estimated_peak, measured_peak
from recompute_case import MODELS, captured, check, compiled, duplicates, localized, with_policy
from torch import fx, nn

import autopar
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ops import is_collective, op
from autopar.ir.options import StepOptions
from autopar.ir.program import Builder, Program, is_getitem, record
from autopar.ir.text.text import print_program
from autopar.parallel.tensors.padding import padded_part
from autopar.passes.costs.node_costs import node_times
from autopar.passes.pipeline.cuts.rematerialized import originals
from autopar.passes.recompute import recompute
from autopar.report.inspection import memory_of
from autopar.report.inspection_pipeline import saved_bytes
from autopar.report.memory.saved import saved_values
from autopar.runtime.executor import executor
from autopar.runtime.executor.executor import Executable
from autopar.runtime.executor.lifetime import Lifetimes, lifetimes
from autopar.runtime.ranks.virtual import VirtualMesh

MIXED = {"blocks.0": "full", "*": 0.9}
PARITY: list[tuple[str, str, Any, dict[str, Any]]] = [
    ("gpt", "dp=2", "full", {}),
    ("gpt", "dp=2,tp=2", "full", {"sequence_parallel": True}),
    ("gpt", "dp=2,tp=2", 0.8, {"sequence_parallel": True}),
    ("gpt", "dp=2", MIXED, {}),
    ("gpt", "tp=2", 0.8, {"microbatches": 3}),
    ("gpt", "pp=2", "full", {"microbatches": 3}),
    ("gpt", "pp=2", "selective", {"microbatches": 4, "schedule": "zb-h1"}),
    ("written_out", "tp=2", "selective", {}),
    ("written_out", "dp=2,tp=2", "selective", {"sequence_parallel": True}),
    ("written_out", "pp=2,dp=2", "full", {"microbatches": 2}),
    ("tied", "dp=2", "full", {}),
    ("tied", "pp=2", 0.8, {"microbatches": 2}),
    ("checkpointed", "tp=2", "selective", {}),
    ("checkpointed", "dp=2", "full", {}),
]


@pytest.mark.parametrize(("name", "mesh", "policy", "options"), PARITY)
def test_every_gradient_equals_one_device(name: str, mesh: str, policy: Any, options: dict[str, Any]) -> None:
    found = compiled(name, mesh, recompute=policy, **options)
    report = check(name, found)
    assert report.ok and report.max_error < 1e-10, str(report)
    # what a user computes again, nobody keeps: there is nothing left of it
    assert duplicates(found.program) or name == "checkpointed"


def test_none_leaves_the_program_as_it_is() -> None:
    program = dict(localized("gpt", "dp=2").history)["partition"]
    assert recompute(program, replace(localized("gpt", "dp=2").plan, options=StepOptions(recompute="none"))) is program
    assert recompute(program, replace(localized("gpt", "dp=2").plan, options=StepOptions(recompute=1.0))) is program


def test_full_never_keeps_more_for_a_list_of_single_calls() -> None:
    """An activation in a list is no layer: what enters it would be kept beside what it gives."""
    kept = [memory_of(with_policy("mlp", "dp=2", policy)).activations for policy in ("none", "full")]
    assert kept[0] == kept[1]


# -- random ops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "policy"), [("written_out", "full"), ("written_out", "selective"), ("gpt", "full")])
def test_every_duplicate_has_the_value_of_its_original(name: str, policy: str) -> None:
    """Bit for bit on every rank, masks included."""
    program = with_policy(name, "dp=2,tp=2", policy)
    (_, _, _), found = captured(name, False)
    model, _, batch = MODELS[name]()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **found.constants}
    parts = []
    for coord in program.mesh.coords():
        parts.append([])
        for node, entry in program.entries:
            value = batch[int(entry.name)] if entry.kind == "batch" else named.get(entry.name, torch.tensor([0, 1]))
            parts[-1].append(padded_part(value.detach(), record(node).layout, program.mesh, coord))
    seen: dict[tuple[int, fx.Node], Any] = {}

    def observe(rank: int, node: fx.Node, value: Any) -> None:
        seen[rank, node] = value

    VirtualMesh(program.mesh).run(Executable(program.graph), parts, observe)
    pairs = originals(program)
    assert set(duplicates(program)) == set(pairs)
    assert any("dropout" in node.name for node in pairs)
    for rank in range(program.mesh.size):
        for again, first in pairs.items():
            if record(again).is_tensor:
                assert torch.equal(seen[rank, again], seen[rank, first]), again.name


def sabotaged(program: Program) -> Program:
    """The first dropout that is computed again draws with another key."""
    build = Builder("sabotage")
    wrong = next(node for node in duplicates(program) if node.target is op("dropout"))
    for node in program.nodes:
        made = build.copy(node)
        if node is wrong:
            made.args = (*made.args[:2], 99, *made.args[3:])
    return program.with_(graph=build.graph)


def test_a_duplicate_with_another_mask_is_noticed() -> None:
    found = compiled("written_out", "dp=2", recompute="selective")
    assert check("written_out", found).ok
    history = (*found.history[:-1], ("bucket", sabotaged(found.program)))
    report = check("written_out", replace(found, history=history))
    assert not report.ok and report.mismatch is not None and report.mismatch.pass_name == "recompute", str(report)


def blind(graph: fx.Graph, given: Collection[fx.Node] = ()) -> Lifetimes:
    """Lifetimes that end where only what is computed again reads on."""
    lives = lifetimes(graph, given)
    last = dict.fromkeys(lives.share_last, 0)
    for node in graph.nodes:
        for user in node.users:
            if user.op == "output" or record(user).made_by != "recompute":
                share = lives.share[node]
                last[share] = max(last[share], lives.position[user])
    return replace(lives, share_last=last)


def test_what_is_computed_again_reads_what_nobody_wrote_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled("waves", "dp=2", recompute="full")
    assert duplicates(found.program) and check("waves", found).ok
    monkeypatch.setattr(executor, "lifetimes", blind)
    assert not check("waves", found).ok, "a value was written over, and nobody saw it"


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,tp=2"])
def test_the_peak_falls_as_much_as_what_is_kept(mesh: str) -> None:
    """The estimate and what is measured; a layer is computed again when its gradient is, and not before."""
    programs = {policy: with_policy("llama", mesh, policy) for policy in ("none", "full", "selective", 0.75)}
    kept = {policy: memory_of(program).activations for policy, program in programs.items()}
    estimated = {policy: estimated_peak(program) for policy, program in programs.items()}
    measured = {policy: measured_peak(program) for policy, program in programs.items()}
    ranks = parse_mesh(mesh).size
    for policy in ("full", "selective", 0.75):
        saved = kept["none"] - kept[policy]
        layer = kept["none"] / 4
        assert saved > 0.2 * kept["none"]
        assert estimated["none"] - estimated[policy] > saved - layer, policy
        assert measured["none"] - measured[policy] > ranks * (saved - layer), policy


@pytest.mark.parametrize("policy", ["full", 0.75])
def test_every_stage_keeps_less(policy: Any) -> None:
    found = {}
    for wanted in ("none", policy):
        pipeline = compiled("gpt", "pp=2", microbatches=2, recompute=wanted).pipeline
        assert pipeline is not None
        found[wanted] = [saved_bytes(pipeline, stage) for stage in range(2)]
    assert all(less < more for less, more in zip(found[policy], found["none"], strict=True)), found


def test_a_layer_that_is_cut_is_computed_again_on_both_stages() -> None:
    """No gradient goes to another stage for a value that is computed again there."""
    stages = ["tokens, positions, blocks.0, blocks.1.attn_norm, blocks.1.attn",
              "blocks.1.mlp_norm, blocks.1.mlp, norm, head"]  # fmt: skip
    found = compiled("gpt", "pp=2", microbatches=2, stages=stages, recompute="full")
    assert found.pipeline is not None
    for stage, module in ((0, "blocks.1.attn"), (1, "blocks.1.mlp")):
        again = {record(node).module for node in duplicates(found.pipeline.graphs[stage, "B"])}
        assert any(path.startswith(module) for path in again), again
    plain = compiled("gpt", "pp=2", microbatches=2, stages=stages, recompute="none").pipeline
    assert plain is not None
    between = [{n for n in work.writes if n in flow.works[0, "B"].reads} for flow in (plain.flow, found.pipeline.flow)
               for work in (flow.works[1, "B"],)]  # fmt: skip
    assert between[0] == between[1], "the same gradients cross the border"
    report = check("gpt", found)
    assert report.ok, str(report)


# -- budgets ------------------------------------------------------------------------------------------------------


def test_budgets_are_kept_and_more_bytes_take_less_time() -> None:
    nothing = with_policy("llama", "dp=2,tp=2", "none")
    kept = memory_of(nothing).activations
    before: float | None = None
    for share in (0.55, 0.6, 0.7, 0.8, 0.9, 0.97):
        program = with_policy("llama", "dp=2,tp=2", int(share * kept))
        assert print_program(program) == print_program(with_policy("llama", "dp=2,tp=2", share)), "bytes or their part"
        again = duplicates(program)
        assert (share - 0.25) * kept < memory_of(program).activations <= share * kept  # a layer is a fourth
        assert not any(record(node).flops or is_collective(node.target) for node in again)
        times = node_times(program, localized("llama", "dp=2,tp=2").plan.fixed.machine)
        spent = sum(times[node] for node in again)
        assert before is None or spent <= before
        before = spent
    assert before is not None and before > 0


def test_a_budget_counts_a_micro_batch() -> None:
    """Of four micro-batches each keeps a fourth."""
    whole, part = (
        memory_of(compiled("gpt", "dp=1", microbatches=count, recompute=0.8).program).activations for count in (1, 4)
    )
    assert 0.2 * whole < part < 0.3 * whole


def test_budgets_of_patterns_are_of_their_own_modules() -> None:
    program = with_policy("llama", "dp=2", {"blocks.0-1": 0.6, "blocks.2": "full"})
    nothing = with_policy("llama", "dp=2", "none")

    def kept(of: Program, layer: str) -> int:
        return sum(row.bytes for row in saved_values(of) if row.module.startswith(layer))

    first = kept(program, "blocks.0") + kept(program, "blocks.1")
    assert first <= 0.6 * (kept(nothing, "blocks.0") + kept(nothing, "blocks.1"))
    assert kept(program, "blocks.3") == kept(nothing, "blocks.3")
    assert kept(program, "blocks.2") < 0.2 * kept(nothing, "blocks.2")
    # the first pattern that fits is a module's own
    same = with_policy("llama", "dp=2", {"blocks.2": "full", "blocks.*": "none"})
    assert {record(node).reason for node in duplicates(same)} == {"recomputed: full ('blocks.2')"}


def test_a_module_that_is_no_layer_can_be_named() -> None:
    program = with_policy("llama", "dp=2", {"*.*.mlp_norm": "full", "norm": "full"})
    reasons = [f"recomputed: full ('blocks.{i}.mlp_norm')" for i in range(4)]
    assert {record(node).reason for node in duplicates(program)} == {*reasons, "recomputed: full ('norm')"}


def test_results_of_several_stay_with_their_call() -> None:
    """A norm gives three values: where one of them is computed again, so are those that are read."""
    program = with_policy("gpt", "dp=2", "full")
    for node in duplicates(program):
        if is_getitem(node):
            assert record(node.args[0]).made_by == "recompute"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "times"), [({"zero": 0}, 2), ({"zero": 3}, 1), ({"zero": 0, "offload": "parameters"}, 1)], ids=str
)
def test_a_table_is_not_brought_once_more(options: dict[str, Any], times: int) -> None:
    """Rows of a table are computed again for nothing where the table is there; gathered or loaded once more it would
    take more than the rows do. Red before, and a stage with the table held more with "selective" than with "none"."""
    model = nn.Sequential(nn.Embedding(4096, 64), nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(64, 64)))))
    made = autopar.compile(
        model, "dp=2", loss_fn=lambda model, x: model(x).square().mean(), batch=torch.zeros(4, 8, dtype=torch.int64),
        recompute="selective", **options,
    )  # fmt: skip
    targets = [str(node.target) for node in made.program.calls()]
    assert sum("embedding" in name and "backward" not in name for name in targets) == times, targets
