"""Tensors that lie side by side in one block of memory, so that one copy moves them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

Pair = tuple[torch.Tensor, torch.Tensor]

ALIGNED = 512  # bytes, at multiples of which a tensor begins, as of CUDA's allocator


def dense_strides(x: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor, in which what is loaded again lies too, so that kernels do the same sums; those of a
    contiguous one where memory between its elements is no part of it."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1):
        if stride != expected:
            return torch.empty(x.shape, device="meta").stride()
        expected *= size
    return x.stride()


def side_by_side(tensors: Sequence[torch.Tensor], make: Callable[[int], torch.Tensor | None]) -> list[torch.Tensor]:
    """Memory for tensors like these, of one block. make: gives one of so many bytes;
    where it gives none there is no result."""
    starts, end = [], 0
    for x in tensors:
        starts.append(end)
        end += -(-bytes_of(x) // ALIGNED) * ALIGNED
    block = make(end)
    if block is None:
        return []
    parts = (block[start : start + bytes_of(x)].view(x.dtype) for start, x in zip(starts, tensors, strict=True))
    return [part.as_strided(x.shape, dense_strides(x)) for part, x in zip(parts, tensors, strict=True)]


def joined(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Iterator[Pair]:
    """Pairs to copy the second into the first: those that lie at the same distances on both sides are one pair."""
    run: list[Pair] = []
    for pair in zip(to, source, strict=True):
        if not pair[0].numel():
            continue
        if run and not (_is_plain(*run[-1]) and _is_plain(*pair) and _goes_on(run[-1], pair)):
            yield _as_one(run)
            run = []
        run.append(pair)
    if run:
        yield _as_one(run)


def _is_plain(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy of the bytes is a copy of the tensor."""
    return to.dtype == source.dtype and to.stride() == source.stride() == dense_strides(to)


def _goes_on(last: Pair, pair: Pair) -> bool:
    """Whether a pair lies behind another in the same two blocks of memory, as far on one side as on the other."""
    to, source = (b.data_ptr() - a.data_ptr() for a, b in zip(last, pair, strict=True))
    blocks = [(a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()) for a, b in zip(last, pair, strict=True)]
    return all(a == b for a, b in blocks) and to == source >= bytes_of(last[0])


def _as_one(run: Sequence[Pair]) -> Pair:
    """A run as bytes, with what lies between; a pair alone as it is."""
    (to, source), last = run[0], run[-1][0]
    if len(run) == 1:
        return to, source
    size = last.data_ptr() - to.data_ptr() + bytes_of(last)
    return _bytes(to, size), _bytes(source, size)


def _bytes(x: torch.Tensor, size: int) -> torch.Tensor:
    """The bytes of memory from where a tensor begins."""
    start = x.storage_offset() * x.element_size()
    made = torch.empty(0, dtype=torch.uint8, device=x.device)
    return made.set_(x.untyped_storage(), start, (size,), (1,))  # type: ignore[call-overload]


def bytes_of(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
