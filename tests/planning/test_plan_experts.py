"""The planner tries experts over ranks of dp, and says what that brings."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from mixtures import Kind, Mixtures
from plan_jobs import llama_job, on_same_captures

import autopar
from autopar.compiler.meshes import mesh_of
from autopar.machines import Machine, named
from autopar.planning.jobs import layers_of
from autopar.planning.planner import Asked, Planned, planned
from autopar.planning.price.layers import Layers
from autopar.planning.space.candidates import Candidate
from autopar.report.emitted import _splits_of_experts, checked
from autopar.report.plans import planned_text


@cache
def _layers(kind: Kind) -> Layers:
    with torch.device("meta"):
        tokens, model = torch.zeros(8, 64, dtype=torch.long), Mixtures(kind)
    return layers_of(autopar.Job(model, batch=(tokens, tokens)), named("h100-80g"))


def _planned(kind: Kind, fixed: dict[str, Any], machine: Machine | None = None) -> Planned:
    layers = _layers(kind) if machine is None else on_same_captures(_layers(kind), machine)
    return checked(planned(layers, Asked(4, 8, layers.micros.machine, fixed=fixed)))


def test_experts_are_tried_over_ranks_of_dp() -> None:
    """64 experts, of which dp sums all gradients: with ep they move least, and the plan is one that runs."""
    found = _planned(Kind(experts=64, width=4096, blocks=1), {"tp": 1, "pp": 1, "cp": 1, "zero": 0, "fsdp": 1})
    best = found.found.best[0].candidate
    assert best.ep > 1 and f"ep={best.ep}" in best.mesh and found.found.best[0].is_emitted
    assert mesh_of(best.mesh).size == 4
    assert re.search(r"; experts over ep=\d in place of dp: -\d+\.\d%", planned_text(found))


def test_where_tokens_take_as_many_experts_as_there_are_the_loss_is_said() -> None:
    found = _planned(Kind(experts=4, chosen=4, blocks=1), {"tp": 1, "pp": 1, "cp": 1, "zero": 0, "fsdp": 1})
    assert re.search(r"experts over ep=\d in place of dp: \+\d+\.\d%", planned_text(found))


def test_forwards_beside_backwards_are_tried_where_a_pipeline_waits_much() -> None:
    """Sums of tp over a slow link, which another micro-batch hides."""
    near = replace(named("h100-80g"), ranks=1)
    layers = layers_of(llama_job(layers=4, width=4096, hidden=8192, words=256, length=2048), near)
    fixed = {"pp": 2, "tp": 2, "rows": 1, "recompute": "none", "sequence": True}
    found = checked(planned(layers, Asked(4, 8, near, fixed=fixed, top=2)))
    best, text = found.found.best[0], planned_text(found)
    assert best.candidate.schedule == "dualpipev" and best.is_emitted
    assert re.search(r"; dualpipev in place of \S+: -\d+\.\d%", text)
    assert "dualpipev" not in planned_text(
        checked(planned(layers, Asked(4, 8, near, fixed=fixed | {"schedule": "zb-v"})))
    )


def test_pairs_are_tried_without_a_pipeline_where_experts_wait_much() -> None:
    """Of a plan with several micro-batches, as memory may ask for; refused if it is no faster."""
    fixed = {"tp": 1, "pp": 1, "cp": 1, "zero": 0, "fsdp": 1, "recompute": "none", "microbatches": 2}
    kind, slow = Kind(experts=64, width=2048, chosen=1, blocks=2), named("h100-80g")
    slow = replace(slow, inside=replace(slow.inside, bandwidth=slow.inside.bandwidth / 10))
    found = _planned(kind, fixed, slow)
    (said,) = re.findall(
        r"; dualpipev in place of one graph after the other: (.\d+\.\d)% \((.*) dualpipev\)", planned_text(found)
    )
    assert "ep=" in said[1] and "2 x 1 rows" in said[1]
    best = found.found.best[0]
    assert best.candidate.options().get("schedule") == ("dualpipev" if best.candidate.schedule == "dualpipev" else None)
    assert "dualpipev" not in planned_text(_planned(kind, fixed | {"microbatches": 1}, slow))


@pytest.mark.slow
def test_the_pair_is_chosen_for_experts_whose_rows_move_slowly_and_for_nothing_else() -> None:
    """At the simulator's time of the emitted programs; without experts, whatever the link, there is none."""
    slow = named("h100-80g")
    slow = replace(slow, inside=replace(slow.inside, bandwidth=slow.inside.bandwidth / 10))
    fixed = {"tp": 1, "pp": 1, "cp": 1, "zero": 0, "fsdp": 1, "recompute": "none", "microbatches": 8}
    with torch.device("meta"):
        tokens = torch.zeros(32, 2048, dtype=torch.long)
        model = Mixtures(Kind(experts=16, width=512, hidden=2048))
    job = autopar.Job(model, batch=(tokens, tokens))
    best = checked(planned(layers_of(job, slow), Asked(4, 32, slow, fixed=fixed, top=2))).found.best[0]
    assert best.candidate.schedule == "dualpipev" and best.candidate.mesh == "ep=4" and best.is_emitted
    paired, plain = (
        autopar.compile(model, "ep=4", batch=(tokens, tokens), machine=slow, **options).time(slow).total
        for options in (best.candidate.options(), {"microbatches": 8})
    )
    assert best.total == paired < 0.96 * plain
    dense = layers_of(llama_job(layers=4, width=512, hidden=2048, words=256, length=2048), slow)
    assert "dualpipev" not in planned_text(checked(planned(dense, Asked(4, 32, slow, fixed=fixed, top=1))))


def test_experts_are_tried_over_the_ranks_that_split_sequences() -> None:
    """Where no axis but cp has ranks, and over dp and cp joined: as options that compile to experts split so."""
    fixed = {"tp": 1, "pp": 1, "zero": 0, "fsdp": 1, "cp": 4}
    found = _planned(Kind(experts=64, width=4096, blocks=1), fixed)
    over = [each for each in found.found.best if each.candidate.experts]
    assert over and all(each.candidate.options()["experts"] == "cp" and each.is_emitted for each in over)
    assert re.search(r"; experts over the ranks of cp: .\d+\.\d% \(cp=4 .* experts over cp\)", planned_text(found))
    plan = Candidate(4, 1, 1, 0, "none", 1, 1, cp=2)
    splits = [(each.mesh, each.experts) for each in _splits_of_experts(plan, 8, 8)]
    assert splits == [("dp=2,ep=2,cp=2", ""), ("ep=4,cp=2", ""), ("dp=4,cp=2", "cp"), ("dp=4,cp=2", "dp:cp")]
    assert [each.experts for each in _splits_of_experts(plan, 6, 8)] == ["", "cp"]
