"""N local processes joined over Gloo, kept for many calls: what a function returns or raises, by rank."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

TESTS = Path(__file__).resolve().parent.parent
FOLDERS = (*(each for each in TESTS.iterdir() if each.is_dir()), TESTS, TESTS.parent / "examples", TESTS.parent)
PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama", "warm"]
STARTS = 3  # of a pool whose ranks do not meet


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a call. `error`: `TypeName: message` or None. `died`: the process is gone."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0
    died: bool = False


class Ranks:
    """A pool of ranks. `run` calls `work(rank, *args)` on each at the same time; `work` is a module's function."""

    def __init__(self, size: int) -> None:
        self.size = size
        for _ in range(STARTS):
            self._start()
            if self._have_met():
                return
            self.close()
        raise AssertionError(f"{size} ranks did not meet over Gloo, {STARTS} times")

    def _start(self) -> None:
        context = server()
        self._directory = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._directory.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def _have_met(self) -> bool:
        """Whether torch joined them. CI of 2026-11-29 saw Gloo's first connection closed by its peer, in
        `init_process_group` itself: one rank ended, and the other waited for good. Others meet."""
        left, end = set(self._pipes), time.monotonic() + 45 * crowding()
        while left:
            ready = wait(left, max(0.0, end - time.monotonic()))
            try:
                left -= {pipe for pipe in self._pipes if pipe in ready and pipe.recv_bytes()}
            except (EOFError, ConnectionResetError):
                return False
            if not ready:
                return False
        return True

    def attempt(self, work: Callable[..., Any], *args: Any, timeout: float = 60, fatal: bool = False) -> list[Outcome]:
        """The outcome of every rank. One that is not done in `timeout` seconds is a hang: an AssertionError. They are
        seconds of a machine that does nothing else.

        `fatal`: an error ends its process, as one that nobody catches does.
        """
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((work, args, fatal)))
        found: dict[int, Outcome] = {}
        timeout *= crowding()
        end = time.monotonic() + timeout
        while len(found) < self.size:
            waiting = [rank for rank in range(self.size) if rank not in found]
            ready = wait([self._pipes[rank] for rank in waiting], max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise AssertionError(f"ranks {waiting} hang after {timeout:.0f} s; the others: {found}")
            for rank in waiting:
                if self._pipes[rank] in ready:
                    found[rank] = self._receive(rank)
        return [found[rank] for rank in range(self.size)]

    def run(self, work: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """What every rank returned. An AssertionError with all ranks' errors if any failed."""
        outcomes = self.attempt(work, *args, timeout=timeout)
        failed = [f"rank {i}: {o.error or 'died'}" for i, o in enumerate(outcomes) if o.error or o.died]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._directory.cleanup()

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return Outcome(died=True)


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    """The server imports torch, and compiles a first step, once; its forks start in milliseconds and are warm."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11's server looks nowhere else for our modules
        before = filter(None, [os.environ.get("PYTHONPATH")])
        patch.setenv("PYTHONPATH", os.pathsep.join([*before, *map(str, FOLDERS)]))
        forkserver.ensure_running()
    return context


@contextmanager
def ranks_of(size: int) -> Iterator[Ranks]:
    """A pool for one test: what may break its processes needs its own."""
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def crowding() -> float:
    """How many times longer than alone what runs here may take: the processes that want a core, for each core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def collect_rarely() -> None:
    """What torch and pytest made at their imports stays, and graphs are looked through for circles less often: with the
    usual 700 objects a seventh of the tests' time is spent on it."""
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)
    gc.enable()


def _serve(rank: int, size: int, directory: str, pipe: Connection) -> None:
    collect_rarely()  # what is preloaded is shared: a collection would look at all of it, and copy it, in every rank
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE=str(size))
    # The cores are shared with the ranks of other tests: as where ranks outnumber them, rank 0 compiles for all.
    os.sched_getaffinity = lambda _: {0}
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size, timeout=timedelta(seconds=45)
    )
    pipe.send_bytes(b"met")
    while True:
        work, args, fatal = pickle.loads(pipe.recv_bytes())
        start = time.monotonic()
        try:
            torch.manual_seed(0)
            outcome = Outcome(work(rank, *args), seconds=time.monotonic() - start)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(error=text, seconds=time.monotonic() - start)
        pipe.send_bytes(pickle.dumps(outcome))
        if outcome.error and fatal:
            os._exit(1)
