"""A command line is read before torch is imported: help, versions and slips of the pen are answered at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT

from benchmarks.yardstick import yardstick

JOB = "examples/train_gpt.py:job"
# What is said for each command line, with the code that it ends with.
ANSWERS = {
    "": (2, "Usage: "),
    "--help": (0, "Find the fastest plan that fits"),
    "-h": (0, "Find the fastest plan that fits"),
    "--version": (0, "autopar 0.1.0, torch 2."),
    "run --help": (0, "--no-reshard-after-forward"),
    "run -h": (0, "split optimizer states (1), and gradients (2)"),
    "compile --help": (0, "a new or empty folder"),
    "inspect --help": (0, "only this one of the rank's graphs"),
    "explain --help": (0, "a module path, or a node such as"),
    "verify --help": (0, "Exit code 1 on a mismatch"),
    "estimate --help": (0, "h100-80g"),
    "plan --help": (0, "order=pp,dp,tp"),
    "machine --help": (0, "measure this one"),
    "machine show --help": (0, "all names, if left out"),
    "machine measure -h": (0, "processes; one a GPU"),
    "machine show": (0, "h100-80g"),
    "machine show cpu": (0, "bytes a second"),
    "verfy": (2, "No such command 'verfy'. Did you mean 'verify'?"),
    "machine shwo": (2, "No such command 'shwo'. Did you mean 'show'?"),
    f"run {JOB} --msh dp=2": (2, "--mesh"),
    f"verify {JOB} --mesh dp=2 --zreo 3": (2, "--zero"),
    "run": (2, "Missing argument 'TARGET'."),
    "run --mesh dp=2": (2, "Missing argument 'TARGET'."),
    f"run {JOB}": (1, "autopar: write --mesh, e.g. --mesh dp=2,tp=2, or --plan FILE.toml that"),
    f"plan {JOB}": (2, "Missing option '--gpus'."),
    f"run {JOB} --mesh": (2, "Option '--mesh' requires an argument."),
    f"run {JOB} --mesh dp=2 --steps many": (2, "Invalid value for '--steps': "),
    f"run {JOB} --mesh dp=2 --steps 0": (1, "autopar: --steps 0: write a number of 1 or more."),
    f"run {JOB} --mesh dp=2 --every 3": (1, "autopar: --every 3: it needs --checkpoint DIR"),
    f"run {JOB} --mesh dp=2 --machine tpu": (1, "autopar: machine 'tpu': there is a100-80g"),
    f"run {JOB} --mesh dp=2 --seed 99999999999999999999": (1, "autopar: --seed 99999999999999999999: write"),
    f"run {JOB} --mesh dp=2 --zero 7": (1, "autopar: zero=7: write 0, 1 "),
    f"verify {JOB} --mesh dp=2 --recompute everything": (1, "autopar: recompute='everything': write none,"),
    f"verify {JOB} --mesh dp=2 --backend mpi": (1, "autopar: --backend mpi: write virtual or gloo."),
    f"estimate {JOB} --mesh dp=2 --imbalance 0.5": (2, "Invalid value for '--imbalance': "),
    "verify none.py:job --mesh dp=2": (1, "autopar: TARGET 'none.py:job': there is no file '"),
    "verify job --mesh dp=2": (1, "autopar: TARGET 'job': write file.py:function or package.module:function."),
    f"explain {JOB} --mesh dp=2": (1, "autopar: explain: write a VALUE, or --instead"),
    f"inspect {JOB}": (1, f"autopar: inspect '{JOB}': a TARGET needs --mesh"),
    f"run {JOB} --mesh dp=0": (1, "autopar: mesh 'dp=0': axis 'dp' has size 0"),
    f"estimate {JOB} --mesh dp=2 --machine tpu": (1, "autopar: machine 'tpu': there is a100-80g"),
    "plan --gpus 8": (
        1,
        "autopar: write a TARGET, file.py:function or package.module:function, or --hf CONFIG.json in ",
    ),
    f"plan {JOB} --gpus 8 --hf x.json": (
        1,
        f"package.module:function, or --hf CONFIG.json in its place; there are both, '{JOB}'",
    ),
    "plan --gpus 8 --hf none.json": (1, "autopar: --hf none.json: it has no batch of its own: write --batch N, the "),
    "plan --gpus 8 --hf none.json --batch 8": (1, "autopar: --hf none.json: there is no such file. Name the "),
    f"plan {JOB} --gpus 8 --sequence 9": (
        1,
        "autopar: --sequence 9: it is of --hf; a TARGET's batch has its own length.",
    ),
    f"plan {JOB} --gpus many": (1, "autopar: --gpus many: write a number of 1 or more, or several with commas"),
    f"plan {JOB} --gpus 8 --tokens 1.2.3T": (1, "autopar: --tokens 1.2.3T: write a number above 0, such as 15T"),
    f"plan {JOB} --gpus 8 --memory 1.2.3GiB": (1, "autopar: --memory 1.2.3GiB: write a number of bytes, or one"),
    f"plan {JOB} --gpus 8 --memory .GiB": (1, "autopar: --memory .GiB: write a number of bytes, or one"),
    f"plan {JOB} --gpus 8 --out none/plan.toml": (1, "autopar: --out none/plan.toml: there is no folder 'none'"),
    f"plan {JOB} --gpus 8,16 --html page.html": (1, "autopar: --html page.html: it is of one number of devices"),
    "machine show tpu": (1, "autopar: machine 'tpu': there is a100-80g, cpu, h100-80g"),
    "machine measure --out mine.toml --seconds 2": (1, "autopar: --seconds 2: write 10 to 3600."),
}
# In one process: were torch imported for one line, it would be there for all that come after.
ASK = """
import contextlib, io, json, sys, time
from autopar.cli.commands import main

answers = {}
for line in json.loads(sys.argv[1]):
    sys.argv, said, began = ["autopar", *line.split()], io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            main()
            code = 0
        except SystemExit as left:
            code = left.code or 0
    heavy = sorted({"torch", "numpy", "sympy", "networkx"} & set(sys.modules))
    answers[line] = code, " ".join(said.getvalue().replace("│", " ").split()), heavy, time.process_time() - began
print(json.dumps({"answers": answers, "all_s": time.process_time()}))
"""


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    environment = {**os.environ, "COLUMNS": "250", "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(list(ANSWERS))], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("line", ANSWERS)
def test_a_command_line_is_answered_without_torch(line: str, asked: dict[str, Any]) -> None:
    code, said, heavy, _ = asked["answers"][line]
    assert (code, heavy) == (ANSWERS[line][0], []) and ANSWERS[line][1] in said, said


def test_a_command_line_is_answered_at_once(asked: dict[str, Any]) -> None:
    """CPU seconds, which other processes do not change much: 0.15 to start and 0.02 a line, where torch takes 3."""
    slow = {line: seconds for line, (*_, seconds) in asked["answers"].items() if seconds > 0.5}
    assert slow == {} and asked["all_s"] < 0.3 + 0.1 * len(ANSWERS)


def test_help_costs_a_start_of_python_and_little_more() -> None:
    """Less than 0.3 CPU seconds of the reference day, in a process of its own; rich and pydantic are not for help."""
    code = """
import sys, time
sys.argv = ["autopar", "--help"]
from autopar.cli.commands import main
try:
    main()
except SystemExit:
    print(time.process_time(), {"rich", "pydantic", "torch"} & set(sys.modules), file=sys.stderr)
"""
    told = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        ).stderr.split()
        for _ in range(3)
    ]
    assert {rest for _, rest in told} == {"set()"} and min(float(seconds) for seconds, _ in told) < 0.3 * yardstick()


@pytest.mark.parametrize(("words", "found"), [("autopar ve", {"verify"}), ("autopar verify x --zer", {"--zero"})])
def test_a_shell_completes_commands_and_options(words: str, found: set[str]) -> None:
    asked = {"_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    code = "import sys; from autopar.cli.commands import main; sys.argv = ['autopar']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **asked}, capture_output=True, text=True, timeout=60
    )
    assert set(done.stdout.split()) == found, done.stderr
