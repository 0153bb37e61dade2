"""What a split sequence costs: the slowest rank's attention beside one device, compilation, and memory.

    timeout 600 .venv/bin/python -m benchmarks.context [--length 4096] [--seconds 20]

Attention: forward and backward of causal attention (b 1, h 8, d 64, float32, one thread) of each rank's mirrored piece,
the least of many rounds in turn with the whole on one device. The share is (time on one device / n) / slowest rank.
Compilation: CPU seconds and calls of a program on cp=2 and cp=64. Memory: a rank's peak by the estimator, from S
on one device to 8 S on cp=8. Nothing is sent.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import parse_mesh
from autopar.runtime.attention import attention, attention_backward

HEADS, HEAD = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20, help="of measuring each number of ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for heads in (HEADS, 2):
        for n in (2, 4, 8):
            print(f"attention, {HEADS} heads over {heads}, n={n}: {_shares(options.length, heads, n, options.seconds)}")
    for line in (*_compiled(), *_memory()):
        print(line)


def _shares(length: int, key_heads: int, n: int, seconds: float) -> str:
    """The least times of the whole and of each rank's piece, measured in turn."""
    q, grad = torch.randn(2, 1, HEADS, length, HEAD)
    k, v = torch.randn(2, 1, key_heads, length, HEAD)
    width = length // (2 * n)
    calls: list[Callable[[], object]] = [lambda: _both(grad, q, k, v, ())]
    for rank in range(n):
        starts = (rank * width, (2 * n - 1 - rank) * width)
        rows = torch.cat([torch.arange(start, start + width) for start in starts])
        piece = q[:, :, rows].contiguous(), grad[:, :, rows].contiguous()
        calls.append(lambda piece=piece, starts=starts: _both(piece[1], piece[0], k, v, starts))  # type: ignore[misc]
    least = [float("inf")] * len(calls)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            least[i] = min(least[i], time.perf_counter() - start)
    whole, *ranks = least
    return (
        f"one device {whole * 1e3:.0f} ms, ranks {min(ranks) * 1e3:.1f} to {max(ranks) * 1e3:.1f} ms, "
        f"share of the slowest {whole / n / max(ranks):.3f}"
    )


def _both(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, ...]) -> object:
    out, lse = attention(q, k, v, None, True, HEAD**-0.5, starts=starts)
    return attention_backward(grad, q, k, v, None, out, lse, True, HEAD**-0.5, starts=starts)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.out = heads, nn.LayerNorm(width), nn.Linear(width, width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, width // 2)
        self.up, self.down, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        head = x.shape[-1] // self.heads
        q, k, v = (each.unflatten(-1, (-1, head)).transpose(1, 2) for each in (self.q(y), *self.kv(y).chunk(2, -1)))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def _model(width: int = 512, layers: int = 4) -> nn.Module:
    return nn.Sequential(*(Layer(width, 8) for _ in range(layers)))


def _step(length: int, mesh: str) -> autopar.Compiled:
    with torch.device("meta"):
        model, x = _model(), torch.empty(1, length, 512)
    return autopar.compile(model, mesh, loss_fn=lambda model, x: model(x).square().mean(), batch=x, attention="gather")


def _compiled() -> list[str]:
    lines = []
    _step(1024, "cp=2")  # warm
    for n in (2, 64):
        start = time.process_time()
        found = _step(8192, f"cp={n}")
        seconds = time.process_time() - start
        lines.append(f"compiled for cp={n}: {seconds:.2f} s CPU, {len(found.program.nodes)} nodes")
    return lines


def _memory() -> list[str]:
    lines, first = [], 0
    for n in (1, 2, 4, 8):
        mesh = f"cp={n}" if n > 1 else "dp=1"
        peak = _step(8192 * n, str(parse_mesh(mesh))).memory().peak
        first = first or peak
        lines.append(f"memory of {8192 * n} positions on {mesh}: {peak / 2**20:.0f} MiB on a rank, {peak / first:.3f}")
    return lines


if __name__ == "__main__":
    main()
