"""Pipelines on the command line: its options, what `inspect` shows, drawings and traces."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli import commands as cli
from autopar.cli import compiling
from autopar.cli.arguments.command_options import CommandOptions
from autopar.compiler.check_options import options_of
from autopar.errors import PlanError
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.report.inspection import collectives_text
from autopar.report.inspection_pipeline import memory_of_rank, saved_bytes, transfers_of

JOBS = """
import torch
import autopar
from torch import nn

def loss_fn(model, x, y):
    return (model(x) - y).square().mean()

def job():
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    batch = torch.randn(16, 8), torch.randn(16, 8)
    return autopar.Job(nn.Sequential(*layers), loss_fn, batch, after=lambda model: "the end")

def staged():
    made = job()
    stages = ["0-3", "4-7"]
    return autopar.Job(made.model, made.loss_fn, made.batch, microbatches=4, schedule="gpipe", stages=stages)
"""
MESH = ("--mesh", "pp=2,dp=2")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "pipeline_jobs.py"
    path.write_text(JOBS)
    return path


@dataclass(frozen=True)
class Call:
    """The command line in this process: what it wrote, after it left with the expected code."""

    capsys: pytest.CaptureFixture[str]  # of what this process writes, or of what all that it starts write

    def __call__(self, *arguments: object, code: int = 0) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["autopar", *map(str, arguments)])
            patch.setenv("COLUMNS", "160")
            with pytest.raises(SystemExit) as left:
                cli.main()
        written = self.capsys.readouterr()
        assert (left.value.code or 0) == code, written.err
        return written.err if code else written.out


@pytest.fixture
def call(request: pytest.FixtureRequest) -> Call:
    both = "on_ranks" in request.fixturenames  # pytest captures one way a test
    return Call(request.getfixturevalue("capfd" if both else "capsys"))


@pytest.fixture
def on_ranks(capfd: pytest.CaptureFixture[str]) -> Call:
    """With what the processes wrote that the command started."""
    return Call(capfd)


def test_options_of_a_pipeline(jobs: Path, call: Call, tmp_path: Path):
    table = tmp_path / "table.csv"
    table.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n")
    for options in (
        ("--microbatches", 4),
        ("--microbatches", 4, "--schedule", "zb-v", "--chunks", 2),
        ("--microbatches", 2, "--schedule", table, "--stages", "0-1;2-7"),
    ):
        assert "all equal" in call("verify", f"{jobs}:job", *MESH, *options, "--steps", 1)


def test_the_command_line_goes_before_the_job(jobs: Path):
    target = f"{jobs}:staged"
    same = CommandOptions().job(target)
    assert (same.microbatches, same.schedule, same.stages) == (4, "gpipe", ["0-3", "4-7"])
    said = CommandOptions(microbatches=8, schedule="1f1b", stages=["0-1; 2", "3-7"], stage_memory=100).job(target)
    assert (said.microbatches, said.schedule, said.stages, said.stage_memory) == (8, "1f1b", ("0-1", "2", "3-7"), 100)
    found = options_of(**said.step)
    assert found.stages == ("0-1", "2", "3-7") and found.microbatches == 8


def test_memory_on_the_command_line(jobs: Path):
    options = CommandOptions(
        zero=3, no_reshard_after_forward=True, recompute="blocks.0-3=full, *=0.5", precision="bf16",
        reduce_dtype="bf16", bucket_bytes=1000,
    )  # fmt: skip
    assert options_of(**options.job(f"{jobs}:job").step) == StepOptions(
        zero=3, reshard_after_forward=False, recompute={"blocks.0-3": "full", "*": 0.5}, precision="bf16",
        reduce_dtype=torch.bfloat16, bucket_bytes=1000, shard={},
    )  # fmt: skip
    assert options.arguments() == [
        "--zero", "3", "--no-reshard-after-forward", "--recompute", "blocks.0-3=full, *=0.5",
        "--precision", "bf16", "--reduce-dtype", "bf16", "--bucket-bytes", "1000",
    ]  # fmt: skip
    assert options_of(**CommandOptions(recompute="5000").job(f"{jobs}:job").step).recompute == 5000
    with pytest.raises(PlanError, match="reduce_dtype='fp8': write "):
        options_of(**CommandOptions(reduce_dtype="fp8").job(f"{jobs}:job").step)


def test_ranks_get_the_same_options():
    options: dict[str, Any] = {
        "seed": 3, "sequence_parallel": True, "compile": "inductor", "cuda_graphs": True, "microbatches": 4,
        "schedule": "zb-h1", "chunks": 2, "stages": ["a,b", "c;d"], "stage_memory": 7,
    }  # fmt: skip
    assert CommandOptions(**options).arguments() == [
        "--seed", "3", "--cuda-graphs", "--sequence-parallel", "--microbatches", "4", "--schedule", "zb-h1",
        "--chunks", "2", "--stages", "a,b;c;d", "--stage-memory", "7", "--compile", "inductor",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chunks", 0), "chunks=0: write a number of 1 or more."),
        (("--microbatches", 0), "microbatches=0"),
        (("--schedule", "none.csv"), "schedule 'none.csv': there is no such file."),
        (("--schedule", "1f2b"), "schedule '1f2b' is unknown. Known are gpipe, 1f1b"),
        (("--stages", "0-7"), "stages= names 1 stages, but pp=2 has as many on each rank: 2, 4, ..."),
    ],
)
def test_wrong_options(jobs: Path, call: Call, options: tuple[object, ...], message: str):
    assert message in call("inspect", f"{jobs}:job", *MESH, *options, code=1)


# ---- inspect


def test_inspect_shows_a_rank(jobs: Path, call: Call):
    shown = call("inspect", f"{jobs}:staged", *MESH, "--rank", 3)
    assert "rank 3 (pp=1,dp=1) of mesh pp=2,dp=2, stage 1 of 2, schedule 'gpipe', 4 micro-batches" in shown
    assert "graph forward_1\nSTAGED program" in shown and "graph epilogue\n" in shown and "forward_0\n" not in shown
    assert "    1  RECV 0F0 from rank 0: %" in shown and "more: --full" not in shown
    one = call("inspect", f"{jobs}:staged", *MESH, "--rank", 3, "--graph", "forward_1")
    assert "graph forward_1\n" in one and "graph epilogue\n" not in one
    assert "--graph x: rank 0 has " in call("inspect", f"{jobs}:staged", *MESH, "--graph", "x", code=1)


def test_inspect_shortens_a_long_list(jobs: Path, call: Call):
    options = (f"{jobs}:job", "--mesh", "pp=2", "--microbatches", 16, "--graph", "forward_0")
    short, full = call("inspect", *options), call("inspect", *options, "--full")
    assert "more: --full shows them" in short and "more: --full shows them" not in full
    assert "0B9" in full and "0B9" not in short


def test_what_a_rank_holds_and_moves(jobs: Path):
    job = CommandOptions().job(f"{jobs}:job")
    rows = 16 * 8 * 4 // (2 * 4)  # bytes of an activation: the batch over dp and four micro-batches
    for schedule, most in (("gpipe", (4, 4)), ("1f1b", (2, 1))):
        compiled = autopar.compile(
            job.model, "pp=2,dp=2", loss_fn=job.loss_fn, batch=job.batch, microbatches=4, schedule=schedule,
            stages=("0-3", "4-7"),
        )  # fmt: skip
        assert compiled.pipeline is not None
        weights = sum(p.numel() for p in job.model[:4].parameters()) * 4
        # the first: a result of Tanh. The second: what came from the first, two results of Tanh, the difference
        for place, saved in ((0, 1), (1, 4)):
            found = memory_of_rank(compiled, place)
            assert (found.parameters, found.gradients) == (weights, weights)
            assert found.activations == most[place] * saved_bytes(compiled.pipeline, place)
            assert saved_bytes(compiled.pipeline, place) == saved * rows
        sent = [row for row in transfers_of(compiled.pipeline, 0) if row.op == "SEND"]
        assert [(row.graph, row.peer, row.bytes, row.times) for row in sent] == [("forward_0", 1, rows, 4)]
        reduced = [row for row in compiled.collectives if row.axis == "dp" and row.place == 0 and row.bytes > 4]
        assert [(row.graph, row.times) for row in reduced] == [("epilogue", 1)]
        assert all(row.times == 1 for row in compiled.collectives)
    tensor = autopar.compile(
        job.model, "pp=2,tp=2", loss_fn=job.loss_fn, batch=job.batch, microbatches=4, schedule="1f1b"
    )
    assert {row.times for row in tensor.collectives if row.graph.startswith(("forward", "backward"))} == {4}
    assert "4x" in collectives_text(tensor, 3) and "graph" in collectives_text(tensor, 3).split("\n")[0]


def test_compile_counts_programs(jobs: Path, call: Call, tmp_path: Path):
    shown = call("compile", f"{jobs}:staged", *MESH, "--out", tmp_path / "out")
    assert "2 distinct programs for 4 ranks (mesh pp=2,dp=2)" in " ".join(shown.split())
    assert "1 distinct program for 4 ranks" in " ".join(
        call("compile", f"{jobs}:job", "--mesh", "dp=4", "--out", tmp_path / "one").split()
    )
    assert autopar.load(tmp_path / "out").mesh.size == 4


@pytest.mark.gloo
def test_verify_on_processes_that_are_started_with_the_options(jobs: Path, on_ranks: Call):
    options = ("--mesh", "pp=2", "--microbatches", 4, "--schedule", "zb-h1", "--stages", "0-3;4-7")
    said = on_ranks("verify", f"{jobs}:job", *options, "--steps", 1, "--backend", "gloo")  # a rank that differs ends it
    assert "all equal" in said and "over gloo" in said


# ---- timelines


def test_timeline_in_the_terminal_and_in_files(jobs: Path, call: Call, tmp_path: Path):
    options = ("inspect", f"{jobs}:staged", *MESH)
    shown = call(*options, "--timeline", "--timeline-file", tmp_path / "a.svg")
    assert "schedule 'gpipe': 2 ranks, 2 stages, 4 micro-batches" in shown
    assert re.search(r"\nrank 1 .*F0.*F3.*B0.*B3.* idle +\d+\.\d%\n", shown), shown
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "a.html: " in call(*options, "--timeline-file", tmp_path / "a.html")
    assert "write a name that ends in .svg or .html" in call(*options, "--timeline-file", "a.png", code=1)
    assert "only the times of a pipeline are simulated" in call(
        "inspect", f"{jobs}:job", "--mesh", "dp=2", "--timeline", code=1
    )


@pytest.mark.gloo
def test_a_run_trains_as_one_device_does_and_is_traced(
    jobs: Path, call: Call, on_ranks: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = (f"{jobs}:job", "--mesh", "pp=2", "--microbatches", 4)
    steps = ("--steps", 12, "--seed", 5)
    said = call("run", f"{jobs}:job", "--mesh", "dp=1", *steps, "--losses", tmp_path / "one.jsonl")
    torch.distributed.destroy_process_group()
    assert "the end" in said
    assert "the end" in on_ranks(
        "run", *options, *steps, "--losses", tmp_path / "two.jsonl", "--trace", tmp_path / "trace"
    )
    one, two = (
        [json.loads(line)["loss"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == 12 and one[-1] < one[0]
    assert two == pytest.approx(one, rel=1e-5)
    events = json.loads((tmp_path / "trace" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {9, 10, 11}, "the last three"
    names = [event["name"] for event in events]
    assert names.count("0F2") == names.count("1B2") == names.count("step 10") + 1 == 3
    assert json.loads((tmp_path / "trace" / "trace.json").read_text())["otherData"]["machine"] == "cpu"
    compiled_for: list[Any] = []
    monkeypatch.setattr(compiling, "Fixed", lambda machine: compiled_for.append(machine.name) or Fixed(machine=machine))
    shown = call("inspect", *options, "--timeline", "--over", tmp_path / "trace")
    assert compiled_for == ["cpu"], "red before: stages were cut for a GPU, elsewhere than those that ran"
    assert "measured: " in shown and shown.count("  idle ") == 4
    assert "cannot read" in call("inspect", *options, "--over", tmp_path, code=1)
