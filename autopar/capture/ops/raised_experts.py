"""The products of a mixture of experts, raised to one op."""

from __future__ import annotations

from typing import Any

import torch

from autopar.capture.ops.functions import ExpertMM
from autopar.capture.ops.raised_random import RandomMode

Tensor = torch.Tensor


def grouped_mm(
    mode: RandomMode, mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """Rows of `mat_a` [s,k] in groups that end at `offs` [g], each times its matrix of `mat_b` [g,k,n].

    torch has no kernel of it in float64, in which the plain module is run for comparison: there it is spelled out.
    """
    if mat_a.ndim != 2 or mat_b.ndim != 3 or offs is None or bias is not None:
        return NotImplemented
    if not mat_a.is_floating_point() or out_dtype not in (None, mat_a.dtype):
        return NotImplemented
    if mode.captures:
        row = torch.arange(mat_a.shape[0], dtype=offs.dtype, device=offs.device)
        return ExpertMM.apply(mat_a, mat_b, torch.searchsorted(offs, row, right=True))
    if mat_a.dtype != torch.float64:
        return NotImplemented
    ends = offs.tolist()
    groups = [mat_a[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, mat_b, strict=False)]
    return torch.cat([*groups, mat_a.new_zeros((mat_a.shape[0] - ends[-1], mat_b.shape[2]))])
