"""Checks of a command line before anything is compiled or started: files, numbers, options without effect. They are
made before torch is imported."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.cli.arguments.command_options import RUN, CommandOptions
from autopar.errors import TargetError
from autopar.ir.mesh import AUTO, GRADIENT_AXES, PIPELINE, Mesh
from autopar.ir.options import PLANNED, TIMEOUT, flag_name
from autopar.settings import Settings

if TYPE_CHECKING:
    from autopar.job import Job

RANK_BYTES = 300 << 20  # of a process that has loaded torch, of its own
LEAST = {"every": 1, "keep": 1, "max_restarts": 0}
SEEDS = -(2**63), 2**64 - 1  # what torch.manual_seed takes


def check_run(
    options: CommandOptions, steps: int, log: Path | None = None, trace: Path | None = None,
    tensorboard: Path | None = None,
) -> None:  # fmt: skip
    """Check what `run` and `verify` are asked for. Raises TargetError."""
    if steps < 1:
        raise TargetError(f"--steps {steps}: write a number of 1 or more.")
    check_options(options)
    if log is not None:
        _check_file("--losses", log)
    if trace is not None:
        _check_folder("--trace", trace)
    if tensorboard is not None:
        if find_spec("tensorboard") is None:
            raise TargetError(
                f"--tensorboard {tensorboard}: the package is not installed here: pip install tensorboard. "
                f"--losses FILE needs nothing."
            )
        _check_folder("--tensorboard", tensorboard)


def check_checkpoints(options: CommandOptions) -> None:
    """Check what `run` is asked for of folders: checkpoints, and programs. Raises TargetError."""
    asked = {name: value for name in RUN if (value := getattr(options, name)) is not None}
    if (cache := asked.pop("cache", None)) is not None:
        _check_folder("--cache", Path(cache))
    for name, value in asked.items():
        flag = f"--{name.replace('_', '-')} {value}"
        if options.checkpoint is None:
            raise TargetError(f"{flag}: it needs --checkpoint DIR, where the run is saved.")
        least = LEAST.get(name)
        if least is not None and value < least:
            raise TargetError(f"{flag}: write a number of {least} or more.")
    resume = options.resume or "auto"
    if resume not in ("auto", "never") and not resume.isdecimal():
        raise TargetError(f"--resume {resume}: write auto, never or the number of a step.")
    if options.checkpoint is not None:
        _check_folder("--checkpoint", Path(options.checkpoint))


def check_auto(flags: Mapping[str, Any], mesh: str) -> None:
    """Raise TargetError for an option of which `--mesh auto` decides."""
    for name in flags.keys() & (PLANNED.keys() | {"stages"}) if mesh == AUTO else ():
        raise TargetError(
            f"{flag_name(name)} beside --mesh {AUTO}, which decides it: leave it out, or plan around it with "
            f"`autopar plan --fix`."
        )


def check_options(options: CommandOptions) -> None:
    """Check what every command is asked for, and the folder of AUTOPAR_DUMP. Raises TargetError."""
    if not SEEDS[0] <= options.seed <= SEEDS[1]:
        raise TargetError(f"--seed {options.seed}: write a number from -2**63 to 2**64 - 1.")
    TIMEOUT.check("timeout", options.timeout)
    directory = Settings.read().dump
    if directory is not None:
        _check_folder("AUTOPAR_DUMP", directory)


def check_room(ranks: int, free: int | None = None) -> None:
    """Raise TargetError where this machine has no memory for so many processes. free: bytes, if not those of now."""
    free = _free_bytes() if free is None else free
    if free is None or ranks * RANK_BYTES <= free:
        return
    from autopar.ir.ops.measure import human

    raise TargetError(
        f"{ranks} ranks are {ranks} processes of {human(RANK_BYTES)} at least, and this machine has {human(free)} of "
        f"free memory: at most {max(1, free // RANK_BYTES)} would start here. `autopar verify` and `autopar estimate` "
        f"need no processes; to run on several machines start the ranks by torchrun."
    )


def _free_bytes() -> int | None:
    """What new processes can have; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    known = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(known["MemAvailable"].split()[0]) << 10 if "MemAvailable" in known else None


def _check_file(name: str, path: Path) -> None:
    """Make the folder of a file that will be written, if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise TargetError(f"{name} {path}: cannot write it: {error.strerror}.") from None


def _check_folder(name: str, path: Path) -> None:
    """Make a folder that files will be written to, if it is missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise TargetError(f"{name} {path}: cannot write there: {error.strerror}.") from None


def idle_options(options: CommandOptions, job: Job, mesh: Mesh) -> Iterator[str]:
    """Say which options of the command line change nothing on a mesh. job: with what they say of it."""
    axes = dict(mesh.axes)
    has_stages = axes.get(PIPELINE, 1) > 1 or (job.microbatches or 1) > 1
    has_data = any(axes.get(axis, 1) > 1 for axis in GRADIENT_AXES)
    stages = f"mesh '{mesh}' has no axis 'pp' of more than one rank, and there are no micro-batches"
    data = f"mesh '{mesh}' has no axis 'dp', 'fsdp' or 'cp' of more than one rank"
    idle = {
        "--schedule": (options.schedule, not has_stages, stages),
        "--chunks": (options.chunks, not has_stages, stages),
        "--stages": (options.stages, not has_stages, stages),
        "--stage-memory": (options.stage_memory, not has_stages, stages),
        "--zero": (options.zero, not has_data, data),
        "--bucket-bytes": (options.bucket_bytes, not has_data, data),
        "--no-reshard-after-forward": (
            options.no_reshard_after_forward, job.zero != 3 and (job.zero is not None or "fsdp" not in axes),
            "parameters are gathered for the forward pass only with --zero 3 or an axis 'fsdp'",
        ),
    }  # fmt: skip
    for flag, (value, is_idle, why) in idle.items():
        if value and is_idle:
            yield f"{flag} has no effect: {why}."
