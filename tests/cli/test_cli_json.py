"""`--json` of verify and estimate: stdout is one JSON text with the keys of docs/cli.md, and nothing else."""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
from conftest import ROOT

from autopar.cli import commands, verifying
from autopar.verification.judge.comparison import ComparedRow, Mismatch, Report

JOBS = """
import torch, autopar

def loss_fn(model, x, y):
    return (model(x) - y).square().mean()

def job():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return autopar.Job(model, loss_fn, (torch.randn(12, 8), torch.randn(12, 4)))

def odd():
    return autopar.Job(torch.nn.Linear(8, 4), loss_fn, (torch.randn(11, 8), torch.randn(11, 4)))
"""
VERIFY = {"ok", "mesh", "dtype", "steps", "tolerance", "max_error", "compared", "mismatch", "undecided", "sums", "note"}
ESTIMATE = {
    "mesh", "ranks", "machine", "dtype", "step_us", "computing_us", "waits_us", "host_us", "bubble_us", "optimizer_us",
    "tokens_per_second", "mfu", "hfu", "device_bytes", "peak_bytes", "peak_rank", "host_memory_bytes", "disk_bytes",
    "worst_bytes", "notes",
}  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("json") / "jobs.py"
    path.write_text(JOBS)
    return f"{path}:job"


def call(*words: str) -> tuple[object, str, str]:
    """Exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["autopar", *words])
        with pytest.raises(SystemExit) as left:
            commands.main()
    return left.value.code or 0, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("more", [("dp=2,tp=2",), ("dp=1", "--backend", "gloo")], ids=" ".join)
def test_verify(job: str, more: tuple[str, ...]) -> None:
    code, out, _ = call("verify", job, "--steps", "1", "--json", "--mesh", *more)
    found = json.loads(out)
    assert code == 0 and found.keys() == VERIFY and found["ok"] is True and found["mismatch"] is None
    assert (found["mesh"].split()[0], found["dtype"], found["steps"]) == (more[0], "float64", 1)
    assert {"kind": "gradient", "name": "0.weight"}.items() <= found["compared"][2].items()
    assert {row["kind"] for row in found["compared"]} == {"loss", "gradient", "weight"}
    assert all(row["ok"] and 0 <= row["error"] <= found["max_error"] < 1e-10 for row in found["compared"])


def test_options_that_change_nothing_are_told_beside_it(job: str) -> None:
    code, out, err = call("verify", job, "--mesh", "dp=2", "--steps", "1", "--chunks", "3", "--json")
    assert code == 0 and json.loads(out)["ok"] and err.startswith("note: --chunks has no effect"), err


def test_every_rank_is_asked_for_json(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(verifying, "on_ranks", lambda mesh, arguments, work: started.append(arguments))
    code, out, _ = call("verify", job, "--mesh", "dp=2", "--backend", "gloo", "--json", "--zero", "1")
    assert (code, out) == (0, "") and "--json" in started[0] and started[0][-2:] == ["--zero", "1"]


def test_a_mismatch(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no NaN and no infinity."""
    rows = (ComparedRow("loss", "loss", 0.0, 0.0, True), ComparedRow("weight", "a", float("nan"), 0.0, False))
    mismatch = Mismatch("add", "fuse", "up", "gpt.py:3", float("inf"), "it differs")
    with pytest.raises(commands.typer.Exit):
        verifying._finish(Report("dp=2", torch.float32, 2, 1e-4, rows, mismatch), as_json=True)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found.keys() == VERIFY and not found["ok"]
    assert found["compared"][1] == {"kind": "weight", "name": "a", "error": None, "ok": False}
    assert found["mismatch"] == {
        "node": "add", "pass": "fuse", "module": "up", "source": "gpt.py:3", "error": None, "text": "it differs",
    }  # fmt: skip


def test_estimate(job: str) -> None:
    code, out, _ = call("estimate", job, "--mesh", "dp=2,tp=2", "--machine", "a100-80g", "--json")
    found = json.loads(out)
    assert code == 0 and found.keys() == ESTIMATE
    assert (found["mesh"], found["ranks"], found["machine"]) == ("dp=2,tp=2", 4, "a100-80g")
    assert found["step_us"] > found["computing_us"] > 0 and found["waits_us"].keys() == {"dp", "tp"}
    assert 0 < found["mfu"] <= found["hfu"] < 1 and 0 < found["peak_bytes"] < found["device_bytes"]
    assert found["worst_bytes"] is None and isinstance(found["notes"], list)


@pytest.mark.parametrize("line", ["estimate JOB --mesh dp=2 --json", "verify JOB --mesh dp=2 --backend gloo --json"])
def test_an_error_is_json_too(job: str, line: str) -> None:
    """Of two ranks, too: each that is started costs two seconds of imports."""
    code, out, err = call(*line.replace("JOB", job.replace(":job", ":odd")).split())
    text = json.loads(out)["error"]
    assert code == 1 and err == f"autopar: {text}\n" and "axis 'dp' (size 2) cannot divide" in text


def test_the_keys_are_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    assert {key for key in VERIFY | ESTIMATE if not re.search(rf"`{key}`", text)} == set()


def test_inspect_explain_and_plan(job: str) -> None:
    code, out, _ = call("inspect", job, "--mesh", "dp=2,tp=2", "--rank", "3", "--json")
    found = json.loads(out)
    assert code == 0 and found.keys() == {"mesh", "rank", "ranks", "peak_bytes", "collectives", "notes"}
    assert (found["mesh"], found["rank"], found["ranks"]) == ("dp=2,tp=2", 3, 4) and found["peak_bytes"] > 0
    assert {"all_reduce"} <= {row["op"] for row in found["collectives"]} and "jobs.py" in out
    code, out, _ = call("explain", job, "0.weight", "--mesh", "dp=2,tp=2", "--json")
    found = json.loads(out)
    assert code == 0 and (found["name"], found["kind"]) == ("0.weight", "parameter")
    assert [each["axis"] for each in found["decisions"]] == ["dp", "tp"] and found["decisions"][1]["alternatives"]
    line = ("plan", job, "--gpus", "2", "--machine", "cpu", "--fix", "recompute=none", "--fix", "pp=1", "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autopar.cli.planning.SECONDS", -1)
        code, out, said = call(*line)
    found = json.loads(out)
    assert code == 0 and found["devices"] == 2 and found["dtype"] == "float32" and re.search(r"^plans: \d+ of \d", said)
    assert found["plans"][0].keys() == {
        "plan", "mesh", "options", "step_us", "tokens_per_second", "mfu", "memory_bytes", "host_memory_bytes",
        "disk_bytes", "figures",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("inspect JOB --mesh dp=2 --json --memory", "--json prints collectives and the peak of a rank: of other optio"),
        ("explain JOB --mesh dp=2 --instead tp=2 --json", "--json is of a VALUE; --instead prints a table."),
        ("plan JOB --gpus 2,4 --json", "--json is of one number of devices and one batch: leave out --tokens and what"),
    ],
)
def test_what_has_no_json(job: str, line: str, text: str) -> None:
    code, out, said = call(*line.replace("JOB", job).split())
    assert code == 1 and said == f"autopar: {json.loads(out)['error']}\n" and said.startswith(f"autopar: {text}")
