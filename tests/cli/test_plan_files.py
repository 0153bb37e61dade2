"""`--plan FILE` of the commands that take a mesh: it decides, and what stands beside it says no other thing."""

from __future__ import annotations

from pathlib import Path
from socket import socket

import pytest
import torch
from test_cli_bad import JOB, call, filled

PLAN = 'mesh = "dp=2"\nzero = 1\nmicrobatches = 2\n'
# JOB says microbatches=4 and zero=3 itself: PLAN goes before. MB: the same plan without microbatches.
WRONG = {
    "run JOB --plan PLAN --mesh dp=4": "--mesh dp=4: plan 'PLAN' says mesh = 'dp=2'. Leave out the flag, or",
    "verify JOB --plan PLAN --zero 2": "--zero 2: plan 'PLAN' says zero = 1. Leave out the flag, or change the plan.",
    "explain JOB 0.weight --plan PLAN --microbatches 4": "--microbatches 4: plan 'PLAN' says microbatches = 2. Leave",
    "estimate JOB": "write --mesh, e.g. --mesh dp=2,tp=2, or --plan FILE.toml that `autopar plan` wrote.",
    "run JOB --plan PLAN --mesh auto": "--mesh auto: plan 'PLAN' says mesh = 'dp=2'. Leave out the flag, or change",
    "run JOB --mesh auto --zero 1": "--zero beside --mesh auto, which decides it: leave it out, or plan around it",
    "run JOB --mesh dp=2 --machine cpu": "--machine cpu: it is of --mesh auto, and the mesh is 'dp=2'. Leave it out.",
    "verify JOB --mesh auto": "mesh 'auto' is planned where ranks run: parallelize and `autopar run` take it. Here",
    "inspect SAVED --plan PLAN": "'SAVED' is compiled already: it takes no --mesh and no options of a step.",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    (folder / "job.py").write_text(JOB.replace("8)))", "8)), microbatches=4, zero=3)"))
    (folder / "plan.toml").write_text(PLAN)
    (folder / "mb.toml").write_text(PLAN.replace("microbatches = 2\n", ""))
    (folder / "saved").mkdir()
    files = {"JOB": "job.py:job", "PLAN": "plan.toml", "MB": "mb.toml", "SAVED": "saved"}
    return {name: f"{folder}/{file}" for name, file in files.items()}


@pytest.mark.parametrize("line", WRONG)
def test_what_says_another_thing_than_the_plan(line: str, places: dict[str, str]) -> None:
    code, shown, said = call(filled(line, places))
    assert code == 1 and said.startswith(f"autopar: {filled(WRONG[line], places)}"), said
    assert said.count("\n") == 1 and not shown


def test_what_says_the_same_as_the_plan_may_stay(places: dict[str, str]) -> None:
    code, shown, said = call(filled("verify JOB --plan PLAN --mesh dp=-1 --zero 1 --steps 1", places))
    assert code == 0, (shown, said)


def test_a_plan_goes_before_what_the_job_says(places: dict[str, str]) -> None:
    """Also where the plan says nothing: then there are no micro-batches."""
    seen = {}
    for name in ("PLAN", "MB"):
        code, seen[name], said = call(filled(f"inspect JOB --plan {name}", places))
        assert code == 0, said
    assert "micro-batch" in seen["PLAN"] and "micro-batch" not in seen["MB"], seen


@pytest.mark.gloo
def test_a_plan_is_run_on_its_ranks(places: dict[str, str], tmp_path: Path) -> None:
    code, _, said = call(filled(f"run JOB --plan PLAN --steps 2 --log {tmp_path / 'log'}", places))
    assert code == 0, said
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_mesh_that_is_planned(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the job says what a plan decides."""
    if not torch.cuda.is_available():
        code, _, said = call(filled("run JOB --mesh auto", places))
        assert code == 1 and said.startswith("autopar: mesh 'auto' needs the number of ranks, which is not known here")
    with socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    here = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in {**here, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    code, shown, said = call(filled("run JOB --mesh auto --machine cpu --steps 1", places))
    assert code == 0 and "mesh dp=1: compiled" in shown, (shown, said)


def test_plan_takes_no_flags_for_what_it_plans(places: dict[str, str]) -> None:
    code, _, said = call(filled("plan JOB --gpus 4 --zero 1", places))
    assert code == 2 and "No such option" in said and "--zero" in said
