"""Plans that are shown were compiled: what they say is what their programs take."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.job import Job
from autopar.machines import named
from autopar.planning.find_plan import _one_of_each
from autopar.planning.planner import Asked, Planned, plan
from autopar.planning.price.predict import Prediction
from autopar.planning.space.candidates import Candidate
from autopar.report.emitted import AS_OTHERS, _Check, checked, light_first

ROWS = 64


def planned() -> Planned:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    batch = (torch.randn(ROWS, 64), torch.randn(ROWS, 64))
    return plan(Job(model, loss_fn, batch), Asked(2, ROWS, named("cpu"), top=2))


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def test_the_first_plan_says_what_its_programs_take() -> None:
    found = planned()
    assert not any(each.is_emitted for each in found.found.best)
    shown = checked(found).found.best
    assert shown[0].is_emitted and shown[0].total == min(each.total for each in shown)
    options = shown[0].candidate.options()
    made = autopar.compile(
        nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))), str(shown[0].candidate.mesh),
        loss_fn=loss_fn, batch=(torch.randn(ROWS, 64), torch.randn(ROWS, 64)), **options,
    )  # fmt: skip
    assert made.time("cpu").total == pytest.approx(shown[0].total)


def test_what_does_not_fit_as_emitted_is_dropped_and_of_none_that_fits_the_least_is_told() -> None:
    found = planned()
    tight = replace(found, asked=replace(found.asked, memory=1000))
    text = (
        r"no plan fits in 1 kB a device on 2 devices: 2 that should were compiled, and the least that one takes "
        r"is [\d.]+ \w+, with .*\. Ask for a smaller batch, more devices, or devices with more memory\."
    )
    with pytest.raises(PlanError) as error:
        checked(tight)
    assert re.fullmatch(text, str(error.value)), error.value


def _plan(total: float, memory: float, is_emitted: bool = True, **fields: int) -> Prediction:
    made = Candidate(
        dp=fields.get("dp", 2), tp=1, pp=1, zero=fields.get("zero", 0), recompute="none", rows=1, microbatches=1
    )
    return Prediction(made, total, memory, 0.0, 0.0, 0.0, 0.0, is_emitted)


def test_of_plans_that_are_as_fast_the_lightest_stands_first() -> None:
    fast, light, slow = _plan(1000.0, 80e9), _plan(1005.0, 40e9, zero=3), _plan(1100.0, 10e9, dp=4)
    shown, text = light_first([fast, light, slow])
    assert shown == [light, fast, slow]
    assert text == (
        f"first stands {light.candidate}: 0.5% slower than {fast.candidate}, which is within what a prediction can "
        f"tell, with 40 GB less"
    )
    for others in ([fast, _plan(1005.0, 75e9), slow], [fast, _plan(1005.0, 40e9, False), slow], [fast]):
        assert light_first(others) == (others, "")


@pytest.mark.parametrize(("room", "is_light"), [(1.02, True), (2.0, False)])
def test_where_the_fastest_takes_nearly_all_of_the_memory_a_lighter_one_is_looked_for(room: float, is_light: bool):
    """However many plans are between them: one alone is asked for."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(12)))
        batch = (torch.empty(12288, 512),)
    asked = Asked(4, 12288, named("h100-80g"), top=1, may_offload=False)
    found = plan(Job(model, lambda model, x: model(x).mean(), batch), asked)
    (fastest,) = checked(found).found.best
    made = checked(replace(found, asked=replace(asked, memory=room * fastest.memory)))
    (first,) = made.found.best
    assert first.is_emitted and (first.candidate != fastest.candidate) == is_light
    assert (" MB less" in made.certificate) == is_light
    if is_light:
        assert first.memory < 0.9 * fastest.memory and first.total < 1.02 * fastest.total


def test_of_plans_that_are_as_fast_and_as_light_the_one_with_the_fewest_options_stands_first() -> None:
    many = _plan(1000.0, 40e9, zero=3)
    few, heavy = _plan(1004.0, 41e9), _plan(1003.0, 60e9)
    shown, text = light_first([many, heavy, few])
    assert shown == [few, many, heavy] and text.endswith("than dp=2 zero=3 1 x 1 rows, which is within what a "
                                                         "prediction can tell, with 1 option fewer")  # fmt: skip
    assert few.candidate.choices == 1 and many.candidate.choices == 2
    _, text = light_first([_plan(1000.0, 80e9, zero=3), few])
    assert text.endswith("with 39 GB less and 1 option fewer")


def test_stages_of_zero_with_the_same_figures_are_one_plan() -> None:
    one, two, three = _plan(10.0, 5.0, zero=1), _plan(10.0, 5.0, zero=2), _plan(10.0, 4.0, zero=3)
    assert _one_of_each([three, two, one]) == [one, three]


def test_what_is_close_to_the_limit_is_not_compiled_where_others_took_more_than_was_predicted() -> None:
    found = planned()
    check = _Check(replace(found, asked=replace(found.asked, memory=100e9)), lambda done, all_: None, True)
    close, far = _plan(10.0, 96e9), _plan(10.0, 94e9)
    pipeline = replace(close, candidate=close.candidate._replace(pp=2))
    check.excess[False] = [1.10, 1.05]
    assert not check._is_larger(close), "two programs are too few to say"
    check.excess[False].append(1.08)
    assert check._is_larger(close) and not check._is_larger(far) and not check._is_larger(pipeline)
    assert check.dropped == {AS_OTHERS: 1}
