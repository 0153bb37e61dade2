"""The command line as a user calls it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

import autopar
from autopar.cli import commands as cli
from autopar.torch_compat import has_cpp_compiler

ROOT = Path(__file__).resolve().parents[2]

JOBS = """
import os, signal
import torch
import autopar

def loss_fn(model, x, y):
    return (model(x) - y).square().mean()

def job():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return autopar.Job(model, loss_fn, (torch.randn(12, 8), torch.randn(12, 4)))

def dies():
    def data(step):
        if step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(12, 8), torch.randn(12, 4)
    made = job()
    return autopar.Job(made.model, made.loss_fn, made.batch, data=data)

def raises():
    def data(step):
        if step == 3 and os.environ["RANK"] == "1":
            raise ValueError("no data left")
        return torch.randn(12, 8), torch.randn(12, 4)
    made = job()
    return autopar.Job(made.model, made.loss_fn, made.batch, data=data)

def slow_to_end():
    # the rank that raises ends after those that lose it
    from autopar.cli.training import dist
    destroy = dist.destroy_process_group
    def slowly():
        destroy()
        if os.environ["RANK"] == "1":
            import time
            time.sleep(3)
    dist.destroy_process_group = slowly
    return raises()

def branches():
    def loss(model, x, y):
        out = model(x)
        if int(out.sum()) > 0:
            out = out * 2
        return (out - y).square().mean()
    made = job()
    return autopar.Job(made.model, loss, made.batch)

def masked():
    def loss(model, x, y, mask):
        return ((model(x) - y) * (mask.unsqueeze(-1) if int(mask.min()) < 1 else 1)).square().mean()
    made = job()
    return autopar.Job(made.model, loss, (*made.batch, torch.ones(12)))

def no_job():
    return 3

def fails():
    return {}["nothing"]
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "jobs.py"
    path.write_text(JOBS)
    return path


def here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in this process: a new one takes seconds to import torch."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = enter(*arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def enter(*arguments: object) -> int:
    """The exit code of the command line in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["autopar", *map(str, arguments)])
        patch.setenv("COLUMNS", "200")
        try:
            cli.main()
        except SystemExit as left:
            return int(left.code or 0)
    return 0


@dataclass(frozen=True)
class OnRanks:
    """A command in this process that starts a process for each rank: what all of them wrote."""

    capfd: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        code = enter(*arguments)
        return subprocess.CompletedProcess(arguments, code, *self.capfd.readouterr())


@pytest.fixture
def on_ranks(capfd: pytest.CaptureFixture[str]) -> OnRanks:
    return OnRanks(capfd)


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "autopar", *map(str, arguments)]
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_verify(jobs: Path):
    done = here("verify", f"{jobs}:job", "--mesh", "dp=2,tp=2")
    assert done.returncode == 0, done.stderr
    assert "all equal" in done.stdout and "gradient  0.weight" in done.stdout


def test_verify_as_ddp(jobs: Path):
    done = here("verify", f"{jobs}:job", "--mesh", "dp=2", "--ddp")
    assert done.returncode == 0 and "dp=2, as DistributedDataParallel" in done.stdout, done.stderr


def test_groups_of_ops_run_on_the_virtual_mesh(jobs: Path):
    done = here("verify", f"{jobs}:job", "--mesh", "dp=2,tp=2", "--compile", "triton")
    assert done.returncode == 0 and "all equal" in done.stdout, done.stderr
    shown = here("inspect", f"{jobs}:job", "--mesh", "dp=2,tp=2", "--compile", "triton")
    assert "fused" in shown.stdout and "fused" not in here("inspect", f"{jobs}:job", "--mesh", "dp=2,tp=2").stdout


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler (apt install g++)")
def test_compiled_by_inductor(jobs: Path, on_ranks: OnRanks):
    done = on_ranks("verify", f"{jobs}:job", "--mesh", "dp=2", "--backend", "gloo", "--compile", "inductor")
    assert done.returncode == 0, done.stderr
    assert "all equal" in done.stdout and "dp=2 over gloo, compiled by inductor" in done.stdout
    done = call("run", f"{jobs}:job", "--mesh", "dp=1", "--steps", 2, "--compile", "inductor")
    assert done.returncode == 0 and "step 2/2" in done.stdout, done.stderr


def test_values_of_the_batch_are_taken_when_asked(jobs: Path, tmp_path: Path):
    refused = here("compile", f"{jobs}:masked", "--mesh", "dp=2", "--out", tmp_path / "a")
    assert refused.returncode == 1 and "Or specialize=True takes the value" in refused.stderr
    taken = here("verify", f"{jobs}:masked", "--mesh", "dp=2", "--specialize")
    assert taken.returncode == 0, taken.stderr
    made = here("compile", f"{jobs}:masked", "--mesh", "dp=2", "--specialize", "--out", tmp_path / "b")
    assert made.returncode == 0 and "is taken as 1" in " ".join(made.stdout.split())


@pytest.mark.gloo
def test_a_rank_that_dies_ends_the_others_and_is_named(jobs: Path, on_ranks: OnRanks):
    start = time.monotonic()
    done = on_ranks("run", f"{jobs}:dies", "--mesh", "tp=2", "--steps", 100000)
    assert done.returncode == 1
    assert "autopar: rank 1 (tp=1) died: killed by SIGKILL. The other ranks were ended." in done.stderr
    assert time.monotonic() - start < 90  # most of it is the start of four processes


@pytest.mark.gloo
def test_a_rank_that_raises_is_named(jobs: Path, on_ranks: OnRanks):
    """Though torchrun sees another one end before it."""
    done = on_ranks("run", f"{jobs}:slow_to_end", "--mesh", "tp=2", "--steps", 100000)
    assert done.returncode == 1
    assert "autopar: rank 1 (tp=1) failed: ValueError: no data left" in done.stderr, done.stderr


@pytest.mark.slow  # tests/cli/test_launch.py has what is shown of several failures
@pytest.mark.gloo
def test_an_error_of_all_ranks_is_shown_once(jobs: Path, on_ranks: OnRanks):
    done = on_ranks("run", f"{jobs}:branches", "--mesh", "dp=2")
    assert done.returncode == 1
    assert done.stderr.count("the program depends on the values in a tensor") == 1
    assert f"{jobs}:" in done.stderr and "if int(out.sum()) > 0:" in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_and_short_help():
    done = here("--version")
    installed = version("torch")  # of the CUDA build on PyPI this lacks the "+cu130" that torch itself says
    assert (done.returncode, done.stdout) == (0, f"autopar {autopar.__version__}, torch {installed}\n")
    assert here("-h").stdout == here("--help").stdout


def test_compile_and_inspect(jobs: Path, tmp_path: Path):
    folder = tmp_path / "program"
    done = here("compile", f"{jobs}:job", "--mesh", "dp=3,tp=2", "--out", folder)
    assert done.returncode == 0, done.stderr
    assert "1 distinct program for 6 ranks" in done.stdout
    loaded = autopar.load(folder)
    assert loaded.mesh == autopar.Mesh((("dp", 3), ("tp", 2)))
    shown = here("inspect", folder, "--rank", 5)
    assert shown.returncode == 0, shown.stderr
    assert "rank 5 (dp=2,tp=1)" in shown.stdout
    assert loaded.text() in shown.stdout
    assert "all_reduce" in shown.stdout and "parameters" in shown.stdout
    readable = next(folder.glob("*.py")).read_text()
    assert "def step(" in readable and "jobs.py:" in readable and "is partial" not in readable.split("def step(")[0]


def test_inspect_shows_memory_and_formulas(jobs: Path, tmp_path: Path):
    done = here(
        "inspect",
        f"{jobs}:job",
        "--mesh",
        "dp=2,tp=2",
        "--rank",
        "3",
        "--memory",
        "--formula",
        "--device",
        "cpu",
        "--recompute",
        "selective",
    )
    assert done.returncode == 0, done.stderr
    assert "memory of rank 3 (dp=1,tp=1) on cpu, AdamW" in done.stdout
    for kind in ("parameters", "gradients", "optimizer states", "saved activations", "collectives", "temporaries"):
        assert f"\n  {kind}" in done.stdout
    assert "peak at optimizer" in done.stdout
    assert "saved for the backward pass" in done.stdout
    assert "4 parameters + 4 gradients + 8 optimizer states" in done.stdout and "16*P" in done.stdout
    assert "activations kept for the backward pass, at b = 12:" in done.stdout
    saved = here("compile", f"{jobs}:job", "--mesh", "pp=2", "--microbatches", "3", "--out", tmp_path / "programs")
    assert saved.returncode == 0, saved.stderr
    done = here("inspect", tmp_path / "programs", "--memory")
    assert done.returncode == 0, done.stderr
    assert "rank  stages" in done.stdout and "on cuda, AdamW" in done.stdout
    refused = here("inspect", tmp_path / "programs", "--formula")
    assert refused.returncode == 1 and "--formula compiles the model at other sizes" in refused.stderr


def test_inspect_shows_passes(jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = f"{jobs}:job"
    monkeypatch.setenv("AUTOPAR_DUMP", str(tmp_path))
    after = here("inspect", target, "--mesh", "tp=2", "--pass", "propagate")
    assert "SHARDED" in after.stdout and "all_reduce" not in after.stdout
    (dumped,) = tmp_path.glob("*-propagate.txt")
    assert after.stdout.strip() == dumped.read_text().strip()
    diff = here("inspect", target, "--mesh", "tp=2", "--diff", "reshard")
    assert "+ %all_reduce" in diff.stdout and "- SHARDED" in diff.stdout


FAILS = 1 + JOBS.splitlines().index('    return {}["nothing"]')  # its line

BAD = {
    "mesh": (("verify", "job", "--mesh", "dp=2,tp"), "mesh 'dp=2,tp': cannot read 'tp'. Write axis=size pairs"),
    "function": (("verify", "jobb", "--mesh", "dp=2"), "has no function 'jobb'. Did you mean job or no_job?"),
    "no job": (("verify", "no_job", "--mesh", "dp=2"), "returned int, but must return an autopar.Job."),
    "fails": (("verify", "fails", "--mesh", "dp=2"), f"jobs.py:{FAILS}: KeyError: 'nothing'"),
    "batch": (("verify", "job", "--mesh", "dp=5"), "the batch has 12 samples"),
    "rank": (("inspect", "job", "--mesh", "dp=2", "--rank", "2"), "--rank 2: mesh 'dp=2' has ranks 0 to 1."),
    "graph": (("inspect", "job", "--mesh", "dp=2", "--graph", "x"), "--graph x: rank 0 has step."),
    "pass": (("inspect", "job", "--mesh", "dp=2", "--pass", "x"), "there is no program after pass 'x'"),
    "no mesh": (("inspect", "job"), "a TARGET needs --mesh"),
    "compiler": (
        ("run", "job", "--mesh", "dp=2", "--compile", "gcc"),
        "compile='gcc': write auto, executor, inductor or triton.",
    ),
    "virtual compiler": (
        ("verify", "job", "--mesh", "dp=2", "--compile", "inductor"),
        "--backend gloo --compile inductor",
    ),
    "virtual graphs": (("verify", "job", "--mesh", "dp=2", "--cuda-graphs"), "add --backend gloo."),
    "backend": (("verify", "job", "--mesh", "dp=2", "--backend", "mpi"), "--backend mpi: write virtual or gloo."),
}


def fail(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one message of a command that fails, run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["autopar", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
    assert left.value.code == 1
    message = capsys.readouterr().err
    assert message.startswith("autopar: ") and "Traceback" not in message
    return message


@pytest.mark.parametrize("case", BAD)
def test_a_users_error_is_one_message(case: str, jobs: Path, capsys: pytest.CaptureFixture[str]):
    (command, function, *rest), message = BAD[case]
    assert message in fail(capsys, command, f"{jobs}:{function}", *rest)


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    message = fail(capsys, "verify", f"{tmp_path}/none.py:job", "--mesh", "dp=2")
    assert f"there is no file '{tmp_path}/none.py'." in message


def test_a_foreign_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "index.json").write_text("{}")
    assert str(tmp_path) in fail(capsys, "inspect", tmp_path)
