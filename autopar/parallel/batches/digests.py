"""Digest the data of a batch, so cheaply that every step can compare it between ranks.

Tensors are read as 64-bit words and summed with an odd factor for each place, modulo 2^64: one word that differs makes
another sum, and so do words in another order. Of a long tensor most steps read a sample, whose places move from step to
step; every `EVERY` steps all of it is read. What lies on a GPU is read there, and compared in the next call: its number
has come to the host by then, for which this call would wait, and with it for all that the GPU has to do.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autopar.capture.inputs.containers import Parts
from autopar.ir.mesh import Mesh
from autopar.parallel.batches.local_batch import data_part
from autopar.runtime.kernels import host
from autopar.runtime.ranks.process_groups import default_group
from autopar.torch_compat import FakeTensor

SAMPLE = 1 << 14  # elements of a tensor that each step reads
EVERY = 100  # calls after which all elements are read
_CHUNK = 1 << 20  # words at a time
_FACTOR, _FOLD = 0x1E3779B97F4A7C15, 0x5851F42D4C957F2D  # any large odd numbers
_MODULUS = 1 << 62  # half of what 64 bits hold, so that the negative number is there too
_NOTHING = -_MODULUS  # less than any digest and its negative


@dataclass(frozen=True, slots=True)
class _Sent:
    """Numbers on their way from a device, each of the tensor of a path."""

    paths: Sequence[str]
    read: Callable[[], list[int]]

    def numbers(self) -> Iterator[tuple[str, int]]:
        return zip(self.paths, self.read(), strict=True)


class Digests:
    """The digests of one rank's batches, each with the place that it is compared in: ranks of one data coordinate hold
    the same data, or all of them with whole batches. What all ranks share of local batches is compared in the last
    place."""

    def __init__(self, mesh: Mesh, coord: Mapping[str, int], is_local: bool) -> None:
        self.is_local, self.part = is_local, data_part(coord) if is_local else {}
        self._place, self._places = 0, 1
        for axis, place in self.part.items():
            self._place, self._places = self._place * mesh[axis] + place, self._places * mesh[axis]
        self._calls = 0
        self._own, self._shared = _Digest(), _Digest()

    @property
    def late(self) -> dict[str, int]:
        """Digests of the call before that this one compared, by the path of the tensor."""
        return self._own.late

    @property
    def late_shared(self) -> dict[str, int]:
        """Late digests of what all ranks share of local batches."""
        return self._shared.late

    def vector(self, parts: Parts | None, at_once: bool, shared: Container[int] = ()) -> list[int] | None:
        """What the maximum over all ranks is taken of: by place the digest and its negative; None for one rank alone.
        parts: None for a batch that was refused. at_once: all data is read, and nothing left for the next call. shared:
        the leaves of a local batch that are the same on all ranks."""
        if default_group().size() == 1:
            return None
        call = None if at_once or self._calls % EVERY == 0 else self._calls
        if parts is None:
            self.forget()
        places = self._places + bool(self.part)
        values = [_NOTHING] * (2 * places)
        if parts is not None:
            tensors = [(i, parts.paths[i], leaf) for i, leaf in parts.tensors()]
            own = self._own.of([each for each in tensors if each[0] not in shared], call, at_once)
            values[self._place], values[places + self._place] = own, -own
            if self.part:
                alike = self._shared.of([each for each in tensors if each[0] in shared], call, at_once)
                values[places - 1], values[-1] = alike, -alike
        self._calls += 1
        return values

    def forget(self) -> None:
        """Leave nothing for the next call: this one has failed on every rank."""
        self._own.sent, self._shared.sent = [], []


class _Digest:
    """Digests of tensors that are compared together, from call to call."""

    def __init__(self) -> None:
        self._factors: dict[torch.device, Any] = {}
        self.sent: list[_Sent] = []  # of the call before
        self.late: dict[str, int] = {}

    def of(self, tensors: Sequence[tuple[int, str, torch.Tensor]], call: int | None, at_once: bool) -> int:
        """Digest these data and those of the call before that were on their way. tensors: leaf, path and tensor. call:
        of the sample that is read; None reads all."""
        total, self.sent, before = 0, [], self.sent
        on_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for leaf, path, tensor in tensors:
            if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
                continue
            for chunk, words in enumerate(_chunks(tensor.detach(), call)):
                weight = ((leaf << 32) + chunk) * _FACTOR | 1
                found = self._sum(words)
                if isinstance(found, torch.Tensor):
                    known = on_device.setdefault(tensor.device, {})
                    known[path] = known.get(path, 0) + found * _signed(weight)
                else:
                    total += int(found) * weight
        sent = [_Sent(list(found), host.sent(torch.stack(list(found.values())))) for found in on_device.values()]
        self.late = {path: number for each in before for path, number in each.numbers()}
        if at_once:
            total += sum(number for each in sent for _, number in each.numbers())
        else:
            self.sent = sent
        return (total + sum(self.late.values())) % _MODULUS

    def _sum(self, words: Any) -> Any:
        """Sum a numpy array or a tensor: numpy calls cost a third, and GPUs have torch."""
        device = words.device if isinstance(words, torch.Tensor) else torch.device("cpu")
        known = self._factors.get(device)
        if known is None or len(known) < len(words):
            factors = _odd_numbers(max(len(words), SAMPLE))
            known = factors if host.on_host(device) else torch.from_numpy(factors).to(device)
            self._factors[device] = known
        mixed = words >> 32  # of a float that is a round number only high bits differ: bring them down
        mixed *= _FOLD
        mixed += words
        mixed *= known[: len(words)]
        return mixed.sum()


def _odd_numbers(count: int) -> Any:
    """Without a pattern, so that no regular difference of two batches adds up to nothing (splitmix64)."""
    found = np.arange(1, count + 1, dtype=np.int64) * np.int64(_FACTOR)
    for fold in (_FOLD, _FACTOR):
        found = (found ^ (found >> 30)) * np.int64(fold)
    return (found ^ (found >> 31)) | 1


def _chunks(tensor: torch.Tensor, call: int | None) -> Iterator[Any]:
    """The words of a tensor, or those of a sample of its elements; on the CPU as numpy arrays."""
    if call is not None and tensor.numel() > SAMPLE:
        stride = -(-tensor.numel() // SAMPLE)
        if tensor.is_contiguous():
            tensor = tensor.view(-1)[call % stride :: stride]
        else:
            places = torch.arange(call % stride, tensor.numel(), stride, device=tensor.device)
            tensor = tensor.take(places)
    raw: Any = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    if host.on_host(raw):
        raw = raw.numpy()
    whole = len(raw) // 8 * 8
    words = raw[:whole].view(np.int64 if isinstance(raw, np.ndarray) else torch.int64)
    for start in range(0, len(words), _CHUNK):
        yield words[start : start + _CHUNK]
    if whole < len(raw):
        rest = [int(byte) for byte in raw[whole:]] if isinstance(raw, np.ndarray) else raw[whole:].to(torch.int64)
        yield np.array(rest, np.int64) if isinstance(rest, list) else rest


def _signed(number: int) -> int:
    """The 64 bits of a number as torch reads them."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
