"""`as_strided` of a dense tensor, raised to views, slices and windows, which leave most dims alone.

The memory of a dense tensor is one row, in which element i of the result lies at start + sum_j i_j stride_j. The sizes
of dims that multiply to the row's length are the digits of such a place. Chosen so that no sum within a digit carries
to the next one, each digit is read by the strides that lie in it: by one (a slice) or by several (a window).

    x [6,8,4] contiguous, size (6,3,4,4), stride (32,8,4,1): digits 6, 8 and 4, read by (32), (8,4) and (1)
    x.unfold(1, size=4, step=2).permute(0,1,3,2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from autopar.capture.ops.canonical import memory_order

Tensor = torch.Tensor


@dataclass(slots=True)
class _Digit:
    """What of a place counts `unit` elements, up to the unit of the next digit (`end`).

    `start` and `extent`: the part that is read. `reads`: (step, size, dim of the result), from the smallest step.
    """

    unit: int
    end: int
    start: int = 0
    extent: int = 1
    reads: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.end // self.unit

    def ends(self, end: int, start: int) -> bool:
        """End it at `end` if what is read then fits in it; `start` is the place of the first element."""
        if end % self.unit or start // self.unit % (end // self.unit) + self.extent > end // self.unit:
            return False
        self.end = end
        self.start = start // self.unit % self.size
        return True


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """Write strides as views of a dense tensor. What reads memory beside it, or carries, is left to torch."""
    order = memory_order(x)
    start = 0 if storage_offset is None else int(storage_offset - x.storage_offset())
    if order is None or not 0 <= start < x.numel() or 0 in size or len(size) != len(stride):
        return NotImplemented
    digits = _digits(x.numel(), size, stride, start)
    if digits is None:
        return NotImplemented
    value, dims = _read(x.permute(order).view([digit.size for digit in digits]), digits)
    value = value.permute([dims.index(dim) for dim in sorted(dims)])
    for dim in range(len(size)):
        value = value if dim in dims else value.unsqueeze(dim)
    return value.expand(tuple(size))


def _digits(count: int, size: Sequence[int], stride: Sequence[int], start: int) -> list[_Digit] | None:
    """The digits of a row of `count`, from the largest; None if there are none for these strides."""
    found = [_Digit(1, count)]
    for step, dim in sorted((step, dim) for dim, step in enumerate(stride) if step and size[dim] > 1):
        if step > found[-1].unit and count % step == 0 and found[-1].ends(step, start):
            found.append(_Digit(step, count))
        last = found[-1]
        if step % last.unit:
            return None
        last.reads.append((step // last.unit, size[dim], dim))
        last.extent += step // last.unit * (size[dim] - 1)
    return found[::-1] if found[-1].ends(count, start) else None


def _read(value: Tensor, digits: list[_Digit]) -> tuple[Tensor, list[int]]:
    """What is read of `value`, which has a dim a digit, and which dim of the result each of its dims is."""
    dims: list[int] = []
    windows: list[int] = []  # the window of `unfold` is the last dim, behind the digits that are still to be read
    for digit in digits:
        at, extent = len(dims), digit.extent
        if not digit.reads:
            value = value.select(at, digit.start)
            continue
        value = value.narrow(at, digit.start, extent)
        (_, _, outer), *inner = reversed(digit.reads)
        dims.append(outer)
        windows += [dim for _, _, dim in inner]
        for step, size, _ in digit.reads[:0:-1]:
            extent -= step * (size - 1)
            value = value.unfold(at, extent, step)
            at = value.ndim - 1
        value = value[(slice(None),) * at + (slice(None, None, digit.reads[0][0]),)]
    return value, dims + windows


def average_pool_of(dims: int) -> Any:
    """`adaptive_avg_pool1d`, `2d`, `3d`: to one window they are a mean. torch's own then restrides the result, in which
    nothing can be split."""

    def pool(x: Tensor, output_size: int | Sequence[int | None]) -> Any:
        sizes = (output_size,) * dims if isinstance(output_size, int) else tuple(output_size)
        if sizes != (1,) * dims or x.ndim <= dims:
            return NotImplemented
        return x.mean(tuple(range(-dims, 0)), keepdim=True)

    return pool


def stft(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, center: bool = True, pad_mode: str = "reflect", normalized: bool = False,
    onesided: bool | None = None, return_complex: bool | None = None, align_to_window: bool | None = None,
) -> Any:  # fmt: skip
    """Raise torch.stft to windows and their transforms: a row of the batch hangs on itself alone."""
    hop, win = hop_length or n_fft // 4, win_length or n_fft
    is_plain = not input.is_complex() and not (window is not None and window.is_complex()) and align_to_window is None
    fits = hop > 0 and 0 < win <= n_fft and (window is None or window.shape == (win,))
    if input.ndim not in (1, 2) or return_complex is None or not is_plain or not fits:
        return NotImplemented
    x = input if input.ndim == 2 else input.unsqueeze(0)
    if center:
        x = F.pad(x.unsqueeze(1), (n_fft // 2, n_fft // 2), pad_mode).squeeze(1)
    if x.shape[-1] < n_fft:
        return NotImplemented
    frames = x.unfold(-1, n_fft, hop)
    frames = frames if window is None and win == n_fft else frames * _padded(window, win, n_fft, input)
    norm = "ortho" if normalized else "backward"
    is_half = onesided is None or onesided
    found = torch.fft.rfft(frames, norm=norm) if is_half else torch.fft.fft(frames, norm=norm)
    found = found.transpose(1, 2) if input.ndim == 2 else found.squeeze(0).T
    return found if return_complex else torch.view_as_real(found)


def istft(
    input: Tensor, n_fft: int, hop_length: int | None = None, win_length: int | None = None,
    window: Tensor | None = None, center: bool = True, normalized: bool = False, onesided: bool | None = None,
    length: int | None = None, return_complex: bool = False,
) -> Any:  # fmt: skip
    """Raise torch.istft to the sum of its windows, over the sum of their squares. torch's own reads whether that is
    nowhere zero, and raises; here the result is not finite there."""
    is_turned = window is not None and window.is_complex()
    if return_complex or not input.is_complex() or input.ndim not in (2, 3) or is_turned:
        return NotImplemented
    hop, win = hop_length or n_fft // 4, win_length or n_fft
    window = _padded(window, win, n_fft, input.real)
    frames = (input if input.ndim == 3 else input.unsqueeze(0)).transpose(1, 2)
    norm = "ortho" if normalized else "backward"
    # Of a spectrum with both sides torch reads one: the other is taken to be its mirror image.
    values = torch.fft.irfft(frames[..., : n_fft // 2 + 1], n_fft, norm=norm)
    squares = (window * window).expand(1, frames.shape[1], n_fft)
    y, weight = _overlapped(values * window, hop), _overlapped(squares, hop)
    start, total = n_fft // 2 if center else 0, y.shape[-1]
    end = start + length if length is not None else total - start
    y = y[:, start:end] / weight[:, start:end]
    y = F.pad(y, (0, end - total)) if end > total else y
    return y if input.ndim == 3 else y.squeeze(0)


def _padded(window: Tensor | None, win: int, n_fft: int, like: Tensor) -> Tensor:
    """The window of `win` elements, of ones if there is none, in the middle of `n_fft`."""
    window = torch.ones(win, dtype=like.dtype, device=like.device) if window is None else window
    return F.pad(window, ((n_fft - win) // 2, n_fft - win - (n_fft - win) // 2))


def _overlapped(frames: Tensor, hop: int) -> Tensor:
    """The sum of frames [batch, frames, n] that begin `hop` after one another."""
    _, count, size = frames.shape
    total = size + hop * (count - 1)
    return F.fold(frames.transpose(1, 2), (1, total), (1, size), stride=(1, hop)).flatten(1)
