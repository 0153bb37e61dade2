"""The ops that talk, by their targets: of rings, which kernel computes a block of queries and of the keys that a rank
has at a step; of chains, what computes a run of steps.

A mask that is a condition knows its queries and keys by vectors: those of all keys are on every rank, and of them a
block takes the part that belongs to the keys which have come round. What of a block nobody sees is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from autopar.ir.ops.ops import op
from autopar.ir.ops.ring_ops import (
    CHAIN_IN_TURNS,
    RING_ATTENTION,
    RING_ATTENTION_BACKWARD,
    RING_COMPARED,
    RING_COMPARED_BACKWARD,
)
from autopar.runtime.attention.attention_compared import compared_attention, compared_attention_backward
from autopar.runtime.attention.attention_whole import KERNELS as ATTENTION
from autopar.runtime.attention.blocks import Block, Tensor, Tensors, runs_at, take
from autopar.runtime.attention.ring_attention import Ask, RingCall, Steps, backward, forward
from autopar.runtime.kernels.kernel import Kernel
from autopar.runtime.kernels.run_chain import called_steps, in_turns, run_steps

Kernels = Callable[..., Tensors]
Vectors = Sequence[Tensor]
Operands = Callable[[int, Block], Iterable[Any]]


def _attention(kernel: Kernels, ask: Ask, q: Tensor, k: Tensor, v: Tensor, *call: Any, **more: Any) -> Steps:
    ring = RingCall(*call, **more)
    return forward(_attend(kernel, ring, _no_mask), ask, ring, q, k, v)


def _attention_backward(kernel: Kernels, ask: Ask, *given: Any, **more: Any) -> Steps:
    grad, q, k, v, out, lse, *call = given
    ring = RingCall(*call, **more)
    return backward(_attend(kernel, ring, _no_mask), ask, ring, (grad, q, out, lse), k, v)


def compared_ring(
    ask: Ask, q: Tensor, k: Tensor, v: Tensor, rows: Vectors, columns: Vectors, compare: str, *call: Any,
    kernel: Kernels = compared_attention, **more: Any,
) -> Steps:  # fmt: skip
    """(out, logsumexp), as `compared_attention` gives them."""
    ring = RingCall(*call, **more)
    vectors = partial(_vectors, rows, columns, ring, k.shape[2])
    return forward(_attend(kernel, ring, vectors, compare, part=True), ask, ring, q, k, v)


def compared_ring_backward(ask: Ask, *given: Any, kernel: Kernels = compared_attention_backward, **more: Any) -> Steps:
    """(dq, dk, dv). given: the arguments of the op."""
    grad, q, k, v, rows, columns, out, lse, compare, *call = given
    ring = RingCall(*call, **more)
    vectors = partial(_vectors, rows, columns, ring, k.shape[2])
    return backward(_attend(kernel, ring, vectors, compare), ask, ring, (grad, q, out, lse), k, v)


def _attend(
    kernel: Kernels, ring: RingCall, mask: Callable[..., Iterable[Any]], *compare: str, **part: bool
) -> Kernels:
    """What computes a block with the keys of the rank `at`, whose operands are (q, k, v), or (grad, q, k, v, out, lse).
    mask: the operands that say what is seen of it."""

    def attend(at: int, block: Block, *taken: Tensor) -> Tensors:
        first = 3 if len(taken) == 3 else 4
        return kernel(*taken[:first], *mask(at, block), *taken[first:], *compare, block.causal, ring.scale, **part)

    return attend


def _no_mask(at: int, block: Block) -> tuple[None]:
    return (None,)


def _vectors(
    rows: Vectors, columns: Vectors, ring: RingCall, count: int, at: int, block: Block
) -> Iterator[list[Tensor]]:
    """The vectors of a block: of a rank's own queries, and of the `count` keys of the rank `at`."""
    keys = runs_at(at, ring.size, ring.outer, count)
    places = [slice(start, start + keys.width) for start in keys.starts]
    yield [row[..., block.rows] if row.shape[2] > 1 else row for row in rows]
    yield [take(take(one, places, 2), block.keys, 2) if one.shape[2] > 1 else one for one in columns]


def _called(name: str) -> Kernels:
    """An op that a compiler calls as it stands, with operands whose strides it knows."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return op(name)(*(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)

    return called


def _kernel(make: Callable[..., Steps], name: str) -> Kernel:
    kernel = ATTENTION[name]
    return Kernel(partial(make, kernel.run), traced=partial(make, kernel.traced or kernel.run))


# `run` and `traced` take `ask` before the arguments of the op.
RINGS: Mapping[Any, Kernel] = MappingProxyType(
    {
        RING_ATTENTION: _kernel(_attention, "attention"),
        RING_ATTENTION_BACKWARD: _kernel(_attention_backward, "attention_backward"),
        RING_COMPARED: Kernel(compared_ring, traced=partial(compared_ring, kernel=_called("compared_attention"))),
        RING_COMPARED_BACKWARD: Kernel(
            compared_ring_backward,
            traced=partial(compared_ring_backward, kernel=_called("compared_attention_backward")),
        ),
        CHAIN_IN_TURNS: Kernel(partial(in_turns, run_steps), traced=partial(in_turns, called_steps)),
    }
)
