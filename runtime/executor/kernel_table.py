"""The kernels of the semantic ops in `autopar.ir.ops.ops`, by op; importing this module registers them with PyTorch.

The executor calls the functions in `KERNELS` directly: the dispatcher would cost more than a small op.
They write in place and know no autograd, so that they run under `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.ir.ops.ops import NAMESPACE, op
from autopar.runtime.attention import attention_compared, attention_dropout, attention_whole
from autopar.runtime.kernels import (
    contraction,
    convolve,
    ctc,
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
from autopar.runtime.kernels.kernel import Kernel

_FILES = (
    attention_whole, attention_compared, attention_dropout, run_chain, contraction, convolve, ctc, dropout, embedding,
    experts, indices, loss_kernels, norm_kernels, random_kernels, rows, scan_kernels,
)  # fmt: skip

KERNELS: Mapping[Any, Kernel] = MappingProxyType(
    {op(name): kernel for file in _FILES for name, kernel in file.KERNELS.items()}
)

_library = torch.library.Library(NAMESPACE, "IMPL")
for _file in _FILES:
    for _name, _kernel in _file.KERNELS.items():
        _library.impl(_name, torch.no_grad()(_kernel.run), "CompositeExplicitAutograd")
