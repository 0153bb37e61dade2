"""Pipelines give what one device gives: every schedule, on every number of stages and micro-batches, exactly."""

from __future__ import annotations

import pytest
import torch
from pipeline_case import ROWS, TIME, compiled_as, error_of, subject
from shares import share
from torch import Tensor

from autopar.passes.schedules import SCHEDULES, in_flight
from autopar.runtime.pipeline.run_pipeline import Totals

TOLERANCE = 1e-12


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), list(share(3, SCHEDULES, (2, 3, 4), (1, 2, 4, 7, 8))))
def test_a_pipeline_is_the_single_device_step(schedule: str, stages: int, microbatches: int):
    """With ignored labels spread unevenly, dropout, and a weight tied between the first and the last stage."""
    compiled = compiled_as(f"pp={stages}", microbatches, schedule=schedule)
    assert compiled.pipeline is not None and len(set(compiled.pipeline.flow.ranks)) == stages
    assert error_of(compiled) < TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule", "sequence"),
    [
        ("pp=2,dp=7", 4, "1f1b", False),
        ("dp=2,pp=3", 4, "zb-h1", False),
        ("pp=3,tp=2", 7, "interleaved-1f1b", False),
        ("pp=2,dp=2,tp=2", 2, "zb-v", True),
        ("tp=2,pp=2", 8, "zb-h2", True),
        ("pp=4,dp=2,tp=2", 7, "gpipe", True),
    ],
)
def test_with_other_axes(mesh: str, microbatches: int, schedule: str, sequence: bool):
    assert error_of(compiled_as(mesh, microbatches, sequence, schedule=schedule)) < TOLERANCE


@pytest.mark.parametrize(("mesh", "microbatches"), [("dp=1", 8), ("dp=7", 4), ("dp=2,tp=2", 7), ("tp=2", 2)])
def test_accumulation_without_a_pipeline(mesh: str, microbatches: int):
    compiled = compiled_as(mesh, microbatches)
    assert compiled.pipeline is not None and compiled.pipeline.flow.size == 1
    assert error_of(compiled) < TOLERANCE


def test_gradients_are_reduced_once_a_step_and_in_buckets():
    """Not once for each micro-batch: over dp nothing but the epilogue moves gradients."""
    compiled = compiled_as("pp=2,dp=2", 7)
    assert compiled.pipeline is not None
    for (_, kind), graph in compiled.pipeline.graphs.items():
        moved = [str(node.target) for node in graph.calls() if "all_reduce" in str(node.target)]
        assert kind in "CPE" or not moved, (kind, moved)
        assert kind != "E" or any("start" in name for name in moved)


def test_a_tied_weight_moves_once_a_step():
    compiled = compiled_as("pp=4", 8)
    assert compiled.pipeline is not None
    lines = [line for instructions in compiled.pipeline.lists for line in instructions if line.op == "SEND"]
    weight = [line for line in lines if line.values == ("tokens_weight",)]
    gradient = [line for line in lines if any("total" in name for name in line.values)]
    assert [(str(line.action), line.peer) for line in weight] == [("0P", 3)]
    assert len(gradient) == 1 and gradient[0].peer == 0


def test_one_activation_and_one_gradient_cross_a_border_between_blocks():
    """b s h elements each way (arXiv 2104.04473, section 3.2), and nothing that could be made again from them."""
    pipeline = compiled_as("pp=2", 8, stages=("tokens, positions, dropout, blocks.0", "blocks.1, norm, head")).pipeline
    assert pipeline is not None
    lines = [line for instructions in pipeline.lists for line in instructions if line.op == "SEND"]
    for microbatch in range(7):  # after the last one the values of the step are sent too
        sent = [line for line in lines if line.action.microbatch == microbatch]
        assert [str(line.action) for line in sent] == [f"0F{microbatch}", f"1B{microbatch}"]
        assert all([type_.shape for type_ in line.types] == [(ROWS // 8, TIME, 8)] for line in sent)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (4, 2)])
def test_stages_hold_as_many_microbatches_as_1f1b_says(stages: int, microbatches: int):
    """min(p - i, m) on stage i (arXiv 2104.04473, section 2.2.1)."""
    compiled = compiled_as(f"pp={stages}", microbatches)
    assert compiled.pipeline is not None
    held = [in_flight(instructions) for instructions in compiled.pipeline.lists]
    assert held == [min(stages - i, microbatches) for i in range(stages)]


def test_ranks_of_one_stage_share_their_programs():
    ranks = compiled_as("dp=2,pp=2,tp=2", 2).ranks
    assert (
        ranks[0].programs is ranks[1].programs is ranks[4].programs and ranks[0].instructions is ranks[5].instructions
    )
    assert ranks[0].programs.keys() != ranks[2].programs.keys()


def test_backward_is_split_by_flow_of_data():
    """Every product of the backward pass is in input_grad or in weight_grad of one stage, none in both."""
    whole = compiled_as("pp=3", 4, schedule="1f1b").pipeline
    split = compiled_as("pp=3", 4, schedule="zb-h1").pipeline
    assert whole is not None and split is not None
    for stage in range(3):
        parts = [products(split.graphs[stage, kind]) for kind in "IW"]
        assert not parts[0] & parts[1] and parts[0] | parts[1] == products(whole.graphs[stage, "B"])
        assert parts[1], "weights have gradients"
        gradients = {out.name for out in split.graphs[stage, "W"].outputs}
        assert not any(out.kind == "saved" for out in split.graphs[stage, "W"].outputs), gradients


def products(graph) -> set[str]:  # type: ignore[no-untyped-def]
    return {node.name for node in graph.calls() if "einsum" in str(node.target) or "embedding" in str(node.target)}


def test_dropout_is_on():
    drawn = [node for node in subject().captured.program.calls() if "dropout" in str(node.target)]
    assert len(drawn) >= 5


def keep_last(totals: Totals, name: str, microbatch: int, part: Tensor) -> None:
    totals.parts[name] = part


def average(totals: Totals, name: str, microbatch: int, part: Tensor) -> None:
    ADD(totals, name, microbatch, part / 4 if part.is_floating_point() else part)


def forget_first(totals: Totals, name: str, microbatch: int, part: Tensor) -> None:
    ADD(totals, name, microbatch, part if microbatch else torch.zeros_like(part))


def add_twice(totals: Totals, name: str, microbatch: int, part: Tensor) -> None:
    ADD(totals, name, microbatch, part * 2 if microbatch == 1 else part)


ADD = Totals.add


@pytest.mark.parametrize("sabotage", [keep_last, average, forget_first, add_twice])
def test_a_wrong_accumulation_is_seen(sabotage: object, monkeypatch: pytest.MonkeyPatch):
    compiled = compiled_as("pp=2", 4)
    assert error_of(compiled) < TOLERANCE
    monkeypatch.setattr(Totals, "add", sabotage)
    assert error_of(compiled) > 1e-3
