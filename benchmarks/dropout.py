"""Forward and backward of our dropout beside `F.dropout` on a CPU: medians of interleaved runs on one thread.

    OMP_NUM_THREADS=1 timeout 300 .venv/bin/python -m benchmarks.dropout

Ours draws the mask twice and keeps none, so that its backward reads less; F.dropout keeps it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from autopar.runtime.dropout import dropout

SHAPES = ((64, 64), (64, 1024), (8, 512, 768), (4096, 4096))


def _ours(x: torch.Tensor, grad: torch.Tensor, p: float) -> None:
    seed, shape = torch.tensor([1, 2]), list(x.shape)
    for value in (x, grad):
        dropout(value, seed, 3, p, shape, shape, [0] * len(shape))


def _theirs(x: torch.Tensor, grad: torch.Tensor, p: float) -> None:
    with torch.enable_grad():
        torch.autograd.grad(F.dropout(x, p), x, grad)


def _seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p", type=float, default=0.1)
    parser.add_argument("--seconds", type=float, default=4.0, help="spent on each shape")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"p={options.p}, CPU ms of forward and backward, median")
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            x, grad = (torch.randn(shape).to(dtype) for _ in range(2))
            x.requires_grad_()
            found: tuple[list[float], list[float]] = ([], [])
            end = time.monotonic() + options.seconds
            with torch.no_grad():
                while time.monotonic() < end or len(found[0]) < 5:
                    for times, run in zip(found, (_ours, _theirs), strict=True):
                        times.append(_seconds(partial(run, x, grad, options.p)))
            ours, theirs = (1e3 * statistics.median(times) for times in found)
            print(f"{shape!s:16} {dtype!s:15} ours {ours:8.3f}  F.dropout {theirs:8.3f}  ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
