"""The kernels of the semantic ops in `autopar.ir.ops`, by op; importing this module registers them with PyTorch.

The executor calls the functions in `KERNELS` directly: the dispatcher would cost more than a small op.
They write in place and know no autograd, so that they run under `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from autopar.ir.ops import NAMESPACE, op
from autopar.runtime.attention import attention, attention_backward
from autopar.runtime.contraction import contract
from autopar.runtime.dropout import dropout
from autopar.runtime.embedding import embedding, embedding_backward
from autopar.runtime.experts import expert_mm, expert_mm_backward
from autopar.runtime.indices import checked_index
from autopar.runtime.losses import cross_entropy_backward, logsumexp, pick, pick_backward
from autopar.runtime.random import random

_BY_NAME: dict[str, Callable[..., Any]] = {
    "contract": contract,
    "attention": attention,
    "attention_backward": attention_backward,
    "logsumexp": logsumexp,
    "checked_index": checked_index,
    "pick": pick,
    "pick_backward": pick_backward,
    "cross_entropy_backward": cross_entropy_backward,
    "embedding": embedding,
    "embedding_backward": embedding_backward,
    "expert_mm": expert_mm,
    "expert_mm_backward": expert_mm_backward,
    "dropout": dropout,
    "random": random,
}

KERNELS: Mapping[Any, Callable[..., Any]] = MappingProxyType({op(name): kernel for name, kernel in _BY_NAME.items()})

_library = torch.library.Library(NAMESPACE, "IMPL")
for _name, _kernel in _BY_NAME.items():
    _library.impl(_name, torch.no_grad()(_kernel), "CompositeExplicitAutograd")
