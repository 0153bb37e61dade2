"""What runs in place of a few kernels where tensors have no data: same results and same memory, no numbers.

All other kernels run as they are. On the CPU the generator of random bits computes with numpy and keeps its tables
between calls, so tensors without data must not come near it. On a GPU it is a kernel of its own, not launched here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar.ir.ops.fused import Fused
from autopar.ir.ops.ops import op
from autopar.ir.program import operand_nodes, record
from autopar.runtime.attention.attention_compared import compared_attention, compared_attention_backward
from autopar.runtime.attention.attention_dropout import dropped_attention, dropped_attention_backward
from autopar.runtime.attention.compared_blocks import undecided
from autopar.runtime.attention.ring_kernels import compared_ring, compared_ring_backward
from autopar.runtime.executor.executor import Kernels
from autopar.runtime.executor.run_fused import plain
from autopar.runtime.kernels import dropout as dropout_kernel
from autopar.runtime.kernels.counter import PIECE, PieceRuns
from autopar.runtime.kernels.experts import expert_mm, expert_mm_backward, in_order
from autopar.runtime.kernels.random_kernels import random
from autopar.runtime.triton.launch_kernel import FusedKernel


def _dropout(x: torch.Tensor, seed: torch.Tensor, key: int, p: float, *_: Any) -> torch.Tensor:
    if p <= 0 or x.numel() == 0:
        return x.clone()
    if p >= 1:
        return torch.zeros_like(x)
    source = x.contiguous()
    return _masked(source, torch.empty_like(source))


def _dropout_inplace(x: torch.Tensor, seed: torch.Tensor, key: int, p: float, *rest: Any) -> torch.Tensor:
    if not 0 < p < 1 or not x.is_contiguous() or x.numel() == 0:
        return _dropout(x, seed, key, p, *rest)
    return _masked(x, x)


def _dropout_of_rows(x: torch.Tensor, seed: torch.Tensor, key: int, step: int, p: float, *_: Any) -> torch.Tensor:
    return _dropout(x, seed, key, p)


def _masked(source: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    bits = _bits(source)
    if source.dtype.itemsize != bits.dtype.itemsize:
        bits.to({1: torch.int8, 2: torch.int16, 8: torch.int64}[source.dtype.itemsize])
    return out


def _bits(like: torch.Tensor) -> torch.Tensor:
    """32 bits for each element of a block."""
    return torch.empty(min(like.numel(), PIECE), dtype=torch.int32, device=like.device)


def _random(seed: torch.Tensor, key: int, kind: str, shape: Sequence[int], dtype: torch.dtype, *_: Any) -> torch.Tensor:
    out = torch.empty(tuple(shape), dtype=dtype, device=seed.device)
    if out.numel():
        _bits(out).to(dtype)
    return out


def _all_of_one(own: torch.Tensor, groups: int) -> tuple[torch.Tensor | None, list[int]]:
    """The rows by expert, as if one of them had all: their products take no memory but for results."""
    return None if in_order(own) else torch.sort(own, stable=True).indices, [len(own)] * groups


# Which blocks are seen hangs on values: as if each were seen in part, which takes the most memory.
_UNDECIDED = functools.partial(compared_attention, decide=undecided)
_UNDECIDED_BACKWARD = functools.partial(compared_attention_backward, decide=undecided)

ON_CPU: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        dropout_kernel.dropout: _dropout,
        dropout_kernel.dropout_inplace: _dropout_inplace,
        dropout_kernel.dropout_of_rows: _dropout_of_rows,
        random: _random,
        compared_attention: _UNDECIDED,
        compared_attention_backward: _UNDECIDED_BACKWARD,
        expert_mm: functools.partial(expert_mm, by_expert=_all_of_one),
        expert_mm_backward: functools.partial(expert_mm_backward, by_expert=_all_of_one),
        compared_ring: functools.partial(compared_ring, kernel=_UNDECIDED),
        compared_ring_backward: functools.partial(compared_ring_backward, kernel=_UNDECIDED_BACKWARD),
        dropped_attention: functools.partial(dropped_attention, draw=_dropout_inplace),
        dropped_attention_backward: functools.partial(dropped_attention_backward, draw=_dropout_inplace),
    }
)


class _Bits:
    """Stand in for the kernels of `random_triton.py`: memory for results, and no more."""

    def dropout(self, *_: Any) -> None:
        return

    def bits(self, seed: torch.Tensor, key: int, stream: int, runs: PieceRuns) -> torch.Tensor:
        return torch.empty(runs.count, runs.width, dtype=torch.int32, device=seed.device)


_DROPPED = functools.partial(dropout_kernel.dropout_inplace, kernels=_Bits())

ON_GPU: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        dropout_kernel.dropout: functools.partial(dropout_kernel.dropout, kernels=_Bits()),
        dropout_kernel.dropout_inplace: _DROPPED,
        random: functools.partial(random, kernels=_Bits()),
        dropped_attention: functools.partial(dropped_attention, draw=_DROPPED),
        dropped_attention_backward: functools.partial(dropped_attention_backward, draw=_DROPPED),
    }
)


def unlaunched(processors: int) -> Kernels:
    """Kernels of a GPU of so many multiprocessors, as they are launched, without the launch: memory for their results
    and for the partial sums of each program. What a kernel computes on the way stays in registers."""
    device = torch.device("meta")

    def make(fused: Fused, over: tuple[int | None, ...]) -> FusedKernel:
        return FusedKernel(
            fused, plain(fused, device), lambda kernel: _Unlaunched(), device,
            over=over, processors=processors, say=lambda what: None,
        )  # fmt: skip

    return make


class _Unlaunched:
    """The function of a kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *operands, **options: None


_LOOKUPS = (op("embedding"), op("embedding_backward"))
_PRODUCTS = (op("expert_mm"), op("expert_mm_backward"))


def value_read(node: fx.Node | None) -> int:
    """What a kernel reads from a tensor, where it asks whether an index lies in the rows that this rank holds: it
    does if the rank holds all of them; the values of a batch are not known. Where it asks whether rows lie by expert:
    those do that came from other ranks."""
    if node is not None and node.target in _PRODUCTS:
        return int(operand_nodes(node)[2].target is op("owned_index"))
    if node is not None and node.target in _LOOKUPS:
        table = node if node.target is op("embedding_backward") else operand_nodes(node)[0]
        return -1 if record(table).layout.dims[0] else 0
    return 0
