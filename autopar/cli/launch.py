"""Local processes, started and watched by torchrun's elastic launcher."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar import errors
from autopar.checkpoint.checkpointer import SIGNALS
from autopar.cli.arguments.stopped import Stopped
from autopar.ir.mesh import Mesh
from autopar.settings import Settings


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


def _reported(folder: Path) -> dict[int, ProcessFailure]:
    """What each rank said of itself, by rank.

    torchrun lists only the ranks that had ended when it looked. One that raised and is still closing its connections
    is not among them, though those that lost it may be. Of the last attempt: those before it were made good.
    """
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    files = {int(file.parent.name): file for last in attempts[-1:] for file in last.rglob("error.json")}
    return {rank: ProcessFailure(rank, pid=0, exitcode=1, error_file=str(file)) for rank, file in files.items()}


def _first_failure(failures: Mapping[int, ProcessFailure], mesh: Mesh) -> str:
    """The root cause: what a rank said of itself first, before those that lost their peers because of it."""
    rank, failure = min(failures.items(), key=lambda item: (_is_consequence(item[1]), item[1].timestamp))
    coord = ",".join(f"{axis}={place}" for axis, place in mesh.coord(rank).items())
    name = f"rank {rank} ({coord})"
    if failure.exitcode < 0:
        return f"{name} died: killed by {failure.signal_name()}. The other ranks were ended."
    text = _said(failure)
    if not text:
        return f"{name} failed with exit code {failure.exitcode}; see its output above."
    return f"{name} failed: {text}"


def _said(failure: ProcessFailure) -> str:
    """What the rank reported; empty where it could not."""
    message = failure.error_file_data.get("message", "") if isinstance(failure.error_file_data, dict) else ""
    text = str(message.get("message", "") if isinstance(message, dict) else message).removeprefix("<NONE>")
    name, _, rest = text.partition(": ")
    return rest if isinstance(getattr(errors, name, None), type) else text


def _is_consequence(failure: ProcessFailure) -> bool:
    """Ended by the launcher, or by the loss of a peer."""
    return failure.signal_name() == "SIGTERM" or "lost its peers" in _said(failure)
