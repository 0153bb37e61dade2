"""Kill ranks of a run again and again, at random moments and inside of saves: nothing is lost but an interval.

    python -m benchmarks.kill --points 50 --mesh dp=2 --mesh pp=2 --mesh tp=2,dp=2
    python -m benchmarks.kill --points 4 --mesh dp=2 --seed 7

One run a mesh, of `autopar run --checkpoint DIR --every 3 --max-restarts N`: as soon as it has saved anew, a random
rank gets SIGKILL, every other time while a save is under way (its folder is there, not committed). After each restart
it is compared where the run resumed: no checkpoint that was committed is lost, and no more than an interval of steps.
At the end the run is told to leave (SIGTERM): all its losses must be those of a run that nobody stopped, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from autopar.checkpoint import folder
from benchmarks.records import Figure, Records, record_option

EVERY = 3
PATIENCE_S = 240  # for one restart, on a machine with other work
JOB = """
import time
import torch
import autopar
from torch import nn
from torch.nn import functional as F

def loss_fn(model, x, y):
    return F.mse_loss(model(x), y)

def job():
    width = 512
    layers = [nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(64, width), *layers, nn.LayerNorm(width), nn.Linear(width, 8))
    def data(step):
        time.sleep(0.01)
        return torch.randn(16, 64), torch.randn(16, 8)
    batch = torch.randn(16, 64), torch.randn(16, 8)
    options = {"microbatches": 2} if "pp" in MESH else {}
    return autopar.Job(model, loss_fn, batch, data=data, **options)
"""


@dataclass(slots=True)
class Run:
    """A run of the command, and what it said so far."""

    path: Path
    mesh: str
    restarts: int
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True)
        (self.path / "job.py").write_text(f"MESH = {self.mesh!r}\n{JOB}")

    def start(self, steps: int, *more: str) -> None:
        command = [
            sys.executable, "-m", "autopar", "run", f"{self.path / 'job.py'}:job", "--mesh", self.mesh,
            "--steps", str(steps), "--losses", str(self.path / "log"), *more,
        ]  # fmt: skip
        out = (self.path / "said").open("w")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=environment)

    @property
    def checkpoints(self) -> Path:
        return self.path / "run"

    def begin(self) -> None:
        """Train and save for ever."""
        self.start(
            10**7, "--checkpoint", str(self.checkpoints), "--every", str(EVERY), "--resume", "auto",
            "--max-restarts", str(self.restarts),
        )  # fmt: skip

    def newest(self) -> int:
        return max(folder.committed(self.checkpoints), default=0)

    def is_saving(self) -> bool:
        return any(each.name.startswith(folder.PARTIAL) for each in self.checkpoints.iterdir())

    def ranks(self) -> dict[int, int]:
        """The processes of the ranks."""
        found = {}
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            try:
                environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            rank = [int(each[5:]) for each in environment if each.startswith(b"RANK=")]
            if rank and state not in "ZX":
                found[rank[0]] = int(child)
        return found

    def losses(self) -> list[str]:
        """All losses, to the bit; a line that is being written does not count."""
        lines = (self.path / "log").read_text().splitlines()
        losses = []
        for at, line in enumerate(lines):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            assert row["step"] == at, f"step {row['step']} in line {at}"
            losses.append(row["loss"].hex())
        return losses

    def resumed(self) -> list[int]:
        """The steps from which it went on, so far."""
        words = f"of {self.checkpoints}"
        said = (self.path / "said").read_text().splitlines()
        return [int(line.split()[3]) for line in said if line.startswith("resumed from step") and line.endswith(words)]

    def wait(self, done: object, what: str) -> None:
        """Wait until `done()` is true. Raises TimeoutError, or RuntimeError if the run ends."""
        end = time.monotonic() + PATIENCE_S
        while not done():  # type: ignore[operator]
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended with {self.process.returncode} before {what}: {self.said()}")
            if time.monotonic() > end:
                raise TimeoutError(f"no {what} in {PATIENCE_S} s: {self.said()}")
            time.sleep(0.002)

    def said(self) -> str:
        return "\n".join((self.path / "said").read_text().splitlines()[-5:])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Point:
    """A kill. before: the newest checkpoint then; done: the steps that were done; after: where the run went on."""

    rank: int
    in_save: bool
    before: int
    done: int
    after: int
    seconds: float

    @property
    def wrong(self) -> str:
        if self.after < self.before:
            return f"checkpoint {self.before} is lost"
        return f"{self.done - self.after} steps are lost" if self.done - self.after > EVERY else ""


def kill(run: Run, chance: random.Random, in_save: bool) -> Point:
    """Kill a rank once, and wait until the run has gone on."""
    newest, attempts = run.newest(), len(run.resumed())
    run.wait(lambda: run.newest() > newest, "checkpoint")
    if in_save:
        run.wait(run.is_saving, "save")
        time.sleep(chance.uniform(0, 0.03))
    else:
        time.sleep(chance.uniform(0, 0.3))
    rank, process = chance.choice(sorted(run.ranks().items()))
    before, saving = run.newest(), run.is_saving()
    os.kill(process, signal.SIGKILL)
    start, done = time.monotonic(), len(run.losses())
    run.wait(lambda: len(run.resumed()) > attempts, "restart")
    return Point(rank, saving, before, done, run.resumed()[-1], time.monotonic() - start)


def sweep(path: Path, mesh: str, points: int, chance: random.Random) -> tuple[list[Point], str]:
    """The kills of a mesh, and what is wrong with the losses."""
    run = Run(path / "run", mesh, points + 2)
    run.begin()
    try:
        found = []
        for at in range(points):
            found.append(point := kill(run, chance, at % 2 == 0))
            print(
                f"{'WRONG' if point.wrong else 'ok':6}{mesh} rank {point.rank} killed"
                f"{' in a save' if point.in_save else ''} behind step {point.done}, newest {point.before}: went on "
                f"from "
                f"{point.after} after {point.seconds:.1f} s {point.wrong}",
                flush=True,
            )
        newest = run.newest()
        run.wait(lambda: run.newest() > newest, "checkpoint")
    finally:
        run.stop()
    losses = run.losses()
    straight = Run(path / "straight", mesh, 0)
    straight.start(len(losses))
    straight.process.wait(PATIENCE_S * 4)
    wanted = straight.losses()
    if losses != wanted:
        first = next(
            (at for at, pair in enumerate(zip(losses, wanted, strict=False)) if pair[0] != pair[1]), len(wanted)
        )
        return found, f"the losses differ from step {first} on: {straight.said()}"
    print(f"      {mesh}: {len(losses)} losses are equal to the bit", flush=True)
    return found, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=50, help="kills of each mesh")
    parser.add_argument("--mesh", action="append", help="a mesh; may be given several times")
    parser.add_argument("--seed", type=int, default=0)
    record_option(parser)
    asked = parser.parse_args()
    records, bad = Records("kill", asked.record), 0
    for mesh in asked.mesh or ["dp=2", "pp=2", "tp=2,dp=2"]:
        with tempfile.TemporaryDirectory() as path:
            points, wrong = sweep(Path(path), mesh, asked.points, random.Random(f"{asked.seed} {mesh}"))
        print(wrong or "", flush=True)
        lost = sum(bool(point.wrong) for point in points)
        in_saves = sum(point.in_save for point in points)
        print(
            f"{mesh}: {len(points)} kills, {in_saves} of them in a save; {lost} lost more than an interval", flush=True
        )
        bad += lost + bool(wrong)
        records.add(
            Figure(
                f"{mesh}, {len(points)} kills, {in_saves} in a save",
                "lost or unlike",
                "kills",
                lost + bool(wrong),
                goal="<=0",
            ),
        )
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
