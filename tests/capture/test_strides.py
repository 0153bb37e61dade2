"""Kernels get operands of any strides: a piece, a transposed view or an expanded value is not contiguous.

Eager autograd makes some gradients contiguous before it calls a kernel that reads them as if they were; those calls
are not in a graph of values. The executor makes up for them (`_CONTIGUOUS` in `runtime/kernels/direct.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rule_brute_force import RUN_AS, Sample, op_of, tensors_in, with_tensors
from test_rules import samples  # noqa: F401  a fixture

from autopar.runtime.executor.kernel_table import function_of

Strided = Callable[[torch.Tensor], torch.Tensor]


def backwards(x: torch.Tensor) -> torch.Tensor:
    """The dims in memory in the opposite order."""
    order = list(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


def spaced(x: torch.Tensor) -> torch.Tensor:
    """Every second element of a larger value."""
    wide = x.new_full((*x.shape, 2), 7) if x.dtype != torch.bool else x.new_ones((*x.shape, 2))
    wide[..., 0] = x
    return wide[..., 0]


def cut(x: torch.Tensor) -> torch.Tensor:
    """A piece of dim 1 of a larger value, as `shard` gives."""
    if x.ndim < 2:
        return x
    return torch.cat([x, x + x if x.dtype != torch.bool else x], 1).narrow(1, 0, x.shape[1])


@pytest.mark.parametrize("strided", [backwards, spaced, cut])
def test_kernels_take_any_strides(strided: Strided, samples: dict[str, list[Sample]]) -> None:  # noqa: F811
    wrong = []
    for name, own in samples.items():
        target = op_of(name)
        for one in own:
            if not one.compare:
                continue
            run = RUN_AS.get(target, function_of(target))
            operands = tensors_in([one.args, one.kwargs])
            expected = tensors_in([run(*one.args, **one.kwargs)])
            args, kwargs = with_tensors((one.args, dict(one.kwargs)), [strided(x) for x in operands])
            try:
                found = tensors_in([run(*args, **kwargs)])
            except RuntimeError as error:
                wrong.append(f"{name}: {str(error)[:80]}")
                continue
            if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(found, expected, strict=True)):
                wrong.append(name)
    assert not wrong, "\n".join(sorted(set(wrong)))
