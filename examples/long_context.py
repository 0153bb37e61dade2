"""Train a small Llama on 65,536 letters at a time, on four local processes that split the sequence.

    python examples/long_context.py

The model, the loss and the data are those of one device. `cp=4` gives each rank two of eight pieces of the sequence,
the first and the last, the second and the last but one, and so on, so that causal attention is as much work for each;
keys and values go round the ranks. `--zero 1` splits the optimizer's states over them too. At the end stand the
timeline of a step, and the first loss as one device has it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from llama import Llama, LlamaConfig, loss_fn
from verse import batches

import autopar

LENGTH, SHORT, MESH, ZERO = 65_536, 16_384, "cp=4", 1
CONFIG = LlamaConfig(layers=2, heads=1, key_heads=1, head=32)


def job() -> autopar.Job:
    torch.manual_seed(0)
    data = batches(1, LENGTH)
    return autopar.Job(
        model=Llama(CONFIG),
        loss_fn=loss_fn,
        batch=data(0),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        data=data,
    )


def kept(mesh: str, length: int, zero: int | None = None) -> int:
    """Bytes that a rank holds at its fullest; nothing runs."""
    with torch.device("meta"):
        model, batch = Llama(CONFIG), torch.empty(1, length, dtype=torch.int64)
    return autopar.compile(model, mesh, loss_fn=loss_fn, batch=(batch, batch), zero=zero).memory().peak


def table() -> str:
    """What a rank holds: of a quarter of the sequence, of all of it, and of all of it on four."""
    cases = (("dp=1", SHORT, None), ("dp=1", LENGTH, None), (MESH, LENGTH, ZERO))
    lines = (f"{length:6} letters on {mesh}: {kept(mesh, length, zero) / 2**20:6.1f}" for mesh, length, zero in cases)
    return "\n".join(["MiB at most on a rank", *lines])


def run(*arguments: str) -> None:
    """The command line of autopar."""
    print(f"$ python -m autopar {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "autopar", *arguments]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)


def first_loss() -> float:
    """That of one device."""
    task = job()
    with torch.no_grad():
        return loss_fn(task.model, *task.batch).item()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args(arguments)
    print(table())
    options = ["examples/long_context.py:job", "--mesh", MESH, "--zero", str(ZERO)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "losses.jsonl"
        run("run", *options, "--steps", str(args.steps), "--trace", folder, "--losses", str(log))
        run("inspect", *options, "--timeline", "--over", folder)
        loss = json.loads(log.read_text().splitlines()[0])["loss"]
    alone = first_loss()
    print(f"the first loss: {loss:.6f}, on one device {alone:.6f}, relative difference {abs(loss - alone) / alone:.0e}")


if __name__ == "__main__":
    main()
