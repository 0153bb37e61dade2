"""Train a pipeline by a schedule of your own: a table of who does what, in which order.

    torchrun --nproc-per-node 2 examples/own_schedule.py
    autopar inspect examples/own_schedule.py:job --mesh pp=2 --timeline          # the picture alone, without ranks

A row of `TABLE` is a rank, an entry an action: `1F3` is micro-batch 3 forward on stage 1, `1B3` the same backward.
What is sent follows from the table, and it is proven to run to its end before anything runs: swap two entries, and read
what is said. At the end stand its timeline, other schedules beside it, and the same losses on one device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import train_gpt
from gpt import GPT, GPTConfig
from show import beside, curve, one_device
from verse import batches

import autopar

MICROBATCHES = 4
# Two waves of two micro-batches: never more than two are kept, which costs some waiting between the waves.
TABLE = """
0F0, 0F1,    ,    , 0B0, 0B1, 0F2, 0F3,    ,    , 0B2, 0B3
   , 1F0, 1F1, 1B0, 1B1,    ,    , 1F2, 1F3, 1B2, 1B3,
"""
CONFIG = GPTConfig(vocabulary=128, context=48, layers=4, heads=4, width=64)


def own(stages: int, chunks: int, microbatches: int, costs: object) -> list[list[str]]:
    """The actions of each rank, in order. One that is made for any number of stages would use the arguments."""
    return [[entry.strip() for entry in row.split(",") if entry.strip()] for row in TABLE.strip().splitlines()]


def job() -> autopar.Job:
    torch.manual_seed(0)
    data = batches(16, CONFIG.context)
    return autopar.Job(
        model=GPT(CONFIG), loss_fn=train_gpt.loss_fn, batch=data(0), data=data, schedule=own, microbatches=MICROBATCHES,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )  # fmt: skip


def compared(task: autopar.Job) -> str:
    """What known schedules make of the same step: the share of the time in which ranks wait, and memory."""
    lines = ["schedule      idle  MiB at most on rank 0"]
    for name, schedule in (("own", own), ("gpipe", "gpipe"), ("1f1b", "1f1b"), ("zb-h1", "zb-h1")):
        compiled = autopar.compile(
            task.model, "pp=2", loss_fn=task.loss_fn, batch=task.batch, schedule=schedule, microbatches=MICROBATCHES
        )
        idle = compiled.timeline().splitlines()[1].partition("idle ")[2]
        lines.append(f"{name:12}{idle:>6}{compiled.memory().peak / 2**20:21.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args(arguments)
    task = job()
    model = autopar.parallelize(task.model, "pp=2", loss_fn=task.loss_fn, schedule=own, microbatches=MICROBATCHES)
    optimizer = task.make_optimizer(model.parameters())
    losses = []
    for step in range(args.steps):
        losses.append(model.forward_backward(*task.batch_of(step)).item())
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        plain = job()
        print(model.compiled.timeline())
        print(compared(plain))
        own_optimizer = plain.make_optimizer(plain.model.parameters())
        alone = one_device(plain.model, plain.loss_fn, own_optimizer, plain.batch_of, args.steps)
        print(curve(losses, "loss"))
        print(beside(losses, alone))
    return losses


if __name__ == "__main__":
    main()
