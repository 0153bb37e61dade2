"""Which memory of tensors is alive, and how much: every storage from the op that made it to its end.

It sees what PyTorch's dispatcher sees: the results of ops, in Python or in C++, also those that no Python name holds.
It does not see the scratch memory of a kernel in C++ (a BLAS workspace, the flash kernel's blocks), nor memory that
is no tensor's (numpy, the buffers of Gloo and NCCL).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.torch_compat import TorchDispatchMode, local_of
from autopar.torch_identity import SlotlessDTensor


@dataclass(eq=False, slots=True)
class StorageBlock:
    """One storage. kind: what it was told to be, "" if an op made it. born, end: the numbers of its events."""

    bytes: int
    kind: str = ""
    name: str = ""
    born: int = 0
    end: int | None = None
    place: Any = None  # where it was made


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A block begins or ends. total: the bytes that are alive after it. place: where that was."""

    block: StorageBlock
    total: int
    place: Any


class Tracker(TorchDispatchMode):
    """Watches all tensors of a kind of device while it is entered; blocks end also when it is not.

    grain: bytes to which an allocator rounds up. `place` is set by whoever knows where the program is.
    """

    def __init__(self, device: str = "cpu", grain: int = 1) -> None:
        super().__init__()
        self.device, self.grain = device, grain
        self.place: Any = None
        self.total = 0
        self.events: list[BlockEvent] = []
        self._blocks: dict[int, tuple[StorageBlock, Any]] = {}
        self._others: dict[int, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor, kind: str, name: str = "") -> None:
        """Something that was there before."""
        self._see(tensor, kind, name)

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count some memory: buffers of the host, on a machine that has no other."""
        self._others.update((id(x.untyped_storage()), x) for x in tensors)

    def blocks_of(self, tensors: Iterable[Any]) -> list[StorageBlock]:
        """The blocks in which some tensors lie."""
        found = (self._blocks.get(id(x.untyped_storage())) for x in _plain(tensors))
        return [entry[0] for entry in found if entry is not None]

    def tell(self, tensors: Iterable[Any], kind: str, name: str) -> None:
        """Say what some tensors are that it saw."""
        for block in self.blocks_of(tensors):
            block.kind, block.name = kind, name

    def peak(self, start: int = 0, stop: int | None = None) -> int:
        """The number of the first event with the most bytes, among those from `start` on; -1 if there is none."""
        chosen = range(start, len(self.events) if stop is None else stop)
        return max(chosen, key=lambda i: (self.events[i].total, -i), default=-1)

    def peak_bytes(self, start: int = 0, stop: int | None = None) -> int:
        """The most bytes that were alive, before or after any of those events."""
        before = self.events[start - 1].total if start else 0
        at = self.peak(start, stop)
        return max(before, self.events[at].total if at >= 0 else 0)

    def alive(self, at: int) -> list[StorageBlock]:
        """What was alive after an event, in the order in which it was made."""
        made = (event.block for i, event in enumerate(self.events[: at + 1]) if event.block.born == i)
        return [block for block in made if block.end is None or block.end > at]

    def since(self, start: int) -> list[StorageBlock]:
        """What is alive now and was made after so many events."""
        return [block for block, _ in self._blocks.values() if block.born >= start]

    def close(self) -> None:
        """Look at nothing any more."""
        self._blocks.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, (DTensor, SlotlessDTensor)) for kind in types):
            return NotImplemented  # DTensor goes on with its local parts, which come here again
        out = self.compute(func, args, kwargs)
        for tensor in _plain((out,)):
            self._see(tensor)
        return out

    def compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an op gives."""
        return func(*args, **kwargs)

    def _see(self, tensor: torch.Tensor, kind: str = "", name: str = "") -> None:
        tensor = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        if tensor.device.type != self.device or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if id(storage) in self._others:
            return
        size = -(-storage.nbytes() // self.grain) * self.grain
        known = self._blocks.get(id(storage))
        if known is not None:
            block = known[0]
            if block.bytes != size:  # resized
                self.total, block.bytes = self.total + size - block.bytes, size
                self.events.append(BlockEvent(block, self.total, self.place))
            return
        block = StorageBlock(size, kind, name, len(self.events), None, self.place)
        # torch keeps the Python object of a storage for as long as the storage lives, so that its id stays its own.
        self._blocks[id(storage)] = block, weakref.ref(storage, _Ending(self, id(storage)))
        self.total += size
        self.events.append(BlockEvent(block, self.total, self.place))

    def end(self, key: int) -> None:
        """The storage with this id is gone."""
        block, _ = self._blocks.pop(key)
        self.total -= block.bytes
        block.end = len(self.events)
        self.events.append(BlockEvent(block, self.total, self.place))


@dataclass(frozen=True, slots=True)
class _Ending:
    """Told of a storage's end. It must not be one of those who keep the tracker alive."""

    tracker: Any
    key: int

    def __call__(self, _: Any) -> None:
        self.tracker.end(self.key)


def _plain(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among what an op returned, local parts in place of what wraps them."""
    for value in values:
        if isinstance(value, DTensor):
            yield local_of(value)
        elif isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _plain(value)
