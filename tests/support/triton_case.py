"""What the GPU's random kernels do, on a machine without a GPU: run by test_random_triton.py, in a process of its own.

TRITON_INTERPRET=1 python tests/support/triton_case.py interpret    # in Triton's interpreter, beside the CPU's numbers
python tests/support/triton_case.py compile                         # to machine code, for GPUs that are not here
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from autopar.runtime.kernels import dropout as dropout_module
from autopar.runtime.kernels import random_kernels as random_module
from autopar.runtime.kernels import random_triton
from autopar.runtime.kernels.counter import PieceRuns
from autopar.runtime.kernels.dropout import dropout, dropout_inplace
from autopar.runtime.kernels.random_kernels import random

PIECES = (  # whole, local, offsets
    ([3, 2001], [3, 2001], [0, 0]),
    ([4, 6, 10], [2, 3, 5], [2, 3, 5]),
    ([2, 3, 4, 5, 6], [2, 1, 4, 2, 6], [0, 2, 0, 3, 0]),
    ([3, 2, 70], [3, 1, 70], [0, 1, 0]),
    ([2, 2**32], [1, 2500], [1, 5]),
    ([2**17, 2**17], [3, 40], [2**17 - 3, 2**17 - 40]),
    ([1], [1], [0]),
)
SEEDS = ((1, 0), (-5, 2**40 + 3))


def interpret() -> None:
    """Every number equal to the CPU's: pieces, dtypes, seeds, probabilities, in place, infinities and minus zero."""
    assert random_triton._dropout.__class__.__name__ == "InterpretedFunction"
    random_triton._PROGRAMS = 2  # so that a program has several tiles
    want = list(_numbers())
    for module in (dropout_module, random_module):  # what is done for a device of type cuda
        module.triton_kernels = lambda device: random_triton  # type: ignore[attr-defined]
    got = list(_numbers())
    assert len(want) == len(got) > 50
    for (name, x, scale, a), (_, _, _, b) in zip(want, got, strict=True):
        if a.dtype == torch.bfloat16:  # the interpreter cuts a float32 where hardware rounds: `compile` looks at that
            cut = ((x.float() * scale).view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
            a = torch.where(a == 0, a, cut)
        assert torch.equal(a, b) and torch.equal(a.signbit(), b.signbit()), name
    print(len(got), "equal")


def _numbers() -> Any:
    generator = torch.Generator().manual_seed(0)
    for i, (whole, local, offsets) in enumerate(PIECES):
        words = SEEDS[i % 2]
        seed = torch.tensor(words)
        # where a piece lies is the same for all dtypes: the first pieces are enough for the other two
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16)[: 4 if i < 2 else 2]:
            x = torch.randn(local, generator=generator, dtype=torch.float64).to(dtype)
            x.view(-1)[:: max(1, x.numel() // 5)] = torch.tensor(torch.inf)
            x.view(-1)[1 :: max(1, x.numel() // 5)] = torch.tensor(-0.0)
            for apply, key, p in ((dropout, 1, 0.3), (dropout_inplace, 2**31 - 1, 0.9)):
                name = f"{apply.__name__} {whole} {local} {words} {dtype} {key} {p}"
                yield name, x, 1 / (1 - p), apply(x.clone(), seed, key, p, whole, local, offsets)
        for kind in ("uniform", "normal", "exponential"):
            drawn = random(seed, 3, kind, local, torch.float64, whole, local, offsets)
            yield f"{kind} {whole} {local} {words}", drawn, 1.0, drawn


class _Pretended:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # a device of its own: Triton remembers the target of each

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_() -> None:
    """By the way a launch takes: 16 bytes a load, registers for every value, bfloat16 rounded, few variants."""
    seed = torch.tensor([1, 2])
    shapes = (
        ([2**20], [2**20], [0]),
        ([64, 32, 512], [32, 32, 512], [32, 0, 0]),
        ([64, 32, 1024], [64, 32, 512], [0, 0, 512]),
        ([64, 64, 1024], [64, 32, 512], [0, 32, 512]),
        ([2**16, 2**17], [2, 2**16], [2**15, 5]),
    )
    for capability, dtype in ((80, torch.float32), (90, torch.bfloat16)):
        driver.set_active(_Pretended(capability))
        x, variants = torch.empty(2**20, dtype=dtype), set()
        for whole, local, offsets in shapes:
            arguments, tiles, grid = random_triton._launch(PieceRuns.of(whole, local, offsets))
            for key in (1, 7, 16):
                kernel = random_triton._dropout.warmup(x, x, seed, key, 99, 1.1, *arguments, **tiles, grid=grid)
                variants.add(kernel.hash)
            code = kernel.asm["ptx"]
            loads = re.findall(r"ld\.global\.(\S*b32|\S*b16)", code)
            assert loads and all("v4" in load for load in loads), (capability, dtype, local, loads)
            assert kernel.metadata.target.arch == capability and f".target sm_{capability}" in code
            assert kernel.asm["cubin"] and ".local" not in code
            assert dtype == torch.float32 or "cvt.rn.bf16" in code
        assert len(variants) == 4, variants  # the first two are one: a piece without gaps, wherever it starts
        random_triton._bits.warmup(x.int(), seed, 1, 0, *arguments, **tiles, grid=grid)
    print("compiled")


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_}[sys.argv[1]]()
