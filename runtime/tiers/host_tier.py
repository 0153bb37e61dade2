"""Values that wait in the host's memory: a pool of buffers, and copies out and back that go on beside the computation.

A copy is two ops of the program, its start and its `wait`. On CUDA it moves in a stream of its own, one for each way,
which first waits for the stream that computes (the current one, asked each time); `wait` lets that one wait for the
copy. So every order is an edge of the graph, and no memory is in use unknown to an allocator:

    what is copied out    is held until its `wait`, behind which the computing stream has the copy's end before it
    a copy back           waits for the end of its own copy out, whether or not the host has seen it
    what is copied into   is allocated where the program is, and the copy begins behind all that was computed there
    a buffer              is free when nothing can load it any more; the next copy into it begins behind the computing
                          stream, which has waited for the last load

On a CPU a copy is done when it has started, and only when memory is given back is as on CUDA.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from autopar.errors import PlanError
from autopar.ir.ops.ops import TO_HOST
from autopar.ir.schedule import IN, Instruction
from autopar.runtime.tiers.side_by_side import bytes_of, dense_strides, joined, side_by_side

Make = Callable[[int], "torch.Tensor | None"]
LARGE = 2**20  # bytes of what is pinned alone


class Queues(Protocol):
    """Where copies go on: out and back, each way in its own order. `copy` and `after` as of `CopyQueues`."""

    def copy(self, way: str, move: Callable[[], None], after: Iterable[Any] = ()) -> Any: ...

    def wait(self, event: Any) -> None: ...

    def end(self) -> None: ...

    def finish(self) -> None: ...


class AtOnce:
    """Copies that are done when they have started."""

    def copy(self, way: str, move: Callable[[], None], after: Iterable[Any] = ()) -> None:
        move()

    def wait(self, event: None) -> None:
        return

    def end(self) -> None:
        return

    def finish(self) -> None:
        return


class CopyQueues:
    """Two streams of a device for as long as this lives. api: `torch.cuda`, or what takes its place."""

    def __init__(self, api: Any, device: torch.device) -> None:
        self.api, self.device = api, device
        self._streams = {way: api.Stream(device) for way in (OUT, BACK)}

    def copy(self, way: str, move: Callable[[], None], after: Iterable[Any] = ()) -> Any:
        """Start a copy behind what is computed so far, and behind the events that are given; the event of its end."""
        stream = self._streams[way]
        stream.wait_event(self.api.current_stream(self.device).record_event())
        for event in after:
            stream.wait_event(event)
        with self.api.stream(stream):
            move()
        return stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the stream that computes wait for the end of a copy."""
        self.api.current_stream(self.device).wait_event(event)

    def end(self) -> None:
        """Let it wait for all copies, of a step that ends before it has awaited them."""
        for stream in self._streams.values():
            self.wait(stream.record_event())

    def finish(self) -> None:
        """Let the host wait for all copies: of what it reads, or writes, itself."""
        for stream in self._streams.values():
            stream.synchronize()


OUT, BACK = "out", "back"


@dataclass(slots=True)
class HostPool:
    """Buffers by size, used again. make: gives one of so many bytes; None where tensors have no data. lends: the same,
    of what is a user's, where that is to lie elsewhere.

    held, peak: the bytes in use. made: of all buffers. missed: buffers that a step had to make, since the pool was not
    filled. moved: the bytes of copies, by their way. lasting: bytes that stay from step to step, and lie in no buffer.
    is_read: whether this step copied what the host itself reads or writes between steps. told: of memory that is lent.
    """

    make: Make
    lends: Make | None = None
    held: int = 0
    peak: int = 0
    made: int = 0
    missed: int = 0
    lasting: int = 0
    moved: dict[str, int] = field(default_factory=lambda: {OUT: 0, BACK: 0})
    is_read: bool = False
    told: Callable[[torch.Tensor], None] = lambda lent: None
    counts: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _free: dict[int, list[torch.Tensor | None]] = field(default_factory=lambda: defaultdict(list))
    _lent: dict[int, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    @property
    def buffers(self) -> Iterable[torch.Tensor]:
        """The buffers that nothing uses."""
        return (one for free in self._free.values() for one in free if one is not None)

    def fill(self, counts: Mapping[int, int]) -> None:
        """Have so many buffers of each size."""
        for size, count in counts.items():
            while self.counts[size] < count:
                self._free[size].append(self._made(size))

    def take(self, size: int) -> torch.Tensor | None:
        free = self._free[size]
        if not free:
            self.missed += 1
            free.append(self._made(size))
        self.held += size
        self.peak = max(self.peak, self.held)
        return free.pop()

    def give(self, size: int, buffer: torch.Tensor | None) -> None:
        self.held -= size
        self._free[size].append(buffer)

    def lend(self, size: int) -> torch.Tensor | None:
        """Lend memory to a tensor of a user for as long as that lives; then it is lent again. So gradients of each step
        come into the memory of those before, and pinning it is done once."""
        if not size:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        known = self._lent[size]
        buffer = known.pop() if known else (self.lends or self.make)(size)
        if buffer is None:
            return None
        lease = (ctypes.c_uint8 * size).from_address(buffer.data_ptr())
        weakref.finalize(lease, known.append, buffer).atexit = False
        lent = torch.frombuffer(lease, dtype=torch.uint8)
        self.told(lent)
        return lent

    def _made(self, size: int) -> torch.Tensor | None:
        self.counts[size] += 1
        self.made += size
        return self.make(size)


class HostValue:
    """A value in the host's memory, which its buffer is given back of at its end. stored: the end of its copy out."""

    __slots__ = ("__weakref__", "buffer", "device", "dtype", "pool", "shape", "size", "stored", "strides")

    def __init__(self, x: torch.Tensor, pool: HostPool) -> None:
        self.shape, self.dtype, self.device = tuple(x.shape), x.dtype, x.device
        self.strides = dense_strides(x)
        self.size = bytes_of(x)
        self.pool, self.buffer, self.stored = pool, pool.take(self.size), None

    def __del__(self) -> None:
        self.pool.give(self.size, self.buffer)

    def view(self) -> torch.Tensor | None:
        """The buffer as the value; None where tensors have no data, or the value has none."""
        if self.buffer is None or not self.size:
            return None
        return self.buffer.view(self.dtype).as_strided(self.shape, self.strides)


@dataclass(slots=True)
class Copying:
    """A copy that may be under way. held: what it reads, which stays until it is awaited."""

    queues: Queues
    held: Any
    result: Any
    event: Any

    def wait(self) -> Any:
        """What was copied; memory that it was copied from may be used again."""
        self.queues.wait(self.event)
        result, self.held, self.result = self.result, None, None
        return result


def free_bytes() -> int:
    """The bytes of the host's memory that a process may still take, as Linux says; without end elsewhere."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return sys.maxsize


@dataclass(frozen=True, slots=True)
class HostTier:
    """The host's memory of one rank, as a driver uses it, and what keeps states of optimizers. needs_room: raises
    PlanError where states of somebody take more bytes than there are, of what is counted before it is taken."""

    pool: HostPool
    queues: Queues
    device: torch.device
    has_data: bool = True
    needs_room: Callable[[str, int], None] | None = None

    def fill(self, counts: Mapping[int, int], has: Callable[[], int] = free_bytes) -> None:
        """Have buffers for a step. Raises PlanError if the host has no memory for them. has: tells its free bytes."""
        needs = sum(size * max(0, count - self.pool.counts[size]) for size, count in counts.items())
        if needs > (left := has()):
            raise PlanError(
                f"offload= needs {needs} bytes of the host's memory on this rank, and {left} are free. Move less: a "
                f'smaller part as offload={{"activations": 0.5}}, a smaller batch, or more micro-batches.'
            )
        self.pool.fill(counts)

    def start(self, target: Any, value: Any, stays: bool = False, before: Any = None) -> Copying | None:
        """Start a copy out or back; None of what is not there yet. stays: what is copied out is the user's from the end
        of the step on. before: what it is added to, on the device."""
        if value is None:
            return None
        value = value if before is None else before.add_(value)
        if target is TO_HOST and not stays:
            return self._out(value)
        if isinstance(value, HostValue):
            return self._back(value)
        self.pool.is_read = True
        if target is TO_HOST:
            made = self._lent(value)
            return Copying(self.queues, value, made, self._copied(OUT, [made], [value]))
        made = torch.empty_strided(value.shape, dense_strides(value), dtype=value.dtype, device=self.device)
        return Copying(self.queues, value, made, self._copied(BACK, [made], [value]))

    def copy(self, line: Instruction, values: Iterable[Any]) -> tuple[Copying, ...]:
        """Start the copies of an instruction: activations out, or back."""
        return tuple(self._back(value) if line.op == IN else self._out(value) for value in values)

    def finish(self) -> None:
        """Let the host wait for the copies of this step that it looks at: gradients that left, and parameters, which an
        optimizer on the host writes next."""
        if self.pool.is_read:
            self.queues.finish()
            self.pool.is_read = False

    def lasting(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory of the host in which tensors may stay from step to step, side by side; where tensors have no data some
        of their shapes, on another device than them."""
        self.pool.lasting += sum(map(bytes_of, tensors))
        found = side_by_side(tensors, self.pool.make) if tensors else []
        return found or [without_memory(x.shape, x.dtype, x.device) for x in tensors]

    def _lent(self, x: torch.Tensor) -> torch.Tensor:
        """Memory of the host for a gradient of a user; dense, as gradients are."""
        buffer = self.pool.lend(bytes_of(x))
        return without_memory(x.shape, x.dtype, x.device) if buffer is None else buffer.view(x.dtype).view(x.shape)

    def store(self, tensors: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> Copying:
        """Start to copy tensors into lasting memory, as one copy."""
        return Copying(self.queues, tensors, to, self._copied(OUT, to, tensors))

    def fetch(self, stored: Sequence[torch.Tensor], device: torch.device, after: Iterable[Any]) -> Copying:
        """Start to copy lasting memory back to the device, as one copy. after: the ends of its copies out."""
        made = side_by_side(stored, lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        return Copying(self.queues, stored, made, self._copied(BACK, made, stored, after))

    def _copied(
        self, way: str, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor], after: Iterable[Any] = ()
    ) -> Any:
        """Start to copy some tensors into others; the event of its end."""
        self.pool.moved[way] += sum(map(bytes_of, source))
        return self.queues.copy(way, lambda: self._move(to, source), after)

    def _move(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
        if self.has_data:
            for pair in joined(to, source):
                _copy(*pair)

    def _out(self, x: torch.Tensor) -> Copying:
        made = HostValue(x, self.pool)
        self.pool.moved[OUT] += made.size
        made.stored = self.queues.copy(OUT, lambda: _copy(made.view(), x))
        return Copying(self.queues, x, made, made.stored)

    def _back(self, value: HostValue) -> Copying:
        x = torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)
        self.pool.moved[BACK] += value.size
        event = self.queues.copy(BACK, lambda: _copy(x, value.view()), (value.stored,))
        return Copying(self.queues, value, x, event)


def _copy(to: torch.Tensor | None, source: torch.Tensor | None) -> None:
    if to is not None and source is not None and source.numel():
        to.copy_(source, non_blocking=True)


def in_host(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in memory of the host that copies to a device need no help to read."""
    return pinned(bytes_of(x)).view(x.dtype).view(x.shape).copy_(x) if device.type == "cuda" else x


def memory_of(device: torch.device) -> Make:
    """What makes memory of the host for a rank that computes on a device."""
    return pinned if device.type == "cuda" else _plain


def host_tier(device: torch.device) -> HostTier:
    """The host's memory for a rank that computes on a device."""
    if device.type == "cuda":
        return HostTier(HostPool(pinned), CopyQueues(torch.cuda, device), device)
    return HostTier(HostPool(_plain), AtOnce(), device)


def without_data(device: torch.device) -> HostTier:
    """One for tensors without data of a device: it counts, and has no memory."""
    return HostTier(HostPool(lambda size: None), AtOnce(), device, has_data=False)


def without_memory(shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of a shape on another device than one, which takes no memory there."""
    return torch.empty((), dtype=dtype, device="meta" if device.type == "cpu" else "cpu").expand(tuple(shape))


def pinned(size: int) -> torch.Tensor:
    """So many bytes that copies of a GPU need no help to read. Torch's own allocator rounds up to a power of two, which
    would be up to twice as much: large memory is pinned where it lies."""
    if size >= LARGE:
        made, runtime = _plain(size), torch.cuda.cudart()
        if runtime.cudaHostRegister(made.data_ptr(), size, 0) == runtime.cudaError.success:
            end = weakref.finalize(made.untyped_storage(), runtime.cudaHostUnregister, made.data_ptr())
            end.atexit = False  # the driver has ended by then, or ends with the process
            return made
    return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")


def _plain(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu")
