"""Other plans than the best: why they lost, the frontier of time and memory, and how the best ones scale."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiler.lowered import Lowered
from autopar.errors import LayoutError, PlanError
from autopar.machines import Machine
from autopar.planning.jobs import layers_of
from autopar.planning.layers import Layers
from autopar.planning.micro import Micros, Split
from autopar.planning.others import LESS, best_with, frontier, reasons, scales
from autopar.planning.plan import Asked, Planned, candidates_of, planned
from autopar.planning.predict import Prediction, predict
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


def test_why_the_others_lost(found: Planned) -> None:
    said = list(reasons(found))
    assert str(found.found.best[0].candidate.mesh) == "dp=2,tp=2", "what follows is of this one"
    assert [line.partition(":")[0] for line in said] == ["pp=2", "no tensor parallelism", "tp=4", "zero=0"]
    pipeline, made = said[0], best_with(found, {"pp": 2}).best[0]
    assert f": +{made.total / found.found.best[0].total - 1:.1%} ({made.candidate}), " in pipeline
    small = Asked(4, 8, MACHINE, 0.9 * min(each.memory for each in all_of(planned_for(tp=1))), dict(ASKED.fixed), 1)
    lost = list(reasons(planned(layers(), small)))
    assert any(line.startswith("no tensor parallelism: ") and " > " in line for line in lost), lost


def planned_for(**fixed: int) -> Planned:
    return planned(layers(), Asked(4, 8, MACHINE, math.inf, {**ASKED.fixed, **fixed}, 1))


def test_a_wide_tp_crosses_nodes() -> None:
    two_a_node = replace(MACHINE, ranks=2, between=replace(MACHINE.between, start_us=500.0))
    found = planned(
        layers_of(job(), two_a_node),
        replace(ASKED, machine=two_a_node, fixed={"recompute": "none", "pp": 1, "dp": 2, "tp": 2}),
    )
    far = next(
        line for line in reasons(replace(found, asked=replace(found.asked, fixed={}))) if line.startswith("tp=4")
    )
    assert far.endswith("crosses nodes of 2"), far


def test_how_plans_scale() -> None:
    made = scales(layers(), ASKED, [1, 4, 7])
    assert [each.gpus for each in made] == [1, 4, 7] and made[2].found is None
    text = scales_text(made, 1e9)
    head, one, four, fault = text.splitlines()
    assert head.split()[:4] == ["devices", "plan", "step", "tokens/s"] and head.endswith("device hours")
    assert made[1].found is not None
    best = made[1].found.found.best[0]
    hours = 1e9 / (8 / best.total * 1e6) / 3600
    assert four.split()[-2:] == [f"{hours / 24:,.1f}", f"{hours * 4:,.0f}"] and one.startswith("1 ")
    assert fault.startswith("7 devices: no plan for 7 devices")


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
    made = layers_of(job(), MACHINE)
    found = planned(made, ASKED)
    assert any("sequence_parallel=True: no activation" in reason for reason in found.found.counts), found.found.counts
    best_with(found, {"pp": 2})
    assert len(asked) == len(set(asked))
