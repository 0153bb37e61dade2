"""Local processes, started and watched by torchrun's elastic launcher."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar import errors
from autopar.capture.refusals.location import is_user_file
from autopar.checkpoint.checkpointer import SIGNALS
from autopar.cli.arguments.stopped import Stopped
from autopar.ir.mesh import Mesh
from autopar.parallel.session.session import MAPPED
from autopar.runtime.ranks.lost import IN_VAIN, LOST
from autopar.settings import Settings

LINGER_S = 2  # a rank that waited in vain stays for so long: the others may be about to say where they wait
ASK_S, GRACE_S = 1, 4  # after its words, others that said nothing are asked where they stand, and are ended by force
PERIOD_S = 0.25
RANK = Path(__file__).with_name("launched.py")  # run by its path, not imported
ASKS = signal.SIGUSR2
ERROR, PID, STACK = "error.json", "pid", "stack"  # files of a rank
# What a signal that nobody sent says of its cause, and what to do; {mapped} is the folder of `offload_dir=`.
CAUSES = {
    "SIGBUS": "Memory that is mapped from a file{mapped} could not be read or written: look whether the disk failed "
    "(dmesg), whether somebody cut a file there, and whether /dev/shm is full.",
    "SIGKILL": "If nobody ended it, the system did for want of memory (dmesg says so): take smaller batches, "
    "recompute= or offload=, or fewer ranks on this machine.",
}


def launch(arguments: Sequence[str], mesh: Mesh, restarts: int = 0) -> str | None:
    """Run `autopar ARGUMENTS` once for every rank of the mesh, on this machine.

    When a process fails or dies the others are ended at once, and all are started again, at most `restarts` times.
    Returns None if all went well, else what went wrong on
    which rank. Raises Stopped, with all ranks ended, where the user ends the run.
    """
    with TemporaryDirectory(prefix="autopar-") as folder:
        return _launch(arguments, mesh, restarts, Path(folder))


def _launch(arguments: Sequence[str], mesh: Mesh, restarts: int, folder: Path) -> str | None:
    """Launch as `launch` does; `folder` takes what the ranks say of their errors."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=mesh.size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=restarts,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    for name in [name for name in logging.Logger.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it says is said below
    try:
        with _ending_hung(folder):
            # -P: what ranks import is not what lies beside the file
            command = ("-P", str(RANK), str(os.getpid()))
            elastic_launch(config, sys.executable)(*command, *arguments)
    except ChildFailedError as error:
        asked = {each.exitcode - 128 for each in error.failures.values()}
        if len(asked) == 1 and asked <= set(SIGNALS):  # ranks that saved and left, as somebody told them
            raise Stopped(mesh.size, signal.Signals(asked.pop())) from None
        failures = {**error.failures, **_reported(folder)}
        return _first_failure(failures, mesh, _left(folder, STACK), _left(folder, MAPPED))
    except SignalException as error:
        raise Stopped(mesh.size, error.sigval) from None
    return None


def report(error: Exception) -> None:
    """In a worker: leave the error for the launcher, which shows it once, with the rank.

    In the form of torchrun's error files. The file appears whole: a worker that is ended while it writes leaves none.
    """
    file = Settings.read().error_file
    if file is None:
        return
    said = {
        "message": "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]),
        "extraInfo": {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))},
    }
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"message": said}))
    draft.replace(file)
    if IN_VAIN in said["message"]:
        time.sleep(LINGER_S)


def stand_ready() -> None:
    """In a worker: leave the number of its process for the launcher, which asks one that hangs where it stands, and
    ends by force what does not end. One that a fault ends says where it stood."""
    file = Settings.read().error_file
    if file is not None:
        stack = file.with_name(STACK).open("w")
        faulthandler.register(ASKS, stack, all_threads=False)
        if not faulthandler.is_enabled():
            faulthandler.enable(stack)
        file.with_name(PID).write_text(str(os.getpid()))


@contextmanager
def _ending_hung(folder: Path) -> Iterator[None]:
    """Meanwhile look for ranks that others waited for in vain: ask where they stand, and kill them in the end. torchrun
    asks a process to end, and kills one that is stopped or hangs half a minute later."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PERIOD_S):
            last = _last_attempt(folder)
            said = [file for file in last.rglob(ERROR) if IN_VAIN in file.read_text()]
            since = max((time.time() - file.stat().st_mtime for file in said), default=0.0)
            for file in last.rglob(PID) if since > ASK_S else ():
                if since > GRACE_S:
                    _signal_own(file, signal.SIGKILL)
                elif not file.with_name(ERROR).exists() and not file.with_name(STACK).read_text():
                    _signal_own(file, ASKS)

    watcher = threading.Thread(target=watch, name="autopar-hung", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _signal_own(file: Path, wanted: signal.Signals) -> None:
    """Send a signal to a process that is a child of this one and has not ended; its number may be another's by now."""
    with suppress(OSError, ValueError):
        pid = int(file.read_text())
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, wanted)


def _last_attempt(folder: Path) -> Path:
    """Where the ranks leave what they say, after the last restart; those before it were made good."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return attempts[-1] if attempts else folder


def _reported(folder: Path) -> dict[int, ProcessFailure]:
    """What each rank said of itself, by rank.

    torchrun lists only the ranks that had ended when it looked. One that raised and is still closing its connections
    is not among them, though those that lost it may be.
    """
    files = {int(file.parent.name): file for file in _last_attempt(folder).rglob(ERROR)}
    return {rank: ProcessFailure(rank, pid=0, exitcode=1, error_file=str(file)) for rank, file in files.items()}


def _left(folder: Path, name: str) -> dict[int, str]:
    """What each rank left in its file of a name, by rank."""
    return {int(file.parent.name): file.read_text() for file in _last_attempt(folder).rglob(name)}


def _first_failure(
    failures: Mapping[int, ProcessFailure],
    mesh: Mesh,
    stacks: Mapping[int, str] = MappingProxyType({}),
    mapped: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """The root cause: what a rank said of itself first, before those that lost their peers because of it.
    stacks: where ranks that were asked, or that a fault ended, stood. mapped: folders of the files that their memory is
    mapped from."""
    waited = {rank: text for rank, each in failures.items() if LOST in (text := _said(each))}
    is_hang = any(IN_VAIN in text for text in waited.values())
    ended = {"SIGTERM", "SIGKILL"} if is_hang else {"SIGTERM"}  # by the launcher

    def is_consequence(rank: int) -> bool:
        return failures[rank].signal_name() in ended or rank in waited

    rank = min(failures, key=lambda rank: (is_consequence(rank), failures[rank].timestamp))
    failure = failures[rank]
    if is_hang and is_consequence(rank):
        return _hung(waited, stacks, mesh)
    name = _name(rank, mesh)
    if failure.exitcode < 0:
        died = (
            f"{name} died: killed by {failure.signal_name()}{_place(stacks.get(rank, ''))}. The other ranks were ended."
        )
        of = f" of offload_dir='{mapped[rank]}'" if rank in mapped else ""
        cause = CAUSES.get(failure.signal_name(), "").format(mapped=of)
        return f"{died} {cause}".rstrip()
    text = _said(failure)
    if not text:
        return f"{name} failed with exit code {failure.exitcode}; see its output above."
    return f"{name} failed: {text}"


def _hung(waited: Mapping[int, str], stacks: Mapping[int, str], mesh: Mesh) -> str:
    """Name the ranks that said nothing while others waited in vain, and where all of them stood."""
    silent = [rank for rank in range(mesh.size) if rank not in waited]
    hung = "; ".join(f"{_name(rank, mesh)} hung{_place(stacks.get(rank, ''))}" for rank in silent)
    lines = [waited[rank].partition("\n")[0] for rank in sorted(waited)]
    stood = "; ".join(line.replace(f" {LOST}", "", 1).rstrip(".") for line in lines)
    who = f"{hung}. The other ranks waited" if silent else "ranks waited for each other"
    return f"{who} in vain until the timeout: {stood}. All ranks were ended."


def _place(stack: str) -> str:
    """Where a stack that `faulthandler` wrote stands, in the innermost code of the user's that our command called."""
    found = re.findall(r'File "(.*)", line (\d+) in (.*)', stack)
    frames = list(takewhile(lambda frame: Path(frame[0]).parent != Path(__file__).parent, found)) or found
    frame = next((frame for frame in frames if is_user_file(frame[0])), frames[0] if frames else None)
    return f" in {frame[2]}() at {os.path.basename(frame[0])}:{frame[1]}" if frame else ""


def _name(rank: int, mesh: Mesh) -> str:
    return f"rank {rank} ({','.join(f'{axis}={place}' for axis, place in mesh.coord(rank).items())})"


def _said(failure: ProcessFailure) -> str:
    """What the rank reported; empty where it could not."""
    message = failure.error_file_data.get("message", "") if isinstance(failure.error_file_data, dict) else ""
    text = str(message.get("message", "") if isinstance(message, dict) else message).removeprefix("<NONE>")
    name, _, rest = text.partition(": ")
    return rest if isinstance(getattr(errors, name, None), type) else text
