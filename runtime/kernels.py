"""The kernels of the semantic ops in `autopar.ir.ops`, by op; importing this module registers them with PyTorch.

The executor calls the functions in `KERNELS` directly: the dispatcher would cost more than a small op.
They write in place and know no autograd, so that they run under `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.ir.ops import NAMESPACE, op
from autopar.runtime import (
    attention,
    attention_compared,
    attention_dropout,
    chains,
    contraction,
    convolution,
    ctc,
    dropout,
    embedding,
    experts,
    indices,
    losses,
    norms,
    random,
    rows,
    scans,
)
from autopar.runtime.kernel import Kernel

_FILES = (
    attention, attention_compared, attention_dropout, chains, contraction, convolution, ctc, dropout, embedding,
    experts, indices, losses, norms, random, rows, scans,
)  # fmt: skip

KERNELS: Mapping[Any, Kernel] = MappingProxyType(
    {op(name): kernel for file in _FILES for name, kernel in file.KERNELS.items()}
)

_library = torch.library.Library(NAMESPACE, "IMPL")
for _file in _FILES:
    for _name, _kernel in _file.KERNELS.items():
        _library.impl(_name, torch.no_grad()(_kernel.run), "CompositeExplicitAutograd")
