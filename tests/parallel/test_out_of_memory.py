"""A rank that runs out of memory says which value, how much is held by what, and what would help."""

from __future__ import annotations

import pytest
import torch
from processes import ranks_of
from torch import nn

import autopar
from autopar.parallel.out_of_memory import is_out_of_memory

ROWS = 8_000_000  # of which each meets each: 256 TB


class Pairs(nn.Module):
    """Weighs each row, and multiplies each weight with each other one."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weigh(x).flatten()
        return (weights[:, None] * weights[None, :]).relu()


def _run(rank: int, mesh: str) -> str:
    torch.manual_seed(0)
    model = autopar.parallelize(Pairs(), mesh, loss_fn=lambda model, x: model(x).mean(), check_replicas=None)
    with pytest.raises(RuntimeError) as caught:
        model.forward_backward(torch.ones(ROWS, 1))
    return "\n".join([str(caught.value), *caught.value.__notes__])


@pytest.mark.gloo
def test_what_is_held_and_what_would_help_are_said() -> None:
    with ranks_of(1) as ranks:
        (said,) = ranks.run(_run, "dp=1")
    assert "you tried to allocate 256000000000000 bytes" in said
    assert "in %" in said and "aten.mul.Tensor" in said and "test_out_of_memory.py:25" in said
    assert "memory of rank 0 (dp=0) on cpu, AdamW" in said
    assert "256 TB  saved activations  %mul  test_out_of_memory.py:25" in said
    for word in ("saved activations", "optimizer states", "largest at the peak", "what would help", "microbatches=2"):
        assert word in said, word


def test_other_errors_are_none() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape '[2]' is invalid for input of size 3"))
