"""What the executor calls for a graph target; importing this module registers our own kernels with PyTorch.

The executor calls the functions in `KERNELS` directly: the dispatcher would cost more than a small op.
They write in place and know no autograd, so that they run under `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.ir.ops.ops import NAMESPACE, is_mesh_op, op
from autopar.runtime.attention import attention_compared, attention_dropout, attention_whole, checked_causal
from autopar.runtime.kernels import (
    contraction,
    convolve,
    ctc,
    direct,
    dropout,
    embedding,
    experts,
    indices,
    loss_kernels,
    norm_kernels,
    random_kernels,
    rows,
    run_chain,
    scan_kernels,
)
from autopar.runtime.kernels.kernel import Function, Kernel

_FILES = (
    attention_whole, attention_compared, attention_dropout, checked_causal, run_chain, contraction, convolve, ctc,
    dropout, embedding, experts, indices, loss_kernels, norm_kernels, random_kernels, rows, scan_kernels,
)  # fmt: skip

KERNELS: Mapping[Any, Kernel] = MappingProxyType(
    {op(name): kernel for file in _FILES for name, kernel in file.KERNELS.items()}
)

_library = torch.library.Library(NAMESPACE, "IMPL")
for _file in _FILES:
    for _name, _kernel in _file.KERNELS.items():
        _library.impl(_name, torch.no_grad()(_kernel.run), "CompositeExplicitAutograd")


def function_of(target: Any) -> Function:
    """The fastest callable that does what `target` does, for operands of any strides."""
    assert not is_mesh_op(target), target
    return KERNELS[target].run if target in KERNELS else direct.direct_function(target)


def inplace_variants(target: Any) -> tuple[tuple[int, Function], ...]:
    """(operand that is overwritten, callable) pairs."""
    return KERNELS[target].in_place if target in KERNELS else direct.IN_PLACE.get(target, ())


def adding_variant(target: Any) -> Function | None:
    """A callable that adds what `target` makes to its first argument, and returns that."""
    return KERNELS[target].adding if target in KERNELS else direct.ADDING.get(target)
