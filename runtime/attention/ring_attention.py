"""Ring attention (arXiv 2310.01889): keys and values go round the ranks of an axis, each step's under the products of
the one before, and what each block gives is joined by its logsumexp.

The functions are generators, parts of the executor's: they yield requests for `shift_start` and `wait` and are sent
`[answer]`. `ask(op, *args)` makes a request. Keys and values travel in one message, and so do their gradients, which
are added up in at least float32. In the backward pass a rank's own block comes last: its gradients, which the other
ranks have added to, are at home by then, after n - 1 messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from autopar.ir.ops.ops import op
from autopar.runtime.attention.accumulate import Attended, add_to_keys, attend, gradients
from autopar.runtime.attention.blocks import Block, RowRuns, Tensor, Tensors, blocks_of, runs_at, wide
from autopar.runtime.collectives.mesh_ops import COORD, WAIT

SHIFT = op("shift_start")
Ask = Callable[..., Any]
# (place of the rank whose keys they are, block, its operands) -> what a kernel gives for them
AttendAt = Callable[..., Tensors]
Steps = Generator[Any, list[Any], Tensors]


@dataclass(frozen=True, slots=True)
class RingCall:
    """What a ring is told beside its operands: see `ir/ops/ring_ops.py`."""

    axis: str
    size: int
    outer: int
    causal: bool
    scale: float
    starts: Sequence[int] = ()
    hops: int | None = None

    @property
    def last(self) -> int:
        """The step after which keys go no farther."""
        return self.size - 1 if self.hops is None else self.hops

    def blocks(self, at: int, q: Tensor, keys: Tensor) -> tuple[Block, ...]:
        """A rank's queries with the keys of the rank at a place."""
        rows = RowRuns.of(self.starts, q.shape[2])
        return blocks_of(rows, runs_at(at, self.size, self.outer, keys.shape[2]), self.causal)


def forward(at_place: AttendAt, ask: Ask, ring: RingCall, q: Tensor, k: Tensor, v: Tensor) -> Steps:
    """(out, logsumexp), as attention to the keys of all ranks gives them, or of the `hops` before each. The kernel is
    given a rank's own block first."""
    place = (yield ask(COORD, ring.axis)).pop()
    keys, values, message, attended = k, v, _packed(k, v), Attended(q, v, wide(q), part=True)
    for step in range(ring.last + 1):
        moving = (yield ask(SHIFT, message, ring.axis, 1)).pop() if step < ring.last else None
        at = (place - step) % ring.size
        attend(attended, partial(at_place, at), ring.blocks(at, q, keys), q, keys, values)
        if moving is not None:
            message = (yield ask(WAIT, moving)).pop()
            del moving  # it holds what was sent
            keys, values = _unpacked(message, k, v)
    out, lse = attended.result()
    return out, torch.where(lse == -torch.inf, 0, lse)


def backward(at_place: AttendAt, ask: Ask, ring: RingCall, queries: Tensors, k: Tensor, v: Tensor) -> Steps:
    """(dq, dk, dv). What a rank computes for keys of others goes on with them, one step behind, and home at once from
    where they go no farther. queries: (grad, q, out, lse)."""
    place = (yield ask(COORD, ring.axis)).pop()
    q = queries[1]
    dq = torch.zeros_like(q, dtype=wide(q))
    moving = (yield ask(SHIFT, _packed(k, v), ring.axis, 1)).pop() if ring.last else None
    sums: Any = None  # of the gradients under way
    for step in (*range(1, ring.last + 1), ring.size):  # a rank's own block last
        keys, values = k, v
        if moving is not None:
            message = (yield ask(WAIT, moving)).pop()
            moving = (yield ask(SHIFT, message, ring.axis, 1)).pop() if step < ring.last else None
            keys, values = _unpacked(message, k, v)
            del message
        at = (place - step) % ring.size
        parts = list(gradients(partial(at_place, at), ring.blocks(at, q, keys), queries, keys, values, dq))
        del keys, values
        total = k.new_zeros(k.numel() + v.numel(), dtype=wide(k)) if sums is None else (yield ask(WAIT, sums)).pop()
        dk, dv = _unpacked(total, k, v)
        add_to_keys(parts, dk, dv)
        del parts
        hops = 1 if step < ring.last else ring.size - ring.last
        sums = (yield ask(SHIFT, total, ring.axis, hops)).pop() if step < ring.size else None
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(message: Tensor, k: Tensor, v: Tensor) -> Tensors:
    """What is in a message, as views in the shapes of k and v."""
    return message[: k.numel()].view(k.shape), message[k.numel() :].view(v.shape)
