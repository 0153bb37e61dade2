"""What a rank that fails leaves for the launcher, and how a run ends that the user stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from autopar.cli.launch import _first_failure, report
from autopar.ir.mesh import parse_mesh


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    return file


def failure(error_file: Path) -> ProcessFailure:
    """As torchrun reads it."""
    return ProcessFailure(local_rank=0, pid=0, exitcode=1, error_file=str(error_file))


def test_torchrun_reads_what_a_rank_said(error_file: Path):
    report(ValueError("no data left"))
    assert failure(error_file).message["message"] == "ValueError: no data left"


def test_a_rank_ended_while_it_reports_leaves_nothing_torchrun_chokes_on(
    error_file: Path, monkeypatch: pytest.MonkeyPatch
):
    """A peer that loses its peers reports while the launcher ends it: half a file made torchrun raise itself."""

    def ended_in_the_middle(path: Path, text: str):
        with path.open("w") as half:
            half.write(text[: len(text) // 2])
        raise SystemExit(1)

    monkeypatch.setattr(Path, "write_text", ended_in_the_middle)
    with pytest.raises(SystemExit):
        report(ValueError("no data left"))
    assert failure(error_file).error_file_data["message"] == "<NONE>"


def test_half_a_file_is_what_torchrun_chokes_on(error_file: Path):
    """The reason for the test above: should torchrun learn to read it, both can go."""
    error_file.write_text('{"message": ')
    with pytest.raises(json.JSONDecodeError):
        failure(error_file)


def test_a_rank_that_leaves_without_a_word_is_named(tmp_path: Path):
    """By its exit code: it wrote no file. The peer that lost it says so, but is no cause."""
    said = {"message": "RankError: rank 0 lost its peers at step 3.", "extraInfo": {"timestamp": "1"}}
    (tmp_path / "lost.json").write_text(json.dumps({"message": said}))
    lost = ProcessFailure(local_rank=0, pid=0, exitcode=1, error_file=str(tmp_path / "lost.json"))
    left = ProcessFailure(local_rank=1, pid=0, exitcode=7, error_file="<N/A>")
    assert lost.timestamp < left.timestamp
    text = "rank 1 (dp=1) failed with exit code 7; see its output above."
    assert _first_failure({0: lost, 1: left}, parse_mesh("dp=2")) == text


# -- stopped --------------------------------------------------------------------------------------------------------

RANK = (
    "import os, time; from autopar.cli.launched import end_with; end_with(os.getppid()); print(os.getpid(), flush=True)"
)
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except OSError:
        return False


def gone_after(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_running(pid)


def test_a_rank_ends_when_its_launcher_is_killed():
    """Red before: ranks trained on for ever. This one waits where no signal handler of Python's would run."""
    waits = f"{RANK}; import threading; threading.Event().wait()"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, waits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    rank = int(launcher.stdout.readline())
    assert not gone_after(rank, 1.5), "the launcher lives"
    launcher.kill()
    assert gone_after(rank, 10), "seconds, on a loaded machine"
    assert launcher.wait() == -signal.SIGKILL
    assert launcher.stderr.read() == "autopar: the launcher is gone; this rank ends.\n"
    launcher.stdout.close()
    launcher.stderr.close()


@pytest.mark.gloo
def test_ctrl_c_ends_a_run_with_one_sentence(tmp_path: Path):
    """Red before: a traceback of elastic's, after seven seconds."""
    job = tmp_path / "job.py"
    job.write_text(
        "import torch\nimport autopar\n\n\ndef job():\n    loss = lambda model, x: model(x).square().mean()\n"
        "    return autopar.Job(torch.nn.Linear(8, 8), loss_fn=loss, batch=(torch.ones(8, 8),))\n"
    )
    command = [sys.executable, "-m", "autopar", "run", f"{job}:job", "--mesh", "dp=2", "--steps", "100000000"]
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline().startswith("mesh dp=2") and run.stdout.readline().startswith("step 1/")
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=30)
    assert time.monotonic() - start < 4, "two seconds, on a machine that does nothing else"
    assert (run.returncode, said) == (-signal.SIGINT, "autopar: stopped by SIGINT; all 2 ranks were ended.\n")
    assert len(children) >= 2 and not any(is_running(int(child)) for child in children)
