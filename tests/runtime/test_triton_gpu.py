"""The generated kernels on a GPU, where there is one: the set that the interpreter proves elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hand_groups import group
from triton_groups import CASES, DIMS, Case, Dims

from autopar.runtime.executor.run_fused import plain

CUDA = torch.device("cuda")
APPROXIMATE = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # exponentials of a GPU are off a little


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [*DIMS, (2, 64, 4096)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_gpu_gives_the_cpus_numbers(case: Case, dims: Dims, tmp_path: Path) -> None:
    from autopar.runtime.triton.library import Library

    library = Library(tmp_path, CUDA, lambda fused: plain(fused, CUDA))
    for dtype, error in APPROXIMATE.items():
        operands = case.make(dims, dtype)
        fused = group(case.function, operands, case.name, case.kind)
        kernel = library(fused)
        moved = [on_gpu(operand) for operand in operands]
        once, again, want = kernel(*moved), kernel(*moved), plain(fused)(*operands)
        assert not kernel.reason
        for a, b, c in zip(once, again, want, strict=True):
            assert torch.equal(a, b)  # no atomics: the same bits
            if a.dtype.is_floating_point:
                torch.testing.assert_close(a.cpu(), c, rtol=error, atol=error * max(1.0, c.float().abs().max().item()))
            else:
                assert (a.cpu() == c).float().mean() > 0.999  # a comparison of what is rounded otherwise


def on_gpu(operand: Any) -> Any:
    return operand.cuda() if isinstance(operand, torch.Tensor) else operand
