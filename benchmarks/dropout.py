"""Forward and backward of our dropout beside `F.dropout`: medians of interleaved runs, on a CPU on one thread.

    OMP_NUM_THREADS=1 timeout 300 .venv/bin/python -m benchmarks.dropout
    timeout 300 python3 -m benchmarks.dropout --device cuda

Ours draws the mask twice and keeps none, so that its backward reads less; F.dropout keeps it. On a GPU many calls go
between two clocks, so that what counts is the longer of computing and launching.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.benchmark import Timer

from autopar.runtime.kernels.dropout import dropout
from benchmarks.records import Figure, Records, record_option

SHAPES = {
    "cpu": ((64, 64), (64, 1024), (8, 512, 768), (4096, 4096)),
    "cuda": ((64, 1024), (8, 512, 768), (4096, 4096), (8, 4096, 8192)),
}


def _ours(x: torch.Tensor, grad: torch.Tensor, p: float, seed: torch.Tensor) -> None:
    shape = list(x.shape)
    for value in (x, grad):
        dropout(value, seed, 3, p, shape, shape, [0] * len(shape))


def _theirs(x: torch.Tensor, grad: torch.Tensor, p: float) -> None:
    with torch.enable_grad():
        torch.autograd.grad(F.dropout(x, p), x, grad)


def _compare(shape: tuple[int, ...], dtype: torch.dtype, options: Any) -> tuple[float, float]:
    """Milliseconds of ours and of theirs."""
    x, grad = (torch.randn(shape, device=options.device).to(dtype) for _ in range(2))
    x.requires_grad_()
    known = {"x": x, "grad": grad, "p": options.p, "seed": torch.tensor([1, 2], device=options.device)}
    timers = [
        Timer("_ours(x, grad, p, seed)", globals=known | {"_ours": _ours}),
        Timer("_theirs(x, grad, p)", globals=known | {"_theirs": _theirs}),
    ]
    number = max(1, int(0.05 / max(timer.timeit(3).mean for timer in timers)))
    times: list[list[float]] = [[], []]
    end = time.monotonic() + options.seconds
    with torch.no_grad():
        while time.monotonic() < end or len(times[0]) < 5:
            for found, timer in zip(times, timers, strict=True):
                found.append(1e3 * timer.timeit(number).mean)
    ours, theirs = map(statistics.median, times)
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=4.0, help="spent on each shape")
    parser.add_argument("--device", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--shapes", type=int, help="how many of the shapes, the smallest first; without it all")
    record_option(parser)
    options = parser.parse_args()
    records = Records("dropout", options.record)
    torch.set_num_threads(1)
    print(f"p={options.p}, ms of forward and backward on {options.device}, median")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES[options.device][: options.shapes]:
            ours, theirs = _compare(shape, dtype, options)
            print(f"{shape!s:16} {dtype!s:15} ours {ours:8.3f}  F.dropout {theirs:8.3f}  ratio {ours / theirs:.2f}")
            case = f"{math.prod(shape):,} elements, {str(dtype).removeprefix('torch.')}, {options.device}"
            records.add(Figure(case, "forward and backward beside F.dropout", "ms", ours, theirs))


if __name__ == "__main__":
    main()
