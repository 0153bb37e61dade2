"""Ring attention (arXiv 2310.01889): keys and values go round the ranks of an axis, each step's under the products of
the one before, and what each block gives is joined by its logsumexp.

The functions are generators, parts of the executor's: they yield requests for `shift_start` and `wait` and are sent
`[answer]`. `ask(op, *args)` makes a request. Keys and values travel in one message, and so do their gradients, which
are added up in at least float32. In the backward pass a rank's own block comes last: its gradients, which the other
ranks have added to, are at home by then, after n - 1 messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch

from autopar.ir.ops.ops import op
from autopar.runtime.attention.ring_blocks import RingBlock, RowRuns, blocks_of, runs_at
from autopar.runtime.collectives.mesh_ops import COORD, WAIT

SHIFT = op("shift_start")
Tensors = tuple[torch.Tensor, ...]
Part = tuple[slice, torch.Tensor, torch.Tensor]  # keys, and what a block gives for them and their values
Ask = Callable[..., Any]
# (place of the rank whose keys they are, block, its operands) -> what a kernel gives for them
Attend = Callable[..., Tensors]
Steps = Generator[Any, list[Any], Tensors]


def forward(
    attend: Attend, ask: Ask, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: str, size: int, outer: int,
    causal: bool, starts: Sequence[int], hops: int | None = None,
) -> Steps:  # fmt: skip
    """(out, logsumexp), as attention to the keys of all ranks gives them, or of the `hops` before each. The kernel is
    given a rank's own block first."""
    hops = size - 1 if hops is None else hops
    place = (yield ask(COORD, axis)).pop()
    rows, total = _runs(starts, q), _Total(q, v)
    keys, values, message = k, v, _packed(k, v)
    for step in range(hops + 1):
        moving = (yield ask(SHIFT, message, axis, 1)).pop() if step < hops else None
        for block in _blocks(rows, place - step, size, outer, keys, causal):
            total.add(block, *attend((place - step) % size, block, *_taken(block, q, keys, values)))
        if moving is not None:
            message = (yield ask(WAIT, moving)).pop()
            del moving  # it holds what was sent
            keys, values = _unpacked(message, k, v)
    return total.result()


def backward(
    attend: Attend, ask: Ask, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, axis: str, size: int, outer: int, causal: bool, starts: Sequence[int], hops: int | None = None,
) -> Steps:  # fmt: skip
    """(dq, dk, dv). What a rank computes for keys of others goes on with them, one step behind, and home at once from
    where they go no farther."""
    hops = size - 1 if hops is None else hops
    place = (yield ask(COORD, axis)).pop()
    rows, queries = _runs(starts, q), _Queries(attend, grad, q, out, lse)
    moving = (yield ask(SHIFT, _packed(k, v), axis, 1)).pop() if hops else None
    sums: Any = None  # of the gradients under way
    for step in (*range(1, hops + 1), size):  # a rank's own block last
        keys, values = k, v
        if moving is not None:
            message = (yield ask(WAIT, moving)).pop()
            moving = (yield ask(SHIFT, message, axis, 1)).pop() if step < hops else None
            keys, values = _unpacked(message, k, v)
            del message
        blocks = _blocks(rows, place - step, size, outer, keys, causal)
        parts = [queries.see((place - step) % size, block, keys, values) for block in blocks]
        del keys, values
        total = k.new_zeros(k.numel() + v.numel(), dtype=_wide(k)) if sums is None else (yield ask(WAIT, sums)).pop()
        _add(_unpacked(total, k, v), parts)
        del parts
        sums = (yield ask(SHIFT, total, axis, 1 if step < hops else size - hops)).pop() if step < size else None
    dk, dv = _unpacked(total, k, v)
    return queries.gradient.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Queries:
    """A rank's queries in the backward pass. gradient: of the keys so far, in at least float32."""

    def __init__(self, attend: Attend, *given: Any) -> None:
        self.attend = attend
        self.grad, self.q, self.out, self.lse = given
        self.gradient = torch.zeros_like(self.q, dtype=_wide(self.q))

    def see(self, at: int, block: RingBlock, keys: torch.Tensor, values: torch.Tensor) -> Part:
        """Add the gradient of a block; that of its keys and values, which are those of the rank `at`."""
        rows = block.rows
        taken = self.grad[:, :, rows], *_taken(block, self.q, keys, values), self.out[:, :, rows]
        gradient, dk, dv = self.attend(at, block, *taken, self.lse[:, :, rows].contiguous())
        self.gradient[:, :, rows] += gradient
        return block.keys, dk, dv


def _add(grads: Tensors, parts: Iterable[Part]) -> None:
    """Add what blocks give for some keys to the gradients of all."""
    for keys, *found in parts:
        for grad, part in zip(grads, found, strict=True):
            grad[:, :, keys] += part


class _Total:
    """Attention to the keys so far, in at least float32."""

    def __init__(self, q: torch.Tensor, v: torch.Tensor) -> None:
        self.q, self.v = q, v
        self.dtype = _wide(q)
        self.out: torch.Tensor | None = None
        self.lse: torch.Tensor | None = None

    def add(self, block: RingBlock, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Attention to other keys. The logsumexp of a row that sees none of them is -inf."""
        if self.out is None and block.rows == slice(0, self.q.shape[2]):
            self.out, self.lse = out.to(self.dtype), lse
            return
        all_out, all_lse = self._so_far()
        mine, sums = all_out[:, :, block.rows], all_lse[:, :, block.rows]
        weight = torch.where(lse == -torch.inf, 0, torch.sigmoid(lse - sums))  # both may be -inf
        # dense in (b, s, h) as what it weighs: a compiler takes the strides of the result from it
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
        mine.lerp_(out.to(self.dtype), weight.unsqueeze(-1))
        sums.copy_(torch.logaddexp(sums, lse))

    def result(self) -> Tensors:
        """(out, logsumexp): 0 and 0 for a row that has seen no key."""
        out, lse = self._so_far()
        return out.to(self.q.dtype), torch.where(lse == -torch.inf, 0, lse)

    def _so_far(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.out is None or self.lse is None:
            b, h, s, _ = self.q.shape
            self.out = self.q.new_zeros((b, s, h, self.v.shape[3]), dtype=self.dtype).transpose(1, 2)
            self.lse = self.q.new_full((b, h, s), -torch.inf, dtype=self.dtype)
        return self.out, self.lse


def _wide(x: torch.Tensor) -> torch.dtype:
    """In which blocks are added up."""
    return torch.promote_types(x.dtype, torch.float32)


def _runs(starts: Sequence[int], q: torch.Tensor) -> RowRuns:
    """A rank's queries; all of them in a row where no axis splits them."""
    found = tuple(starts) or (0,)
    return RowRuns(found, q.shape[2] // len(found))


def _blocks(rows: RowRuns, place: int, size: int, outer: int, keys: torch.Tensor, causal: bool) -> list[RingBlock]:
    return blocks_of(rows, runs_at(place % size, size, outer, keys.shape[2]), causal)


def _taken(block: RingBlock, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Tensors:
    return q[:, :, block.rows], keys[:, :, block.keys], values[:, :, block.keys]


def _packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.cat([k.reshape(-1), v.reshape(-1)])


def _unpacked(message: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """What is in a message, as views in the shapes of k and v."""
    return message[: k.numel()].view(k.shape), message[k.numel() :].view(v.shape)
