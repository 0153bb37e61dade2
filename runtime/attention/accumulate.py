"""Put together what kernels give for blocks of queries and keys: outputs by their logsumexps, gradients by sums (Dao et
al. 2022, arXiv 2205.14135, section 3.1). Each block needs but the logsumexp of whole rows in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from autopar.runtime.attention.blocks import Block, Tensor, Tensors, wide

Attend = Callable[..., Tensors]  # (block, its operands) -> what a kernel gives for them
KeyParts = Iterable[tuple[Block, Tensor, Tensor]]  # gradients of a block's keys and values


class Attended:
    """Attention to the keys of the blocks so far.

    dtype: in which it is kept; the one of the kernel's output does where no row is in more than two blocks. part: there
    are other keys, so that the logsumexp of a row that sees none of these is -inf; else it is 0, as kernels say, and
    blocks come from the top rows down, of each row the one with a mask last.
    """

    def __init__(self, q: Tensor, v: Tensor, dtype: torch.dtype, part: bool = False) -> None:
        self._q, self._v, self._dtype, self._part = q, v, dtype, part
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        self._sample: int | None = None
        self._bottom = 0  # of this sample, the first row that no block had

    def add(self, block: Block, out: Tensor, lse: Tensor) -> None:
        """Add what a kernel gives for a block."""
        bottom = self._bottom if block.sample == self._sample else 0
        is_new = block.rows.start >= bottom
        assert is_new or self._part or block.rows.stop <= bottom
        if block.mask is not None and (self._part or not is_new):
            lse = lse.masked_fill(~block.mask.any(-1), -torch.inf)
        if self._out is None and block.sample is None and block.rows == slice(0, self._q.shape[2]):
            self._out, self._lse = out.to(self._dtype), lse
        else:
            mine, sums = block.of_rows(*self._so_far())
            if is_new:
                mine.copy_(out)
                sums.copy_(lse)
            else:
                _join(mine, sums, out, lse)
        self._sample, self._bottom = block.sample, max(bottom, block.rows.stop)

    def result(self) -> Tensors:
        """(out, logsumexp); zeros for a row that has seen no key, or -inf of a part."""
        out, lse = self._so_far()
        return out.to(self._q.dtype), lse

    def _so_far(self) -> tuple[Tensor, Tensor]:
        if self._out is None or self._lse is None:
            b, h, s, _ = self._q.shape
            self._out = self._q.new_zeros((b, s, h, self._v.shape[3]), dtype=self._dtype).transpose(1, 2)
            unseen = -torch.inf if self._part else 0.0
            self._lse = self._q.new_full((b, h, s), unseen, dtype=wide(self._q))
        return self._out, self._lse


def _join(mine: Tensor, sums: Tensor, out: Tensor, lse: Tensor) -> None:
    """Add attention to other keys to that of some rows, in place, computed in at least float32."""
    weight = torch.where(lse == -torch.inf, 0, torch.sigmoid(lse - sums))  # both may be -inf
    # dense in (b, s, h) as what it weighs: a compiler takes the strides of the result from it
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2).unsqueeze(-1)
    total = mine.to(wide(mine))  # itself, if it is wide
    total.lerp_(out.to(total.dtype), weight)
    if total.dtype != mine.dtype:
        mine.copy_(total)
    sums.copy_(torch.logaddexp(sums, lse))


def attend(attended: Attended, kernel: Attend, blocks: Iterable[Block], q: Tensor, k: Tensor, v: Tensor) -> None:
    """Add attention to the keys of some blocks."""
    for block in blocks:
        attended.add(block, *kernel(block, *block.of_rows(q), *block.of_keys(k, v)))


def gradients(
    kernel: Attend, blocks: Iterable[Block], queries: Tensors, k: Tensor, v: Tensor, dq: Tensor
) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """The gradients of keys and values, block by block; those of the queries are added to `dq`. queries: (grad, q, out,
    lse)."""
    for block in blocks:
        mine, grad, q, out, lse = block.of_rows(dq, *queries)
        of_q, of_k, of_v = kernel(block, grad, q, *block.of_keys(k, v), out, lse.contiguous())
        mine += of_q
        yield block, of_k, of_v


def add_to_keys(parts: KeyParts, dk: Tensor, dv: Tensor) -> None:
    """Add what blocks give for their keys and values to the gradients of all."""
    for block, of_k, of_v in parts:
        block.add_to_keys(dk, of_k)
        block.add_to_keys(dv, of_v)


def all_gradients(kernel: Attend, blocks: Iterable[Block], queries: Tensors, k: Tensor, v: Tensor) -> Tensors:
    """(dq, dk, dv), summed over blocks in at least float32."""
    q = queries[1]
    dq, dk, dv = (torch.zeros_like(x, dtype=wide(x)) for x in (q, k, v))
    add_to_keys(gradients(kernel, blocks, queries, k, v, dq), dk, dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
