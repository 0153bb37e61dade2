"""Other plans than the best: why they lost, the frontier of time and memory, and how the best ones scale."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from plan_jobs import on_same_captures
from torch import Tensor, nn

import autopar
from autopar.compiler.lowered import Lowered
from autopar.errors import LayoutError, PlanError
from autopar.machines import Machine
from autopar.planning.jobs import layers_of
from autopar.planning.others import LESS, best_with, fastest, frontier, reasons, scales, with_batches
from autopar.planning.planner import Asked, Planned, candidates_of, planned
from autopar.planning.price.layers import Layers
from autopar.planning.price.predict import Prediction, predict
from autopar.planning.space.micro import Micros, Split
from autopar.report.plans import scales_text

MACHINE = Machine.flat(1e3, 1e3, 1e3, 2.0, 0.1)
ASKED = Asked(4, 8, MACHINE, math.inf, {"recompute": "none"}, 1)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def job() -> autopar.Job:
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
    return autopar.Job(nn.Sequential(*blocks), loss, torch.randn(4, 64))


@cache
def layers() -> Layers:
    """Of all plans of this file: each program is made once."""
    return layers_of(job(), MACHINE)


@pytest.fixture(scope="module")
def found() -> Planned:
    return planned(layers(), ASKED)


def all_of(found: Planned) -> list[Prediction]:
    """Every plan that the model can take."""
    made = []
    for each in candidates_of(found.asked, found.model):
        with suppress(LayoutError):
            made.append(predict(each, layers(), MACHINE))
    return made


def test_no_plan_is_better_than_the_frontier(found: Planned) -> None:
    line = frontier(found)
    assert len(line) > 1 and all(a.total <= b.total and a.memory > b.memory for a, b in pairwise(line))
    for one in all_of(found):
        least = min((each.total for each in line if each.memory <= one.memory / LESS), default=math.inf)
        assert least <= one.total * (1 + 1e-9)


def test_the_best_with_a_part_decided(found: Planned) -> None:
    made = best_with(found, {"tp": 2}).best[0]
    both = [each.total for each in all_of(found) if each.candidate.tp == 2]
    assert made.candidate.tp == 2 and made.total == pytest.approx(min(both))
    assert not best_with(found, {"tp": 2}, limit=1.0).best and not best_with(found, {"tp": 3}).best


def test_why_the_others_lost() -> None:
    larger = replace(ASKED, batch=32)
    found = planned(layers(), larger)
    said = list(reasons(found))
    assert str(found.found.best[0].candidate.mesh) == "dp=2,tp=2", "what follows is of this one"
    assert [line.partition(":")[0] for line in said] == ["pp=2", "no tensor parallelism", "tp=4", "zero=0"]
    pipeline, made = said[0], best_with(found, {"pp": 2}).best[0]
    assert f": +{made.total / found.found.best[0].total - 1:.1%} ({made.candidate}), " in pipeline
    without = planned(layers(), replace(larger, fixed={**ASKED.fixed, "tp": 1}))
    small = replace(larger, memory=0.9 * min(each.memory for each in all_of(without)))
    lost = list(reasons(planned(layers(), small)))
    assert any(line.startswith("no tensor parallelism: ") and " > " in line for line in lost), lost


def test_a_wide_tp_crosses_nodes() -> None:
    two_a_node = replace(MACHINE, ranks=2, between=replace(MACHINE.between, start_us=500.0))
    found = planned(
        on_same_captures(layers(), two_a_node),
        replace(ASKED, machine=two_a_node, fixed={"recompute": "none", "pp": 1, "dp": 2, "tp": 2}),
    )
    far = next(
        line for line in reasons(replace(found, asked=replace(found.asked, fixed={}))) if line.startswith("tp=4")
    )
    assert far.endswith("crosses nodes of 2"), far


def test_how_plans_scale() -> None:
    made = scales(layers(), [replace(ASKED, gpus=gpus) for gpus in (1, 4, 7)])
    assert [each.asked.gpus for each in made] == [1, 4, 7] and made[2].found is None
    text = scales_text(made, 1e9)
    head, one, four, fault = text.splitlines()
    assert head.split()[:4] == ["devices", "plan", "step", "tokens/s"] and head.endswith("device hours")
    assert made[1].found is not None
    best = made[1].found.found.best[0]
    hours = 1e9 / (8 / best.total * 1e6) / 3600
    assert four.split()[-2:] == [f"{hours / 24:,.1f}", f"{hours * 4:,.0f}"] and one.startswith("1 ")
    assert fault.startswith("7 devices: no plan for 7 devices")


def test_the_best_of_several_batches() -> None:
    refused = replace(ASKED, batch=7, fixed={**ASKED.fixed, "dp": 4})
    made = scales(layers(), [*(replace(ASKED, batch=batch) for batch in (8, 16)), refused])
    best = [each.found.found.best[0] for each in made[:2] if each.found is not None]
    alone = planned(layers(), replace(ASKED, batch=16)).found.best[0]
    assert best[1] == alone and best[0].total / 8 > alone.total / 16, "rows of a step cost less of a larger one"
    assert fastest(made) == fastest(made[::-1]) == replace(ASKED, batch=16)
    head, eight, sixteen, fault = scales_text(made, None, "rows").splitlines()
    assert head.split()[:4] == ["rows", "plan", "step", "tokens/s"] and eight.startswith("8 ")
    assert f"{16 / alone.total * 1e6:,.0f}" in sixteen and fault.startswith("7 rows: no plan for 4 devices and 7 r")
    with pytest.raises(PlanError, match="none of 1 batches from 7 to 7 rows has a plan: no plan for 4 devices and 7"):
        fastest(made[2:])


def batches(named: Sequence[int] = (), is_range: bool = False, **fixed: int) -> list[int]:
    asked = replace(ASKED, fixed={**ASKED.fixed, **fixed})
    return [each.batch for each in with_batches(asked, layers(), named, is_range)]


def test_which_batches_are_planned_for() -> None:
    assert batches() == [8] and batches([4, 7]) == [4, 7]
    assert batches([4, 6, 8], is_range=True, dp=4) == [4, 8], "those that a plan divides"
    assert batches([6, 7], is_range=True, dp=4) == [6], "of none the first, which says why"
    assert batches(rows=2) == batches(microbatches=2) == [8], "that of the job"
    assert batches(rows=2, microbatches=3) == [6, 12, 24] and batches(rows=2, microbatches=3, tp=2) == [6, 12]
    assert batches([12], rows=2, microbatches=3) == [12]


@pytest.mark.parametrize(
    ("batch", "fixed", "words"),
    [
        (8, {"rows": 3}, " With rows=3 it is a multiple of 3, as 9 is."),
        (
            8,
            {"rows": 2, "microbatches": 3},
            " With rows=2, microbatches=3 it is 6 rows for each rank of dp and fsdp: l",
        ),
    ],
)
def test_a_batch_without_the_micro_batches_that_are_fixed(batch: int, fixed: dict[str, int], words: str) -> None:
    with pytest.raises(PlanError, match="no plan for 4 devices and 8 rows a step with recompute=none, ") as raised:
        planned(layers(), replace(ASKED, batch=batch, fixed={**ASKED.fixed, **fixed}))
    assert "Change the batch or what is fixed." + words in str(raised.value)


def test_more_devices_than_the_model_can_use() -> None:
    with pytest.raises(PlanError) as raised:
        planned(layers(), replace(ASKED, gpus=7, fixed={}))
    text = str(raised.value)
    assert re.match(r"no plan for 7 devices: of the candidates \d+ refused \(cp=7 does not divide the 64 posi", text), (
        text
    )
    assert re.search(r"; \d+ refused \(axis 'tp' \(size 7\) can split no weight of the model\)\. The data axes", text)
    assert "The data axes must divide the rows (1, 2 or 4 here)" in text
    assert "at most a rank for each of the 5 equal layers" in text and text.endswith(
        "Of 4 devices each could take 2 of the rows."
    )


def test_what_is_refused_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red before: 120 of the 125 compilations of these plans ended with the same two refusals."""
    asked, lowered = [], Micros.lowered

    def counted(self: Micros, split: Split, rows: int, like: Lowered | None = None) -> Lowered:
        asked.append((split, rows, like is None))
        return lowered(self, split, rows, like)

    monkeypatch.setattr(Micros, "lowered", counted)
    found = planned(on_same_captures(layers(), MACHINE), ASKED)
    assert any("sequence_parallel=True: no activation" in reason for reason in found.found.counts), found.found.counts
    best_with(found, {"pp": 2})
    assert len(asked) == len(set(asked))
