"""What is wrong with a command line is said at its start, in a sentence; what has no effect is said too."""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from autopar.cli import commands as cli
from autopar.cli.preflight import check_room
from autopar.errors import TargetError

JOB = """
import torch, autopar

def loss_fn(model, x, y):
    return (model(x) - y).square().mean()

def job():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    return autopar.Job(model, loss_fn, (torch.randn(8, 8), torch.randn(8, 8)))
"""

# JOB: the TARGET; FILE: a file where a folder is meant; NEW: a folder that a test makes; NONE: one that nobody makes.
# Then what is said.
WRONG = {
    "run JOB --mesh dp=1 --steps -5": "--steps -5: write a number of 1 or more.",
    "run JOB --mesh dp=1 --timeout 0": "timeout=0.0: write the seconds that a rank waits for the others, 1 to",
    "run JOB --mesh dp=2 --steps 0": "--steps 0: write a number of 1 or more.",
    "run JOB --mesh dp=2 --losses FILE/log.jsonl": "--losses FILE/log.jsonl: cannot write it: ",
    "run JOB --mesh dp=2 --losses NEW/..": "--losses NEW/..: cannot write it: Is a directory.",
    "run JOB --mesh dp=2 --trace FILE": "--trace FILE: cannot write there: File exists.",
    "run JOB --mesh dp=2 --seed 99999999999999999999": "--seed 99999999999999999999: write a number from -2**63 to",
    "run JOB --mesh dp=1 --recompute nan": "recompute=nan: write none, selective or full, a number of bytes",
    "run JOB --mesh dp=1 --recompute inf": "recompute=inf: write none, selective or full, a number of bytes",
    "run JOB --mesh dp=1 --schedule bogus": "schedule 'bogus' is unknown. Known are gpipe, 1f1b, ",
    "run JOB --mesh dp=1 --schedule none.csv": "schedule 'none.csv': there is no such file.",
    "run JOB --mesh dp=1 --precision int8": "precision='int8': write bf16, fp16 or fp32",
    "run JOB --mesh dp=1 --microbatches 3": "microbatches=3 does not divide the 8 samples",
    "run JOB --mesh dp=1 --zero -1": "zero=-1: write 0, 1 ",
    "run JOB --mesh dp=2000000": "2000000 ranks are 2000000 processes of 315 MB at least, and this machine has ",
    "run JOB --mesh dp=0": "mesh 'dp=0': axis 'dp' has size 0",
    "verify JOB --mesh dp=2 --steps 0": "--steps 0: write a number of 1 or more.",
    "verify JOB --mesh dp=2 --steps -5 --backend gloo": "--steps -5: write a number of 1 or more.",
    "verify JOB --mesh dp=2 --machine cpu --backend gloo": "--machine cpu: processes of --backend gloo run",
    "verify JOB --mesh dp=2 --machine nix": "machine 'nix': there is a100-80g, cpu",
    "verify JOB --mesh dp=2 --schedule bogus": "schedule 'bogus' is unknown.",
    "verify JOB --mesh dp=2 --backend mpi": "--backend mpi: write virtual or gloo.",
    "inspect JOB --mesh dp=2 --pass zero --diff zero": "--pass and --diff: write one of them.",
    "inspect JOB --mesh dp=2 --device cuda": "--device cuda: it is of --memory and --formula; add one of them.",
    "inspect JOB --mesh dp=2 --rank -1": "--rank -1: mesh 'dp=2' has ranks 0 to 1.",
    "inspect SAVED --mesh dp=4": "'SAVED' is compiled already: it takes no --mesh, --machine or options of a step.",
    "inspect SAVED --machine cpu": "'SAVED' is compiled already: it takes no --mesh, --machine or options of a step.",
    "inspect SAVED --zero 1": "'SAVED' is compiled already: it takes no --mesh, --machine or options of a step.",
    "explain JOB bogus.weight --mesh dp=2": "the program has no parameter, module or node 'bogus.weight'. Nearest",
    "explain JOB % --mesh dp=2": "the program has no parameter, module or node ''. Nearest names: 0.weight, ",
    "machine show NEW.toml": "machine file 'NEW.toml': No such file or directory.",
    "machine show tpu": "machine 'tpu': there is a100-80g, cpu, h100-80g",
    "machine measure --out FILE": "machine file 'FILE': write a name that ends in .toml",
    "machine measure --out NONE/mine.toml": "machine file 'NONE/mine.toml': there is no folder 'NONE'; make it first.",
    "machine measure --out FILE.toml --seconds 2": "--seconds 2: write 10 to 3600.",
    "machine measure --out FILE.toml --ranks 0": "--ranks 0: write a number of 1 or more.",
    "machine measure --out FILE.toml --device tpu": "--device tpu: write cpu or cuda.",
    "compile JOB --mesh dp=2 --out FILE": "cannot save to 'FILE': it is not a directory.",
}  # fmt: skip
IDLE = {
    "verify JOB --mesh dp=2 --steps 1 --chunks 3": "--chunks has no effect: mesh 'dp=2' has no axis 'pp' of more than",
    "inspect JOB --mesh tp=2 --schedule gpipe": "--schedule has no effect: mesh 'tp=2' has no axis 'pp' of more than",
    "inspect JOB --mesh tp=2 --stages 0;2": "--stages has no effect: mesh 'tp=2' has no axis 'pp' of more than one",
    "inspect JOB --mesh tp=2 --stage-memory 9": "--stage-memory has no effect: mesh 'tp=2' has no axis 'pp' of more",
    "inspect JOB --mesh dp=1,tp=2 --zero 1": "--zero has no effect: mesh 'dp=1,tp=2' has no axis 'dp', 'fsdp' or 'cp'",
    "inspect JOB --mesh tp=2 --bucket-bytes 9": "--bucket-bytes has no effect: mesh 'tp=2' has no axis 'dp', 'fsdp'",
    "run JOB --mesh dp=1 --steps 1 --no-reshard-after-forward": "--no-reshard-after-forward has no effect: parameters",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "job.py").write_text(JOB)
    (folder / "file").write_text("")
    found = {
        "JOB": f"{folder}/job.py:job",
        "FILE": f"{folder}/file",
        "NEW": f"{folder}/new",
        "NONE": f"{folder}/none",
        "SAVED": f"{folder}/saved",
    }
    code, said, _ = call(f"compile {found['JOB']} --mesh dp=2 --out {found['SAVED']}")
    assert code == 0, said
    return found


def call(line: str) -> tuple[object, str, str]:
    """Exit code, what is said on stdout, and on stderr."""
    shown, wrong = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown), redirect_stderr(wrong):
        patch.setattr("sys.argv", ["autopar", *shlex.split(line.replace(";", r"\;"))])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code or 0, shown.getvalue(), wrong.getvalue()


def filled(text: str, places: dict[str, str]) -> str:
    for word, value in places.items():
        text = text.replace(word, value)
    return text


@pytest.mark.parametrize("line", WRONG)
def test_what_is_wrong_is_said_in_a_sentence(line: str, places: dict[str, str]) -> None:
    code, shown, said = call(filled(line, places))
    assert code == 1 and said.startswith(f"autopar: {filled(WRONG[line], places)}"), said
    assert said.count("\n") == 1 and "compiled" not in shown, "it is said before the work begins"


@pytest.mark.parametrize("line", IDLE)
def test_what_has_no_effect_is_said(line: str, places: dict[str, str]) -> None:
    code, shown, said = call(filled(line, places))
    assert code == 0 and f"note: {IDLE[line]}" in shown, (shown, said)


def test_tensorboard_that_is_not_there(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.cli.preflight.find_spec", lambda name: None)
    code, _, said = call(f"run {places['JOB']} --mesh dp=1 --tensorboard runs")
    assert code == 1 and said.strip() == (
        "autopar: --tensorboard runs: the package is not installed here: pip install tensorboard. --losses FILE needs "
        "nothing."
    )


def test_the_figures_for_tensorboard(places: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="--tensorboard needs it: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert call(f"run {places['JOB']} --mesh dp=1 --steps 2 --tensorboard {tmp_path}")[0] == 0
    written = EventAccumulator(str(tmp_path))
    written.Reload()
    assert written.Tags()["scalars"] == ["loss", "ms/step", "samples/s", "MFU", "memory"]
    assert [each.step for each in written.Scalars("loss")] == [0, 1]


def test_the_folder_of_a_log_is_made(places: dict[str, str]) -> None:
    log = Path(places["NEW"]) / "deep" / "log.jsonl"
    assert call(f"run {places['JOB']} --mesh dp=1 --steps 2 --losses {log}")[0] == 0
    assert len(log.read_text().splitlines()) == 2


def test_a_dump_that_cannot_be_written(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DUMP", places["FILE"])
    code, _, said = call(f"verify {places['JOB']} --mesh dp=2")
    assert code == 1 and said == f"autopar: AUTOPAR_DUMP {places['FILE']}: cannot write there: File exists.\n"


def test_a_rank_that_is_no_number(places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    code, _, said = call(f"run {places['JOB']} --mesh dp=1")
    assert code == 1 and said == "autopar: RANK=first: it must be a number, as torchrun sets it.\n"


def test_ranks_that_have_room_are_started() -> None:
    check_room(4, 1 << 31)
    with pytest.raises(TargetError, match=r"this machine has 1\.05 MB of free memory: at most 1 would start here"):
        check_room(2, 1 << 20)
