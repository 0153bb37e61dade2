"""`autopar run --checkpoint`: a rank that is killed, a run that is told to leave, and what a command line may say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks, crowding

from autopar.checkpoint import folder
from autopar.cli import commands as cli
from autopar.cli.arguments.command_options import CommandOptions
from autopar.cli.launch import _reported
from autopar.cli.training import Outputs, train

JOB = """
import os, signal, time
from pathlib import Path
import torch
import autopar

HERE = Path(__file__).parent

def loss_fn(model, x):
    return model(x).square().mean()

def job():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 4))
    def data(step):
        mark = HERE / "killed"
        if step == 5 and os.environ.get("RANK") == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return torch.randn(4, 8)
    return autopar.Job(model, loss_fn, (torch.randn(4, 8),), data=data)
"""


def _losses(log: Path) -> list[str]:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"].hex() for row in rows]


def _straight(rank: int, path: str, steps: int) -> None:
    options = CommandOptions()
    train(options.job(f"{path}/job.py:job"), "dp=2", steps, options, Outputs(Path(path) / "straight"))


@pytest.mark.gloo
def test_a_run_survives_a_kill_and_leaves_when_told_to(two: Ranks, tmp_path: Path) -> None:
    """One run: a rank is killed, all start again from the newest checkpoint, and leave when the launcher is told to.
    Its losses are those of a run that nobody stopped, to the bit."""
    (tmp_path / "job.py").write_text(JOB)
    command = [
        sys.executable, "-m", "autopar", "run", f"{tmp_path / 'job.py'}:job", "--mesh", "dp=2", "--steps", "100000",
        "--losses", str(tmp_path / "log"), "--checkpoint", str(tmp_path / "run"), "--every", "2", "--max-restarts", "1",
        "--cache", str(tmp_path / "programs"),
    ]  # fmt: skip
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    end = time.monotonic() + 60 * crowding()
    while max(folder.committed(tmp_path / "run"), default=0) < 8 and run.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    run.send_signal(signal.SIGUSR1)
    text, said = run.communicate(timeout=60 * crowding())
    assert run.returncode == -signal.SIGUSR1, said
    assert "stopped by SIGUSR1; all 2 ranks were ended" in said
    assert text.index("mesh dp=2: compiled ") < text.index("mesh dp=2: read ")  # the ranks that were started again
    assert f"resumed from step 4 of {tmp_path / 'run'}" in text and (tmp_path / "killed").exists()
    losses, steps = _losses(tmp_path / "log"), folder.committed(tmp_path / "run")
    assert len(losses) == max(steps) >= 8 and len(steps) == 3
    two.run(_straight, str(tmp_path), len(losses))
    assert losses == _losses(tmp_path / "straight")


def test_what_ranks_said_before_a_restart_is_no_failure(tmp_path: Path) -> None:
    for attempt, rank in ((0, 0), (10, 1), (9, 0)):
        file = tmp_path / "run" / f"attempt_{attempt}" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"message": {"message": str(attempt), "extraInfo": {"timestamp": "1"}}}))
    assert {rank: each.error_file_data["message"]["message"] for rank, each in _reported(tmp_path).items()} == {1: "10"}


REFUSED: dict[str, tuple[list[str], str]] = {
    "every": (["--every", "3"], "--every 3: it needs --checkpoint DIR, where the run is saved."),
    "restarts": (["--max-restarts", "3"], "--max-restarts 3: it needs --checkpoint DIR, where the run is saved."),
    "none": (["--checkpoint", "DIR", "--every", "0"], "--every 0: write a number of 1 or more."),
    "resume": (
        ["--checkpoint", "DIR", "--resume", "newest"], "--resume newest: write auto, never or the number of a step.",
    ),
    "cache": (["--cache", "DIR/file"], "--cache DIR/file: cannot write there: File exists."),
    "a file": (["--checkpoint", "DIR/file"], "--checkpoint DIR/file: cannot write there: File exists."),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_command_line_may_not_say(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "file").touch()
    flags, words = REFUSED[what]
    line = ["autopar", "run", "x:y", "--mesh", "dp=1", *(flag.replace("DIR", str(tmp_path)) for flag in flags)]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err.strip() == "autopar: " + words.replace("DIR/", f"{tmp_path}/")
