"""The GPU's random kernels give the CPU's numbers: in Triton's interpreter everywhere, on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.runtime.kernels.dropout import dropout, dropout_of_rows
from autopar.runtime.kernels.gpu_kernels import triton_kernels
from autopar.runtime.kernels.random_kernels import random

CASE = Path(__file__).resolve().parents[1] / "support" / "triton_case.py"


def _run(what: str, **environment: str) -> str:
    """The interpreter is chosen when the kernels are imported, so each way needs a process."""
    pytest.importorskip("triton", reason="Triton has no package for this machine")
    done = subprocess.run(
        [sys.executable, str(CASE), what], env=os.environ | environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_kernels_give_the_cpus_numbers_in_tritons_interpreter() -> None:
    assert _run("interpret", TRITON_INTERPRET="1").endswith("equal\n")


def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    assert _run("compile", TRITON_CACHE_DIR=str(tmp_path)).endswith("compiled\n")


def test_a_cpu_has_no_kernels() -> None:
    assert triton_kernels(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_gives_the_cpus_numbers(dtype: torch.dtype) -> None:
    cuda = torch.device("cuda")
    assert triton_kernels(cuda) is not None
    seed = torch.tensor([-5, 2**40 + 3])
    for whole, local, offsets in (
        ([300, 1001], [300, 1001], [0, 0]),
        ([64, 64, 1024], [64, 32, 512], [0, 32, 512]),
        ([2**16, 2**17], [2, 2**16], [2**15, 5]),
    ):
        x = torch.randn(local).to(dtype)
        want = dropout(x, seed, 7, 0.3, whole, local, offsets)
        assert torch.equal(dropout(x.to(cuda), seed.to(cuda), 7, 0.3, whole, local, offsets).cpu(), want)
        place, which = torch.randint(0, whole[0], local[:1]), torch.randint(0, 8, local[:1])
        rows = dropout_of_rows(x, seed, 7, 2, 0.3, place, which, whole, local[1:], offsets[1:])
        given = (seed.to(cuda), 7, 2, 0.3, place.to(cuda), which.to(cuda), whole, local[1:], offsets[1:])
        assert torch.equal(dropout_of_rows(x.to(cuda), *given).cpu(), rows)
        for kind in ("uniform", "normal", "exponential"):
            drawn = random(seed, 3, kind, local, dtype, whole, local, offsets)
            torch.testing.assert_close(
                random(seed.to(cuda), 3, kind, local, dtype, whole, local, offsets).cpu(), drawn
            )  # logarithms and cosines of a GPU differ in the last place
