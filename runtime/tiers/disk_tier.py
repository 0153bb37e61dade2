"""States and parameters that wait on a disk: memory mapped from files without a name, and copies in threads.

Such a file is gone when its process is, however that ends: nothing is left to be removed. What lies in it is a tensor
like any other, so `state_dict()` and checkpoints read it; the system keeps as much of it in memory as there is room.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.ir.ops.measure import human
from autopar.runtime.kernels import host
from autopar.runtime.tiers.host_tier import BACK, OUT, HostPool, HostTier, memory_of
from autopar.runtime.tiers.side_by_side import bytes_of

ANOTHER = "another folder (with mesh='auto' by disk_folder of the machine)"


class ThreadQueues:
    """Copies that go on in a thread for each way: who reads a file waits for the disk. api: `torch.cuda`, or what takes
    its place; None where both sides are of the host's memory."""

    def __init__(self, device: torch.device, api: Any = None) -> None:
        self.api, self.device = api, device
        self._threads = {way: ThreadPoolExecutor(1, f"autopar-{way}") for way in (OUT, BACK)}
        self._streams = {} if api is None else {way: api.Stream(device) for way in (OUT, BACK)}
        self._last: dict[str, Future[None]] = {}

    def copy(self, way: str, move: Callable[[], None], after: Iterable[Future[None]] = ()) -> Future[None]:
        """Start a copy behind what is computed so far, and behind those that are given; what its end is known by."""
        begun = None if self.api is None else self.api.current_stream(self.device).record_event()
        self._last[way] = self._threads[way].submit(self._moved, way, move, begun, list(after))
        return self._last[way]

    def _moved(self, way: str, move: Callable[[], None], begun: Any, after: Iterable[Future[None]]) -> None:
        for event in after:
            event.result()
        with torch.no_grad():
            if begun is None:
                return move()
            stream = self._streams[way]
            stream.wait_event(begun)
            with self.api.stream(stream):
                move()
            stream.synchronize()

    def wait(self, event: Future[None]) -> None:
        """Wait for the end of a copy; raises what it raised."""
        event.result()

    def end(self) -> None:
        """Wait for all copies."""
        for event in self._last.values():
            event.exception()

    finish = end


def disk_tier(device: torch.device, folder: Path) -> HostTier:
    """The files of a folder, for a rank whose states step on a device."""
    api = None if host.on_host(device) else torch.cuda
    pool, queues = HostPool(partial(mapped, folder)), ThreadQueues(device, api)
    return HostTier(pool, queues, device, needs_room=partial(check_room, folder))


def parameter_tier(device: torch.device, folder: Path) -> HostTier:
    """The host's memory for a rank that computes on a device, with gradients in files, as the parameters are."""
    api = None if host.on_host(device) else torch.cuda
    return HostTier(HostPool(memory_of(device), partial(mapped, folder)), ThreadQueues(device, api), device)


def in_file(part: torch.Tensor, folder: Path) -> torch.Tensor:
    """A tensor in memory that is mapped from a file."""
    return mapped(folder, bytes_of(part)).view(part.dtype).view(part.shape).copy_(part)


def mapped(folder: Path, size: int) -> torch.Tensor:
    """So many bytes of a new file, which has no name. They are taken from the disk at once: a write that finds none
    later would end the process. Raises PlanError where there is no room."""
    if not size:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    except OSError as error:
        raise PlanError(
            f"offload_dir='{folder}': {size} bytes cannot lie there: {error.strerror or error}, "
            f"{human(room(folder))} are free. Free some, or name {ANOTHER}."
        ) from error


def check_room(folder: Path, whose: str, needs: int) -> None:
    """Raise PlanError where a disk has fewer free bytes than states need."""
    if needs > (free := room(folder)):
        raise PlanError(
            f"offload_dir='{folder}': the states of {whose} take {needs} bytes on this node, and {free} are free "
            f"there. No weight has changed. Free some, name {ANOTHER}, split states by zero=1 over more nodes, or "
            f'let fewer wait: offload={{"optimizer": 0.5}}.'
        )


def check_room_of_parameters(folder: Path, parameters: int) -> None:
    """Raise PlanError where a disk has fewer free bytes than the parameters of a node, in so many, and their gradients
    take at least."""
    if 2 * parameters > (free := room(folder)):
        raise PlanError(
            f"offload_dir='{folder}': parameters and their gradients take {2 * parameters} bytes on this node, and "
            f"{free} are free there. Free some, name {ANOTHER}, or split them by zero=3 over more "
            "nodes."
        )


def room(folder: Path) -> int:
    """The bytes that are free on the disk of a folder."""
    return shutil.disk_usage(folder).free if folder.is_dir() else 0


def check_folder(folder: Path) -> None:
    """Raise PlanError for a folder that is not there, or takes no files."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, mmap.PAGESIZE)
    except OSError as error:
        raise PlanError(
            f"offload_dir='{folder}': states cannot lie there: {error.strerror or error}. Make it on each node, on a "
            f"disk of its own, with the right to write there."
        ) from error
