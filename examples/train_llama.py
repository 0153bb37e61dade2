"""Pretrain a small Llama on Milton's Paradise Lost, stop, and go on over another mesh from the checkpoint.

    torchrun --nproc-per-node 4 examples/train_llama.py --mesh dp=2,tp=2 --steps 60
    torchrun --nproc-per-node 2 examples/train_llama.py --mesh tp=2 --steps 120

The second command goes on where the first one ended (or was killed). It draws the whole curve, and trains the same 120
steps on one device, without a stop: the losses are the same. More `--steps` go on; another `--folder` begins anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from llama import Llama, LlamaConfig, loss_fn
from show import beside, curve, one_device
from torch import nn
from verse import batches

import autopar


def make() -> Llama:
    torch.manual_seed(0)
    return Llama(LlamaConfig())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train up to `--steps`; the losses from the first step on, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=120, help="of all runs together")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--folder", type=Path, default=Path("runs/llama"))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="letters of a row")
    args = parser.parse_args(arguments)
    batch = batches(args.rows, args.length)

    model = autopar.parallelize(make(), args.mesh, loss_fn=loss_fn, zero=1 if "dp" in args.mesh else None)
    optimizer = make_optimizer(model)
    checkpointer = autopar.Checkpointer(args.folder, every=args.every)
    steps = checkpointer.steps(args.steps, model, optimizer)  # loads the newest checkpoint, if there is one
    log, is_first = args.folder / "losses.txt", dist.get_rank() == 0
    # a killed run may have logged steps behind its checkpoint: they are done, and written, again
    losses = [float(line) for line in log.read_text().split()][: checkpointer.done] if log.exists() else []
    args.folder.mkdir(parents=True, exist_ok=True)
    if is_first:
        print(f"{checkpointer.done} steps are done, {args.steps - checkpointer.done} to do on {args.mesh}", flush=True)
    for step in steps:
        losses.append(model.forward_backward(*batch(step)).item())
        optimizer.step()
        optimizer.zero_grad()
        if is_first:
            log.write_text("\n".join(map(repr, losses)))
            if step % 10 == 9:
                print(f"step {step + 1:4}  loss {losses[-1]:.3f}", flush=True)
    if is_first:
        plain = make()
        print(curve(losses, "loss"))
        print(beside(losses, one_device(plain, loss_fn, make_optimizer(plain), batch, len(losses))))
    return losses


if __name__ == "__main__":
    main()
