"""What a split sequence costs: the slowest rank's attention beside one device, compilation, and memory.

    timeout 600 .venv/bin/python -m benchmarks.context [--length 4096] [--seconds 20]

Attention: forward and backward of causal attention (b 1, h 8, d 64, float32, one thread) of each rank's mirrored piece,
the least of many rounds in turn with the whole on one device; with gathered keys and as a ring, whose messages are
answered at once. The share is (time on one device / n) / slowest rank. Compilation: CPU seconds and calls of a program
on cp=2 and cp=64. Memory: a rank's peak by the estimator, from S tokens on one device to 8 S on cp=8. Nothing is sent.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import parse_mesh
from autopar.ir.ops.ring_ops import RING_ATTENTION, RING_ATTENTION_BACKWARD
from autopar.runtime.attention.attention_whole import attention, attention_backward
from autopar.runtime.attention.ring_kernels import RINGS
from autopar.runtime.collectives.mesh_ops import COORD

HEADS, HEAD = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=20, help="of measuring each number of ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for heads in (HEADS, 2):
        for n in (2, 4, 8):
            for way, share in _shares(options.length, heads, n, options.seconds).items():
                print(f"attention, {HEADS} heads over {heads}, n={n}, {way}: {share}")
    for way in ("gather", "ring"):
        for line in (*_compiled(way), *_memory(way)):
            print(f"{way}: {line}")


def _shares(length: int, key_heads: int, n: int, seconds: float) -> dict[str, str]:
    """The least times of the whole and of each rank's piece in both ways, measured in turn."""
    q, grad = torch.randn(2, 1, HEADS, length, HEAD)
    k, v = torch.randn(2, 1, key_heads, length, HEAD)
    width = length // (2 * n)
    calls: list[Callable[[], object]] = [lambda: _both(grad, q, k, v, ())]
    rings: list[Callable[[], object]] = []
    for rank in range(n):
        starts = (rank * width, (2 * n - 1 - rank) * width)
        rows = torch.cat([torch.arange(start, start + width) for start in starts])
        own = [x[:, :, rows].contiguous() for x in (grad, q, k, v)]
        calls.append(lambda own=own, starts=starts: _both(own[0], own[1], k, v, starts))  # type: ignore[misc]
        rings.append(lambda own=own, starts=starts, rank=rank: _ring(*own, rank, n, starts))  # type: ignore[misc]
    calls += rings
    least = [float("inf")] * len(calls)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for i, call in enumerate(calls):
            start = time.thread_time()  # of this thread's CPU: others may run beside it
            call()
            least[i] = min(least[i], time.thread_time() - start)
    whole, *ranks = least
    return {
        way: f"one device {whole * 1e3:.0f} ms, ranks {min(times) * 1e3:.1f} to {max(times) * 1e3:.1f} ms, "
        f"share of the slowest {whole / n / max(times):.3f}"
        for way, times in (("gathered", ranks[:n]), ("ring", ranks[n:]))
    }


def _both(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, starts: tuple[int, ...]) -> object:
    out, lse = attention(q, k, v, None, True, HEAD**-0.5, starts=starts)
    return attention_backward(grad, q, k, v, None, out, lse, True, HEAD**-0.5, starts=starts)


def _ring(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, rank: int, n: int, starts: tuple[int, ...]) -> object:
    """A rank's ring. Its own keys stand for those of others: as many products, of the same shapes."""
    rest: tuple[Any, ...] = ("cp", n, -2, True, HEAD**-0.5)
    out, lse = _driven(RINGS[RING_ATTENTION].run(_ask, q, k, v, *rest, starts=starts), rank)
    return _driven(RINGS[RING_ATTENTION_BACKWARD].run(_ask, grad, q, k, v, out, lse, *rest, starts=starts), rank)


def _ask(target: Any, *args: Any) -> tuple[Any, Any]:
    return target, args[0]


def _driven(steps: Any, rank: int) -> Any:
    """The results of a ring in which every message is what the rank itself has sent."""
    answer: list[Any] | None = None
    while True:
        try:
            target, sent = steps.send(answer)
        except StopIteration as done:
            return done.value
        answer = [rank if target == COORD else sent]


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
    return nn.Sequential(nn.Embedding(1024, width), *(Layer(width, 8) for _ in range(layers)))


def _step(length: int, mesh: str, way: str) -> autopar.Compiled:
    with torch.device("meta"):
        model, x = _model(), torch.empty(1, length, dtype=torch.long)
    return autopar.compile(model, mesh, loss_fn=lambda model, x: model(x).square().mean(), batch=x, attention=way)


def _compiled(way: str) -> list[str]:
    lines = []
    _step(1024, "cp=2", way)  # warm
    for n in (2, 64):
        start = time.process_time()
        found = _step(8192, f"cp={n}", way)
        seconds = time.process_time() - start
        lines.append(f"compiled for cp={n}: {seconds:.2f} s CPU, {len(found.program.nodes)} nodes")
    return lines


def _memory(way: str) -> list[str]:
    lines, first = [], 0
    for n in (1, 2, 4, 8):
        mesh = f"cp={n}" if n > 1 else "dp=1"
        peak = _step(8192 * n, str(parse_mesh(mesh)), way).memory().peak
        first = first or peak
        lines.append(f"memory of {8192 * n} positions on {mesh}: {peak / 2**20:.0f} MiB on a rank, {peak / first:.3f}")
    return lines


if __name__ == "__main__":
    main()
