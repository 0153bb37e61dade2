"""The table of all cases; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date

import torch

import benchmarks.compare
from benchmarks.compare.measure import Case, measure
from benchmarks.records import Records, record_option

CPU_CASES = (
    Case("gpt", "dp=2", 2, ("DDP",)),
    Case("gpt", "dp=2", 2, ("FSDP2",), zero=3),
    Case("gpt", "dp=2", 2, ("DDP ZeroRedundancyOptimizer",), zero=1),
    Case("gpt", "dp=2", 2, ("DDP checkpoint",), recompute="full"),
    Case("gpt", "dp=2", 2, ("FSDP2 CPUOffloadPolicy",), zero=3, offload="parameters"),
    Case("gpt", "dp=1", 1, ("save_on_cpu",), offload="activations"),
    Case("gpt", "tp=2", 2, ("DTensor", "DTensor loss_parallel")),
    Case("gpt", "dp=1", 1, ("eager",)),
    Case("gpt", "pp=2", 2, ("pipelining 2+2", "pipelining 3+1")),
    Case("gpt", "pp=2,dp=2", 4, ("pipelining 2+2", "pipelining 3+1")),
    Case("llama", "pp=2", 2, ("pipelining 2+2", "pipelining 3+1")),
    Case("llama", "dp=2", 2, ("DDP",)),
    Case("llama", "tp=2", 2, ("DTensor", "DTensor loss_parallel")),
    Case("llama", "tp=2", 2, ("DTensor SequenceParallel",), sequence=True),
    Case("llama", "dp=1", 1, ("eager",)),
    *(
        Case(model, f"cp={n}", n, ("zigzag ring", "Ulysses", "our tp and sp"), attention=attention)
        for model, n in (("llama 2k", 2), ("llama 8k", 2), ("llama 2k", 4))
        for attention in ("gather", "ring", "ulysses")
    ),
    *(Case(f"experts {count}", "ep=4", 4, ("all-to-all", "our dp", "our tp")) for count in (16, 64)),
    Case("gpt", "dp=1", 1, ("torch.compile",), inductor=True),
    Case("llama", "dp=1", 1, ("torch.compile",), inductor=True),
    Case("gpt", "dp=2", 2, ("DDP torch.compile",), inductor=True),
)
GPU_CASES = (
    Case("llama 8k", "dp=1", 1, ("FSDP2 CPUOffloadPolicy",), "cuda", offload="parameters"),
    Case("llama 8k", "dp=1", 1, ("save_on_cpu",), "cuda", offload="activations"),
    Case("gpt", "dp=1", 1, ("eager", "torch.compile"), "cuda"),
    Case("gpt", "dp=1", 1, ("torch.compile",), "cuda", inductor=True),
    Case("llama", "dp=1", 1, ("torch.compile",), "cuda", inductor=True),
)
HEAD = (
    "model", "mesh", "ours with", "peer", "ours ms", "peer ms", "time", "CPU time", "ours MiB", "peer MiB", "memory",
    "ours loss", "peer loss", "steps",
)  # fmt: skip


def line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=benchmarks.compare.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="of each side")
    parser.add_argument(
        "--seconds", type=float, default=25, help="of each case: on a busy machine there are fewer steps"
    )
    parser.add_argument("--only", default="", help="part of `MODEL MESH OPTIONS PEERS`, e.g. 'gpt dp=2', 'inductor'")
    record_option(parser)
    args = parser.parse_args()
    records = Records("compare", args.record)
    cases = [
        case
        for case in (GPU_CASES if torch.cuda.is_available() else CPU_CASES)
        if args.only in f"{case.model} {case.mesh} {case.options} {' '.join(case.peers)}"
    ]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    print(f"{date.today()}  torch {torch.__version__}, {platform.machine()}, {where}, load {os.getloadavg()[0]:.1f}")
    print(f"python -m benchmarks.compare {' '.join(sys.argv[1:])}", flush=True)
    started = time.perf_counter()
    print(line(HEAD) + "\n" + line(["---"] * len(HEAD)), flush=True)
    for case in cases:
        for row, figures in measure(case, args.steps, args.seconds):
            print(line(row), flush=True)
            records.add(*figures)
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
