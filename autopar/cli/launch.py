"""Local processes, started and watched by torchrun's elastic launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar import errors
from autopar.checkpoint.checkpointer import SIGNALS
from autopar.ir.mesh import Mesh
from autopar.runtime.ranks.lost import IN_VAIN, LOST
from autopar.settings import Settings

LINGER_S = 2  # a rank that waited in vain stays for so long: the others may be about to say where they wait
GRACE_S = 4  # from then on to the end by force of the ranks that are still there
PERIOD_S = 0.25
PID = "pid"  # the file with the number of a rank's process


class Stopped(errors.AutoparError):
    """The user stopped the run by a signal, as Ctrl-C does."""

    def __init__(self, ranks: int, by: signal.Signals) -> None:
        super().__init__(f"stopped by {by.name}; all {ranks} ranks were ended.")
        self.by = by

    def end(self) -> None:
        """End this process by the same signal: shells want to know, and torch's own end takes five seconds."""
        sys.stdout.flush()
        sys.stderr.flush()
        signal.signal(self.by, signal.SIG_DFL)
        os.kill(os.getpid(), self.by)


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
            elastic_launch(config, sys.executable)("-m", "autopar.cli.launched", str(os.getpid()), *arguments)
    except ChildFailedError as error:
        asked = {each.exitcode - 128 for each in error.failures.values()}
        if len(asked) == 1 and asked <= set(SIGNALS):  # ranks that saved and left, as somebody told them
            raise Stopped(mesh.size, signal.Signals(asked.pop())) from None
        return _first_failure({**error.failures, **_reported(folder)}, mesh)
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
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))},
    }
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"message": said}))
    draft.replace(file)
    if IN_VAIN in said["message"]:
        time.sleep(LINGER_S)


def leave_pid() -> None:
    """In a worker: leave the number of its process for the launcher, which ends by force what does not end."""
    file = Settings.read().error_file
    if file is not None:
        file.with_name(PID).write_text(str(os.getpid()))


@contextmanager
def _ending_hung(folder: Path) -> Iterator[None]:
    """Meanwhile kill ranks that do not end when others waited for them in vain: torchrun asks a process to end, and one
    that is stopped or hangs does not; it would be half a minute until it is killed."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PERIOD_S):
            files = list(_last_attempt(folder).rglob("error.json"))
            if any(time.time() - file.stat().st_mtime > GRACE_S and IN_VAIN in file.read_text() for file in files):
                for pid in _last_attempt(folder).rglob(PID):
                    _kill_own(int(pid.read_text() or 0))

    watcher = threading.Thread(target=watch, name="autopar-hung", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _kill_own(pid: int) -> None:
    """Kill a process that is a child of this one and has not ended; its number may be another's by now."""
    with suppress(OSError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, signal.SIGKILL)


def _last_attempt(folder: Path) -> Path:
    """Where the ranks leave what they say, after the last restart; those before it were made good."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return attempts[-1] if attempts else folder


def _reported(folder: Path) -> dict[int, ProcessFailure]:
    """What each rank said of itself, by rank.

    torchrun lists only the ranks that had ended when it looked. One that raised and is still closing its connections
    is not among them, though those that lost it may be.
    """
    files = {int(file.parent.name): file for file in _last_attempt(folder).rglob("error.json")}
    return {rank: ProcessFailure(rank, pid=0, exitcode=1, error_file=str(file)) for rank, file in files.items()}


def _first_failure(failures: Mapping[int, ProcessFailure], mesh: Mesh) -> str:
    """The root cause: what a rank said of itself first, before those that lost their peers because of it."""
    waited = {rank: text for rank, each in failures.items() if LOST in (text := _said(each))}
    is_hang = any(IN_VAIN in text for text in waited.values())
    ended = {"SIGTERM", "SIGKILL"} if is_hang else {"SIGTERM"}  # by the launcher

    def is_consequence(rank: int) -> bool:
        return failures[rank].signal_name() in ended or rank in waited

    rank = min(failures, key=lambda rank: (is_consequence(rank), failures[rank].timestamp))
    failure = failures[rank]
    if is_hang and is_consequence(rank):
        return _hung(waited, mesh)
    name = _name(rank, mesh)
    if failure.exitcode < 0:
        return f"{name} died: killed by {failure.signal_name()}. The other ranks were ended."
    text = _said(failure)
    if not text:
        return f"{name} failed with exit code {failure.exitcode}; see its output above."
    return f"{name} failed: {text}"


def _hung(waited: Mapping[int, str], mesh: Mesh) -> str:
    """Name the ranks that said nothing while others waited in vain, and where these stood."""
    silent = ", ".join(_name(rank, mesh) for rank in range(mesh.size) if rank not in waited)
    lines = [waited[rank].partition("\n")[0] for rank in sorted(waited)]
    stood = "; ".join(line.replace(f" {LOST}", "", 1).rstrip(".") for line in lines)
    if not silent:
        return f"ranks waited for each other in vain until the timeout: {stood}. All ranks were ended."
    return f"{silent} hung: the other ranks waited for it in vain until the timeout, {stood}. All ranks were ended."


def _name(rank: int, mesh: Mesh) -> str:
    return f"rank {rank} ({','.join(f'{axis}={place}' for axis, place in mesh.coord(rank).items())})"


def _said(failure: ProcessFailure) -> str:
    """What the rank reported; empty where it could not."""
    message = failure.error_file_data.get("message", "") if isinstance(failure.error_file_data, dict) else ""
    text = str(message.get("message", "") if isinstance(message, dict) else message).removeprefix("<NONE>")
    name, _, rest = text.partition(": ")
    return rest if isinstance(getattr(errors, name, None), type) else text
