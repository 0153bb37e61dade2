"""What chunked_loss saves in a process: `python -m benchmarks.logits [--words 32000 --rows 4096]`.

A small Llama with a large vocabulary takes two steps on one rank, in a process of its own for each way; printed are the
growth of its resident memory at the peak over what it held before, and the time of the second step. The logits, their
gradient and a float32 copy are 3 x rows x words x 4 bytes where nothing is chunked.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time

import torch

from benchmarks.records import Figure, Records, record_option

WAYS = ("whole", "chunked")
WIDTH, LAYERS = 256, 2


def step(words: int, rows: int, way: str) -> tuple[float, float]:
    """(Growth of the peak in MiB, s of the second step)."""
    import torch.distributed as dist

    import autopar
    from autopar.ir.ops.measure import human
    from benchmarks.published.models import Llama, token_loss

    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.manual_seed(0)
    model = Llama(LAYERS, WIDTH, 4, 2 * WIDTH, words, rows, False)
    model.cos.fill_(1.0), model.sin.fill_(0.0)
    parallel = autopar.parallelize(model, "dp=1", loss_fn=token_loss, chunked_loss=way == "chunked")
    ids = torch.randint(0, words, (1, rows))
    before, spent = _peak(), 0.0
    for _ in range(2):
        begun = time.perf_counter()
        loss = parallel.forward_backward(ids, ids)
        spent = time.perf_counter() - begun
    print(f"loss {loss.item():.6f}, logits {human(rows * words * 4)}", file=sys.stderr)
    return _peak() - before, spent


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    record_option(parser)
    args = parser.parse_args()
    records = Records("logits", args.record)
    if args.way:
        print(*step(args.words, args.rows, args.way))
        return 0
    sizes = ("--words", str(args.words), "--rows", str(args.rows))
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.logits", *sizes, "--way", way]
        grown, spent = map(float, subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split())
        print(f"{way:<8} peak +{grown:,.0f} MiB, step {spent:.2f} s")
        case = f"{args.words:,} words, {args.rows:,} rows, {way}"
        records.add(Figure(case, "growth of memory", "MiB", grown), Figure(case, "step", "s", spent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
