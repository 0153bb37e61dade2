"""`autopar::chain`: a recurrence whose state is no linear function of the one before, with its step as text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.ir.semantic import semantic
from autopar.ir.step import empty_results

Tensors = Sequence[torch.Tensor]


@semantic("chain(Tensor[] start, Tensor[] rows, Tensor[] fixed, str step, bool reverse) -> Tensor[]", precision="high")
def chain(start: Tensors, rows: Tensors, fixed: Tensors, step: str, reverse: bool) -> list[torch.Tensor]:
    """What `step` (see step.py) gives for each of the rows in turn, with dim 0 for the steps. start: the states that
    the first step reads. fixed: what all steps read. reverse: the last row comes first."""
    return empty_results(start, rows, fixed, step)


SEMANTIC = (chain,)
