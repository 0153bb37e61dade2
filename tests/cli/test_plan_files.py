"""`--plan FILE` of the commands that take a mesh: it decides, and what stands beside it says no other thing."""

from __future__ import annotations

from pathlib import Path
from socket import socket

import pytest
import torch
from test_cli_bad import JOB, call, filled

from autopar.machines import machine_text, named
from autopar.planning.space.decisions import read_plan

PLAN = 'mesh = "dp=2"\nzero = 1\nmicrobatches = 2\n'
# JOB says microbatches=4 and zero=3 itself: PLAN goes before. BARE: the same plan without microbatches.
WRONG = {
    "run JOB --plan PLAN --mesh dp=4": "--mesh dp=4: plan 'PLAN' says mesh = 'dp=2'. Leave out the flag, or",
    "verify JOB --plan PLAN --zero 2": "--zero 2: plan 'PLAN' says zero = 1. Leave out the flag, or change the plan.",
    "explain JOB 0.weight --plan PLAN --microbatches 4": "--microbatches 4: plan 'PLAN' says microbatches = 2. Leave",
    "estimate JOB": "write --mesh, e.g. --mesh dp=2,tp=2, or --plan FILE.toml that `autopar plan` wrote.",
    "run JOB --plan PLAN --mesh auto": "--mesh auto: plan 'PLAN' says mesh = 'dp=2'. Leave out the flag, or change",
    "run JOB --mesh auto --zero 1": "--zero beside --mesh auto, which decides it: leave it out, or plan around it",
    "verify JOB --mesh auto": "mesh 'auto' is planned where ranks run: parallelize and `autopar run` take it. Here",
    "explain JOB --plan PLAN": "explain: write a VALUE, or --instead with what another plan decides: --instead tp=4.",
    "explain JOB --plan PLAN --instead tp=3": "--instead tp=3: the 2 ranks of mesh 'dp=2' stay, and 'tp=3' does not",
    "explain JOB --plan PLAN --instead tq=2": "--instead tq=2: write cp=N, dp=N,",
    "explain JOB --plan PLAN --instead zero=x": "--instead zero=x: write zero=0-3.",
    "explain JOB --plan PLAN --instead reshard_after_forward=false": "--instead reshard_after_forward=false: it keeps "
    "what zero=3 gathers, and the step has zero=1 on mesh 'dp=2'. Write --instead zero=3 beside it.",
    "run JOB --mesh auto --no-reshard-after-forward": "--no-reshard-after-forward beside --mesh auto, which dec",
    "explain JOB --plan PLAN --instead zero=7": "zero=7: write 0, 1 ",
    "plan JOB --gpus 0": "--gpus 0: write a number of 1 or more, or several with commas: 8,64,512.",
    "plan JOB --gpus 2,4 --out PLAN": "--out PLAN: it is of one number of devices, and there are 2 behind --gpus.",
    "plan JOB --gpus 2 --batch 9-8": "--batch 9-8: the range ends with 8 rows, before it begins. Write 8-9.",
    "plan JOB --gpus 2,4 --batch 8,16": "--batch 8,16: it is 2 batches, and there are 2 numbers of devices behind -",
    "plan JOB --gpus 2 --html SAVED/no/page.html": "--html SAVED/no/page.html: there is no folder 'SAVED/no'; make it",
    "plan JOB --gpus 2 --tokens many": "--tokens many: write a number above 0, such as 15T, 300B or 1.5e12.",
    "plan JOB --gpus 2 --fix tp=x": "--fix tp=x: write dp=N, fsdp=N, cp=N, ulysses=N, tp=N, pp=N, zero=N",
    "plan JOB --gpus 2 --memory 70Gi": "--memory 70Gi: write a number of bytes, or one with MB, GB, MiB, GiB.",
    "plan JOB --gpus 2 --machine MACHINE": "machine file 'MACHINE': 'device.bandwidth' is 3; it is 100000 to 1e+15",
    "plan JOB --gpus 8 --batch 7 --fix tp=1 --fix cp=1": "no plan for 8 devices and 7 rows a step with tp=1, cp=1: the",
    "plan JOB --gpus 2 --memory 1": "no plan fits in 1 B a device on 2 devices: the least memory is ",
    "plan JOB --gpus 4 --batch 8 --fix tp=4 --fix dp=4": "no plan for 4 devices and 8 rows a step with tp=4, dp=4: the",
    "plan JOB --gpus 64 --batch 1 --fix cp=1": "no plan for 64 devices and 1 rows a step with cp=1: the data axes must",
    "inspect SAVED --plan PLAN": "'SAVED' is compiled already: it takes no --mesh, --machine or options of a step.",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    (folder / "job.py").write_text(JOB.replace("8)))", "8)), microbatches=4, zero=3)"))
    (folder / "plan.toml").write_text(PLAN)
    (folder / "mb.toml").write_text(PLAN.replace("microbatches = 2\n", ""))
    (folder / "saved").mkdir()
    (folder / "machine.toml").write_text(machine_text(named("cpu")).replace("bandwidth = 5e09", "bandwidth = 3"))
    files = {"MACHINE": "machine.toml", "JOB": "job.py:job", "PLAN": "plan.toml", "BARE": "mb.toml", "SAVED": "saved"}
    return {name: f"{folder}/{file}" for name, file in files.items()}


@pytest.mark.parametrize("line", WRONG)
def test_what_says_another_thing_than_the_plan(line: str, places: dict[str, str]) -> None:
    code, shown, said = call(filled(line, places))
    assert code == 1 and said.startswith(f"autopar: {filled(WRONG[line], places)}"), said
    assert said.count("\n") == 1 and not shown


def test_what_another_plan_would_change(places: dict[str, str]) -> None:
    """Also where the options of the plan have no ranks there."""
    found = []
    for instead in (
        "--instead tp=2 --instead recompute=full", "--instead microbatches=4", "--instead zero=1",
        "--instead zero=3 --instead reshard_after_forward=false",
    ):  # fmt: skip
        code, shown, said = call(filled(f"explain JOB --plan PLAN --machine cpu --batch 16 {instead}", places))
        assert code == 0, said
        found.append(shown.splitlines())
    assert found[0][0].split()[:3] == ["dp=2", "tp=2", "recompute=full"], found[0]
    step, tp = (next(line for line in found[0] if line.startswith(name)) for name in ("step", "  waits for tp"))
    assert step.endswith("%") and "moves 0 B, then " in tp, found[0]
    assert any("calls, then" in line for line in found[1]) and found[1][1] != found[2][1]
    assert all(line.split()[-1][0] not in "+-" for line in found[2][1:]), "the same plan: nothing changes"
    assert "zero=3 reshard_after_forward=False" in found[3][0], found[3]


def test_what_says_the_same_as_the_plan_may_stay(places: dict[str, str]) -> None:
    code, shown, said = call(filled("verify JOB --plan PLAN --mesh dp=-1 --zero 1 --steps 1", places))
    assert code == 0, (shown, said)


def test_a_plan_goes_before_what_the_job_says(places: dict[str, str]) -> None:
    """Also where the plan says nothing: then there are no micro-batches."""
    seen = {}
    for name in ("PLAN", "BARE"):
        code, seen[name], said = call(filled(f"inspect JOB --plan {name}", places))
        assert code == 0, said
    assert "micro-batch" in seen["PLAN"] and "micro-batch" not in seen["BARE"], seen


@pytest.mark.gloo
def test_a_plan_is_run_on_its_ranks(places: dict[str, str], tmp_path: Path) -> None:
    code, _, said = call(filled(f"run JOB --plan PLAN --steps 2 --losses {tmp_path / 'log'}", places))
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


def test_all_that_plan_shows(places: dict[str, str], tmp_path: Path) -> None:
    files = tmp_path / "page.html", tmp_path / "plan.toml"
    line = f"plan JOB --gpus 2 --machine cpu --fix recompute=none --fix pp=1 --html {files[0]} --out {files[1]}"
    line += " --attention gather"
    code, shown, said = call(filled(line, places))
    assert code == 0, said
    assert "2 devices of cpu, 8 rows (8 tokens) a step" in shown and "; products in float32, compile=auto\n" in shown
    assert "\n  no tensor parallelism: +" in shown, shown
    assert files[0].read_text().startswith("<!doctype html>")
    head, predicted, *_ = files[1].read_text().splitlines()
    assert head.startswith("# autopar plan ") and head.endswith(
        "--gpus 2 --batch 8 --machine cpu --attention gather --fix recompute=none --fix pp=1"
    )
    written = read_plan(files[1]).said["attention"]
    assert written == "gather", "what was planned is what runs"
    assert predicted.startswith("# as emitted for cpu: ") and str(read_plan(files[1]).mesh) == "tp=2"
    code, shown, said = call(filled("plan JOB --gpus 1,2 --machine cpu --fix recompute=none --tokens 1B", places))
    assert code == 0 and "days for 1e+09 tokens" in shown and len(shown.splitlines()) == 3, (shown, said)


def test_plan_takes_no_flags_for_what_it_plans(places: dict[str, str]) -> None:
    code, _, said = call(filled("plan JOB --gpus 4 --zero 1", places))
    assert code == 2 and "No such option" in said and "--zero" in said
