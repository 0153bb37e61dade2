"""Run what is measured, on the CPU and on a GPU, with clocks that fit the device, as it runs in a step.

There a call finds few of its operands in a cache: weights were last read a micro-batch ago. So a call has several sets
of operands that take turns, up to `SETS` or as many as caches hold, and its last results stay alive beside them. On a
host ranks come to a collective one after the other, from calls that took a bit more or less on each, and its threads
have to get a core: so each collective there follows some milliseconds of products, whose time does not count.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.errors import MachineError
from autopar.machines.measure_calls import Run
from autopar.machines.model import MESSAGE
from autopar.machines.samples import Item, MeasuredCall, MeasuredTransfer
from autopar.machines.workload import products, updates

Transferred = Callable[[MeasuredTransfer], Callable[[], object]]  # a transfer to the call that does it
IN_GRAPH = 20  # calls of a CUDA graph
SETS, CACHES = 8, 64 * 2**20  # of operands; bytes that caches hold
WORK, TIMES = 512, 4  # of the square products before a collective, and how many; before a small call it is one
ON_DISK = 256 * 2**20  # bytes of a file
COPIED, UPDATED = 256 * 2**20, 64 * 2**20  # bytes of a copy, and of a weight that an optimizer updates on the host
BATCHES, LAUNCHES = 10, 20  # of small calls, and how many each has


def _in_turns(item: MeasuredCall, device: torch.device) -> Callable[[], object]:
    """The call on one set of operands after the other."""
    calls = [item.make(device) for _ in range(max(1, min(SETS, math.ceil(CACHES / item.bytes_))))]
    results: list[object] = [None] * len(calls)
    turns = itertools.cycle(range(len(calls)))

    def call() -> None:
        i = next(turns)
        results[i] = calls[i]()

    return call


@dataclass(frozen=True, slots=True)
class HostRunner:
    """Runs items on the cores of this process."""

    device: torch.device
    transfer: Transferred

    def ready(self, item: Item) -> Run:
        if isinstance(item, MeasuredCall):
            call = _in_turns(item, self.device)
            return lambda times: _host_us(call, times)
        move = self.transfer(item)
        if item.kind == MESSAGE:  # the other rank waits for it
            return lambda times: _host_us(move, times)
        work = self._work(TIMES)
        return lambda times: _host_us(move, times, work)

    def launch_us(self) -> float:
        """How much longer a small call takes after a product, which leaves little of torch's code and of the calls'
        operands in the caches, than after a call like itself."""
        x, add, work = torch.ones(1, device="cpu"), torch.ops.aten.add.Tensor, self._work()
        after = min(_host_us(lambda: add(x, x), LAUNCHES, work) for _ in range(BATCHES))
        return max(0.0, after - min(_host_us(lambda: add(x, x), LAUNCHES) for _ in range(BATCHES)))

    def host(self) -> None:
        return None

    def _work(self, times: int = 1) -> Callable[[], object]:
        product = products("float32", (WORK,))[0].make(self.device)
        return lambda: [product() for _ in range(times)]


@dataclass(frozen=True, slots=True)
class CudaRunner:
    """Runs items on a GPU. Calls are recorded in a CUDA graph, so that the time of the device is seen without that of
    the host, which a step hides behind it; collectives are launched one by one."""

    device: torch.device
    transfer: Transferred

    def ready(self, item: Item) -> Run:
        if isinstance(item, MeasuredTransfer):
            call = self.transfer(item)
            return lambda times: _device_us(call, times)
        return _Recorded(item, self.device)

    def launch_us(self) -> float:
        """The host's time to launch a small call: the least of several hundreds, none of which waits."""
        x, add = torch.ones(1, device=self.device), torch.ops.aten.add.Tensor
        found = []
        for _ in range(20):
            torch.cuda.synchronize(self.device)
            found.append(_host_us(lambda: add(x, x), 5 * LAUNCHES))
        return min(found)

    def host(self) -> tuple[float, float]:
        """Time a copy to the host's memory and one back at once, as all ranks do, and an optimizer on the cores of this
        process: bytes a second of each."""
        here, there = (torch.empty(COPIED, dtype=torch.uint8, device=self.device) for _ in range(2))
        out, back = (torch.empty(COPIED, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(2))
        side = torch.cuda.Stream(self.device)

        def both() -> None:
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                there.copy_(back, non_blocking=True)
            out.copy_(here, non_blocking=True)
            torch.cuda.current_stream(self.device).wait_stream(side)

        update = updates("float32", (UPDATED,))[0]
        step = update.make(torch.device("cpu"))
        step()
        both()
        speeds = [(COPIED / _device_us(both, 1), update.bytes_ / _host_us(step, 1)) for _ in range(BATCHES)]
        to_host, updated = (statistics.median(each) * 1e6 for each in zip(*speeds, strict=True))
        return to_host, updated


def disk_speed(folder: Path) -> float:
    """Bytes a second in which a file of a folder is written and read again, each the half of it: to the disk, past what
    the system keeps in memory. Raises MachineError for a folder that takes no file."""
    block = memoryview(bytearray(ON_DISK))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            start = time.perf_counter()
            file.write(block)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            file.readinto(block)
            return 2 * ON_DISK / (time.perf_counter() - start)
    except OSError as error:
        raise MachineError(f"--disk {folder}: no file can be written there: {error.strerror or error}.") from error


class _Recorded:
    """A call in a CUDA graph, made at its first use by many."""

    def __init__(self, item: MeasuredCall, device: torch.device) -> None:
        self._item, self._call = item, _in_turns(item, device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, times: int) -> float:
        with _products_of(self._item.dtype):
            if times == 1:
                return _device_us(self._call, 1)
            graph = self._graph = self._graph or _graph_of(self._call)
        rounds = max(1, times // IN_GRAPH)
        return _device_us(graph.replay, rounds) / IN_GRAPH


def _graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """So many calls, recorded; on a stream of its own first, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    return graph


@contextmanager
def _products_of(dtype: str) -> Iterator[None]:
    """Let products of float32 be of TF32 where that is measured, and as before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tfloat32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _host_us(call: Callable[[], object], times: int, before: Callable[[], object] | None = None) -> float:
    """before: what is done before each call, in time that does not count."""
    if before is None:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times * 1e6
    spent = 0.0
    for _ in range(times):
        before()
        start = time.perf_counter()
        call()
        spent += time.perf_counter() - start
    return spent / times * 1e6


def _device_us(call: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times * 1e3
