"""The scripts for Slurm of docs/cluster.md, as they stand there, on a stand-in of two of its commands."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.gloo

# `srun` starts as many tasks as the job has, each with its number; `scontrol show hostnames` writes a host a line.
SRUN = """#!/bin/bash
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
done
status=0
for ((task = 0; task < SLURM_NTASKS; task++)); do wait -n || status=$?; done
exit $status
"""
SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && tr ',' '\\n' <<< "$3"
"""
JOB = """
import torch, autopar
from torch import nn

def batch(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))

def job():
    torch.manual_seed(0)
    return autopar.Job(nn.Linear(6, 2), lambda model, x: model(x).square().mean(), batch(0), data=batch)
"""


def _scripts() -> list[str]:
    page = (ROOT / "docs" / "cluster.md").read_text()
    section = page[page.index("## Slurm") : page.index("## Kubernetes")]
    return re.findall(r"^```bash\n(.*?)^```", section, re.M | re.S)


def _free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@pytest.mark.parametrize("which", [0, 1], ids=["torchrun a machine", "a task a rank"])
def test_a_script_of_the_page_trains_two_ranks(tmp_path: Path, which: int):
    script = _scripts()[which].replace("29400", _free_port()).replace("/shared/", f"{tmp_path}/")
    losses, tasks = tmp_path / "losses.jsonl", (1, 2)[which]
    for written, here in (
        ("dp=4,tp=8", "dp=2"), ("--nproc-per-node 8", "--nproc-per-node 2"),
        ("train.py:job", f"{tmp_path}/train.py:job --steps 2 --losses {losses}"),
    ):  # fmt: skip
        assert which == 1 or written in script, f"docs/cluster.md has no {written!r}"
        script = script.replace(written, here)
    (tmp_path / "train.py").write_text(JOB)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("job.sh", script)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    slurm = {
        "JOB_NODELIST": "127.0.0.1",
        "JOB_ID": "7",
        "NNODES": "1",
        "NTASKS": str(tasks),
        "NTASKS_PER_NODE": str(tasks),
    }
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **{f"SLURM_{k}": v for k, v in slurm.items()}}
    done = subprocess.run(
        ["bash", str(commands / "job.sh")], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in losses.read_text().splitlines()]
    assert [line["step"] for line in found] == [0, 1], found
    assert (tmp_path / "gpt").is_dir(), "a checkpoint"
