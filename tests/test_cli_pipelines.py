"""Pipelines on the command line: its options, what `inspect` shows, drawings and traces."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autopar import cli
from autopar.options import Options

JOBS = """
import torch
import autopar
from torch import nn

def loss_fn(model, x, y):
    return (model(x) - y).square().mean()

def job():
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return autopar.Job(nn.Sequential(*layers), loss_fn, (torch.randn(16, 8), torch.randn(16, 8)))

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

    capsys: pytest.CaptureFixture[str]

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
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(capsys)


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
    same = Options().job(target)
    assert (same.microbatches, same.schedule, same.stages) == (4, "gpipe", ["0-3", "4-7"])
    said = Options(microbatches=8, schedule="1f1b", stages=["0-1; 2", "3-7"], stage_memory=100).job(target)
    assert (said.microbatches, said.schedule, said.stages, said.stage_memory) == (8, "1f1b", ("0-1", "2", "3-7"), 100)
    assert said.choices.staging.stages == ("0-1", "2", "3-7") and said.choices.microbatches == 8


def test_ranks_get_the_same_options():
    options: dict[str, Any] = {
        "seed": 3, "sequence_parallel": True, "compile": "inductor", "microbatches": 4, "schedule": "zb-h1",
        "chunks": 2, "stages": ["a,b", "c;d"], "stage_memory": 7,
    }  # fmt: skip
    assert Options(**options).arguments() == [
        "--seed", "3", "--sequence-parallel", "--compile", "inductor", "--microbatches", "4", "--schedule", "zb-h1",
        "--chunks", "2", "--stages", "a,b;c;d", "--stage-memory", "7",
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
