"""The peers of context parallelism: zigzag ring attention and Ulysses, as a specialist writes them.

Each rank keeps its part of the tokens, its rows of the rotary tables and an attention of its own; the rest is DDP,
since every rank has as many tokens as the others. Ring attention: Liu et al. 2023 (arXiv 2310.01889), with the pairs of
chunks and the joined steps that ring-flash-attention (github.com/zhuzilin/ring-flash-attention) made common. Ulysses:
Jacobs et al. 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from benchmarks.compare.models import SIZES, Step, batch_of, causal, model_of, plain

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def zigzag_ring(name: str, device: str) -> Step:
    """Chunk r and the r-th from the end of 2n on rank r of n; keys and values go round."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = torch.arange(SIZES[name][1]).chunk(2 * size)
    return _trained(name, device, torch.cat((chunks[rank], chunks[2 * size - 1 - rank])), ring)


def ulysses(name: str, device: str) -> Step:
    """The r-th of n chunks on rank r; attention has all positions of a part of the heads."""
    return _trained(name, device, torch.arange(SIZES[name][1]).chunk(dist.get_world_size())[dist.get_rank()], _by_heads)


def _trained(name: str, device: str, rows: Tensor, attend: Attend) -> Step:
    model: Any = model_of(name).to(device)
    for part in (block.attn for block in model.blocks):
        cos, sin = part.cos[rows], part.sin[rows]
        del part.cos, part.sin  # no buffers any more: DDP would send those of rank 0 to all
        part.cos, part.sin, part.attend = cos, sin, attend
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    x, y = (part[:, rows].contiguous() for part in batch_of(name, device))
    return plain(parallel, x, y)


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of two chunks of queries with the keys of all ranks."""
    out: Tensor = _Ring.apply(q, k, v)
    return out


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        group, half = q.shape[1] // k.shape[1], q.shape[2] // 2
        out = torch.zeros(q.shape)
        lse = torch.full(q.shape[:3], -torch.inf)
        kv = torch.stack((k, v))
        for hop in range(size):
            sent = _send(kv) if hop + 1 < size else None
            rows, keys = _seen(hop, rank, half)
            some = kv[:, :, :, keys].repeat_interleave(group, 2)
            part, part_lse = _flash(q[:, :, rows], some[0], some[1], 0.0, hop == 0)
            new = torch.logaddexp(lse[:, :, rows], part_lse)
            out[:, :, rows] *= (lse[:, :, rows] - new).exp().unsqueeze(-1)
            out[:, :, rows] += part * (part_lse - new).exp().unsqueeze(-1)
            lse[:, :, rows] = new
            kv = _received(sent) if sent is not None else kv
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        heads, half = k.shape[1], q.shape[2] // 2
        dq, kv, late = torch.zeros_like(q), torch.stack((k, v)), None
        for hop in range(size):
            sent = _send(kv) if hop + 1 < size else None
            rows, keys = _seen(hop, rank, half)
            some = kv[:, :, :, keys].repeat_interleave(q.shape[1] // heads, 2)
            part = [x[:, :, rows].contiguous() for x in (grad, q, out, lse)]
            mine_q, *mine = _flash_backward(part[0], part[1], some[0], some[1], part[2], part[3], 0.0, hop == 0)
            dq[:, :, rows] += mine_q
            dkv = _received(late) if late is not None else torch.zeros_like(kv)
            dkv[:, :, :, keys] += torch.stack(mine).unflatten(2, (heads, -1)).sum(3)
            late = _send(dkv)
            kv = _received(sent) if sent is not None else kv
        assert late is not None
        dk, dv = _received(late)
        return dq, dk, dv


def _seen(hop: int, rank: int, half: int) -> tuple[slice, slice]:
    """(queries, keys) that meet when the keys are those of the rank `hop` places before.

    All queries see the earlier chunk of an earlier rank; the later queries alone see the keys of a later rank.
    """
    if hop == 0:
        return slice(None), slice(None)
    return (slice(None), slice(half)) if hop <= rank else (slice(half, None), slice(None))


Sent = tuple[list[Any], Tensor, Tensor]


def _send(x: Tensor) -> Sent:
    """To the next rank, and from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, got = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
    return dist.batch_isend_irecv(ops), x, got


def _received(sent: Sent) -> Tensor:
    for work in sent[0]:
        work.wait()
    return sent[2]


def _by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads are exchanged for positions before attention, and back after it."""
    size = dist.get_world_size()
    if k.shape[1] % size:
        k, v = (x.repeat_interleave(size // k.shape[1], 1) for x in (k, v))
    out = causal(*(_Exchange.apply(x, 1, 2) for x in (q, k, v)))
    found: Tensor = _Exchange.apply(out, 2, 1)
    return found


class _Exchange(Function):
    """All to all: dim `scatter` is split over the ranks, of dim `gather` each has all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter: int, gather: int) -> Tensor:
        ctx.dims = gather, scatter
        parts = torch.stack(x.chunk(dist.get_world_size(), scatter))
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts)
        return torch.cat(found.unbind(), gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Exchange.forward(ctx, grad, *ctx.dims), None, None
