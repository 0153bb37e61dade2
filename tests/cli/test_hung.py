"""A rank that hangs: the others end after the timeout, and all say who waited for whom; a rank on its own is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from processes import Ranks, crowding
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

import autopar
from autopar.cli.launch import _first_failure, report
from autopar.errors import AutoparError, RankError
from autopar.ir.mesh import parse_mesh

TIMEOUT_S = 5

JOB = """
import os, signal, time
import torch
import torch.distributed as dist
import autopar

def loss_fn(model, x):
    return model(x).square().mean()

def job():
    def data(step):
        if step == 3 and os.environ.get("RANK") in ("1", "2"):
            reduce, calls = dist.all_reduce, []
            def hangs(*args, **kwargs):
                calls.append(1)
                if len(calls) == 1:  # it compares batches
                    return reduce(*args, **kwargs)
                if os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(1000)
            dist.all_reduce = hangs
        return torch.ones(6, 8)
    return autopar.Job(torch.nn.Linear(8, 4), loss_fn, (torch.ones(6, 8),), data=data)
"""


@pytest.mark.gloo
def test_a_rank_that_is_stopped_is_named_and_ended(tmp_path: Path) -> None:
    """And one that hangs in code of the user's, which can say where."""
    (tmp_path / "job.py").write_text(JOB)
    command = [
        sys.executable, "-m", "autopar", "run", f"{tmp_path / 'job.py'}:job", "--mesh", "dp=3", "--steps", "100000000",
        "--timeout", str(TIMEOUT_S),
    ]  # fmt: skip
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.stdout is not None
    for line in iter(run.stdout.readline, ""):
        if line.startswith("step 1/"):
            break
    start = time.monotonic()
    try:
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert TIMEOUT_S < time.monotonic() - start < TIMEOUT_S + 10 * crowding(), said
    assert run.returncode == 1
    stood = r"rank 0 \(dp=0\) at %\w+ = autopar\.all_reduce  \(made by \w+\)  # job\.py:8"
    assert re.fullmatch(
        r"autopar: rank 1 \(dp=1\) hung; rank 2 \(dp=2\) hung in hangs\(\) at job\.py:20\. The other ranks waited in "
        rf"vain until the timeout: {stood}\. All ranks were ended\.\n",
        said,
    ), said


# -- where a rank waits -----------------------------------------------------------------------------------------------

HEAD = r"rank 0( \(\w\w=0\))? lost its peers "
AGREED = r"while comparing the .* in forward_backward\(\) at test_hung\.py:\d+\..* in vain for the other ranks"
MOVED = r"at %\w+ = autopar\.all_reduce.* in vain for rank 1:"
SENT = r"at 'RECV \d\w\d from rank 1: %\w+'\n  It waited in vain for rank 1:"
PLACES = {
    "agreement": ("dp=2", None, AGREED),
    "all_reduce": ("dp=2", "all_reduce", MOVED),
    "message": ("pp=2", "isend", SENT),
}


def _waits(rank: int, place: str) -> tuple[str, float]:
    mesh, hangs_in, _ = PLACES[place]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))
    parallel = autopar.parallelize(model, mesh, loss_fn=models.square_loss, timeout=2)
    data = torch.ones(4, 16), torch.ones(4, 8)
    parallel.forward_backward(*data)
    start = time.monotonic()
    if rank == 1 and hangs_in is None:
        time.sleep(4)
        return "", 0
    if rank == 1:
        _hang_at(hangs_in)
    try:
        parallel.forward_backward(*data)
    except RankError as error:
        return str(error), time.monotonic() - start
    except TimeoutError:
        return "", 0
    raise AssertionError("nobody waited")


def _hang_at(name: str) -> None:
    move, calls = getattr(dist, name), 0

    def hangs(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if name == "all_reduce" and calls == 1:  # it compares batches
            return move(*args, **kwargs)
        setattr(dist, name, move)
        time.sleep(4)
        raise TimeoutError

    setattr(dist, name, hangs)


@pytest.mark.gloo
def test_each_place_where_a_rank_waits_ends_after_the_timeout(two: Ranks) -> None:
    """Of groups that were there before, too: the timeout is that of what autopar makes for itself."""
    for place, (_, _, wanted) in PLACES.items():
        (said, seconds), _ = two.run(_waits, place)
        assert re.match(HEAD + wanted, said, re.DOTALL), said
        assert "Timed out waiting 2000ms" in said and 1.9 < seconds < 2 + 5


# -- what the launcher says of it -------------------------------------------------------------------------------------


def test_the_rank_that_said_nothing_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that loses its connections to one that waited in vain is none, nor is one of another error hidden."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def failed(rank: int, error: Exception) -> ProcessFailure:
        file = tmp_path / f"{rank}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        report(error)
        return ProcessFailure(rank, pid=0, exitcode=1, error_file=str(file))

    vain = failed(0, RankError("rank 0 (dp=0) lost its peers at %x\n  It waited in vain for ranks 1-3: ..."))
    lost = failed(2, RankError("rank 2 lost its peers while comparing the batch of all ranks.\n  Look for the first"))
    killed = ProcessFailure(1, pid=0, exitcode=-9, error_file="<N/A>")
    ended = ProcessFailure(3, pid=0, exitcode=-15, error_file="<N/A>")
    mesh = parse_mesh("dp=4")
    assert _first_failure({1: killed, 3: ended, 2: lost, 0: vain}, mesh) == (
        "rank 1 (dp=1) hung; rank 3 (dp=3) hung. The other ranks waited in vain until the timeout: rank 0 (dp=0) at "
        "%x; rank 2 while comparing the batch of all ranks. All ranks were ended."
    )
    own = failed(3, ValueError("no data left"))
    assert _first_failure({0: vain, 1: killed, 3: own}, mesh) == "rank 3 (dp=3) failed: ValueError: no data left"
    assert _first_failure({1: killed, 2: lost}, mesh).startswith("rank 1 (dp=1) died: killed by SIGKILL.")


def test_a_fault_is_told_with_its_place_and_what_it_may_come_of() -> None:
    """Where the innermost code of the user's stood; else where the innermost of ours did."""
    bus = ProcessFailure(1, pid=0, exitcode=-7, error_file="<N/A>")
    stack = 'Fatal Python error: Bus error\n\n  File "/job/train.py", line 7 in look\n'
    assert _first_failure({1: bus}, parse_mesh("dp=2"), {1: stack}, {1: "/nvme"}).startswith(
        "rank 1 (dp=1) died: killed by SIGBUS in look() at train.py:7. The other ranks were ended. "
        "Memory that is mapped from a file of offload_dir='/nvme' could not be read or written: "
    )
    killed = ProcessFailure(0, pid=0, exitcode=-9, error_file="<N/A>")
    assert "for want of memory" in _first_failure({0: killed}, parse_mesh("dp=2"))
    aborted = ProcessFailure(0, pid=0, exitcode=-6, error_file="<N/A>")
    assert _first_failure({0: aborted}, parse_mesh("dp=2")) == (
        "rank 0 (dp=0) died: killed by SIGABRT. The other ranks were ended."
    )


BROKEN = """
import os
import torch
from torch import nn
import autopar

FOLDER = os.path.dirname(__file__)

def broken():
    def data(step):
        for line in open("/proc/self/maps") if step == 2 and os.environ["RANK"] == "1" else ():
            if f"{FOLDER}/" in line and "deleted" in line:  # a file without a name, cut under its memory
                os.truncate(f"/proc/self/map_files/{line.split()[0]}", 0)
        return torch.ones(4, 64), torch.ones(4, 64)
    model, mse = nn.Linear(64, 64), nn.functional.mse_loss
    return autopar.Job(
        model, lambda model, x, y: mse(model(x), y), data(0), data=data, offload="optimizer", offload_dir=FOLDER)
"""


@pytest.mark.gloo
@pytest.mark.skipif(os.geteuid() != 0, reason="only root opens /proc/self/map_files")
def test_a_disk_that_fails_in_a_run_ends_all_ranks_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    command = [sys.executable, "-m", "autopar", "run", f"{tmp_path}/broken.py:broken", "--mesh", "dp=2", "--steps", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "killed by SIGBUS" in done.stderr, done.stderr
    assert f"Memory that is mapped from a file of offload_dir='{tmp_path}' could not be read" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["broken.py"]


@pytest.mark.parametrize("timeout", [0, -1, 0.5, float("nan"), float("inf"), True, "5"])
def test_what_a_timeout_cannot_be(timeout: object) -> None:
    with pytest.raises(AutoparError) as caught:
        autopar.parallelize(nn.Linear(8, 8), "dp=1", timeout=timeout)  # type: ignore[call-overload]
    assert str(caught.value) == (
        f"timeout={timeout!r}: write the seconds that a rank waits for the others, 1 to 1,000,000,000, or None for as "
        "long as torch's backend does."
    )
