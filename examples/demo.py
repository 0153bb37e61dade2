"""`make demo`: train on four processes, then the same steps in plain PyTorch on one device, and compare.

The first half is nothing but `autopar run` on the command line; the second half does not use autopar's compiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from train_gpt import job

TARGET = "examples/train_gpt.py:job"
CLOSE = 1e-4  # float32 rounding, grown over a few hundred AdamW steps: 5e-6 was seen


def parallel(mesh: str, steps: int, seed: int) -> list[float]:
    """The losses of `autopar run`, which shows its own progress and the sampled text."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "losses.jsonl"
        command = ["run", TARGET, "--mesh", mesh, "--steps", str(steps), "--seed", str(seed), "--losses", str(log)]
        print(f"$ autopar {' '.join(command[:-2])}", flush=True)
        root = Path(__file__).resolve().parent.parent
        subprocess.run([sys.executable, "-m", "autopar", *command], cwd=root, check=True)
        return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def plain(steps: int, seed: int, console: Console) -> list[float]:
    """The losses of an ordinary training loop on one device."""
    torch.manual_seed(seed)
    task = job()
    assert task.optimizer and task.loss_fn and task.data
    optimizer = task.optimizer(task.model.parameters())
    losses: list[float] = []
    columns = (TextColumn("one device"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=steps, loss=0.0)
        for step in range(steps):
            loss = task.loss_fn(task.model, *task.data(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(bar, advance=1, loss=losses[-1])
    return losses


def report(mesh: str, ours: list[float], theirs: list[float], console: Console) -> bool:
    """Show both runs side by side; True if they agree and the loss fell."""
    table = Table("step", f"autopar, {mesh}", "plain PyTorch, one device", "difference", title="Loss")
    marks = sorted({0, 1, *(len(ours) * i // 5 - 1 for i in range(1, 6))})
    for i in marks:
        table.add_row(str(i + 1), f"{ours[i]:.6f}", f"{theirs[i]:.6f}", f"{abs(ours[i] - theirs[i]):.1e}")
    console.print(table)
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    same, fell = worst < CLOSE, ours[-1] < 0.75 * ours[0]
    console.print(
        f"Largest relative difference over {len(ours)} steps: {worst:.1e}, "
        + ("which is float32 rounding." if same else f"[bold red]more than rounding ({CLOSE:.0e}): a bug.[/]")
    )
    if not fell:
        console.print(f"[bold red]The loss did not fall: {ours[0]:.3f} to {ours[-1]:.3f}.[/]")
    return same and fell


NEXT = f"""
Where to look next:
  the model, which knows nothing of autopar    examples/gpt.py
  what was run, as readable Python             .venv/bin/autopar compile {TARGET} --mesh dp=2,tp=2 --out build/gpt
  what is moved between ranks, and why         .venv/bin/autopar inspect {TARGET} --mesh dp=2,tp=2
  every gradient against one device            .venv/bin/autopar verify {TARGET} --mesh dp=2,tp=2
  how it works                                 ARCHITECTURE.md, docs/layouts.md, docs/cli.md
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console()
    start = time.monotonic()
    try:
        ours = parallel(args.mesh, args.steps, args.seed)
    except subprocess.CalledProcessError as error:
        return error.returncode
    console.print("\nThe same steps from the same seed, by an ordinary loop on one device:")
    theirs = plain(args.steps, args.seed, console)
    good = report(args.mesh, ours, theirs, console)
    console.print(f"All in {time.monotonic() - start:.0f} s.\n{NEXT}", highlight=False)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
