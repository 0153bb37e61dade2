"""The training loop of `autopar run`."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.api import parallelize
from autopar.capture.inputs import tables
from autopar.capture.inputs.containers import take_call_apart
from autopar.checkpoint.checkpointer import Checkpointer
from autopar.cli.arguments.command_options import CommandOptions
from autopar.compiled import Compiled
from autopar.compiler.compile import batch_arguments
from autopar.errors import ArtifactError, MachineError
from autopar.ir.mesh import AUTO
from autopar.ir.ops.measure import human
from autopar.ir.options import PLANNED
from autopar.job import Job
from autopar.machines.here import machine_here
from autopar.parallel.module import ParallelModule
from autopar.report.timeline.trace import write_trace
from autopar.runtime.ranks.recorder import Recorder
from autopar.settings import Settings

TRACED = 3  # steps: the last ones, which are warm


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a run writes: a JSON line a step, a folder of TensorBoard's, and one of what every rank does in the last
    steps (`timeline/trace.py`)."""

    log: Path | None = None
    tensorboard: Path | None = None
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class _Figures:
    """The figures of a step. unit: what is counted, tokens or samples. mfu: None where nobody knows the machine's peak.
    bytes_: the most that this rank has held so far: of the GPU, or of the process."""

    step: int
    loss: float
    seconds: float
    count: int
    unit: str
    mfu: float | None
    bytes_: int

    @property
    def rates(self) -> dict[str, float]:
        """By name, as TensorBoard shows them."""
        share = {} if self.mfu is None else {"MFU": self.mfu}
        return {
            "ms/step": 1e3 * self.seconds, f"{self.unit}/s": self.count / self.seconds, **share, "memory": self.bytes_
        }  # fmt: skip

    @property
    def line(self) -> dict[str, Any]:
        """What `--losses` writes."""
        share = {} if self.mfu is None else {"mfu": self.mfu}
        return {
            "step": self.step, "loss": self.loss, "seconds": self.seconds, self.unit: self.count, **share,
            "memory_bytes": self.bytes_,
        }  # fmt: skip

    def __str__(self) -> str:
        share = "" if self.mfu is None else f"MFU {self.mfu:.1%}  "
        return f"loss {self.loss:.4f}  {self.count / self.seconds:,.0f} {self.unit}/s  {share}{human(self.bytes_)}"


def train(
    job: Job, mesh: str, steps: int, options: CommandOptions, to: Outputs, machine: str | None = None
) -> None:  # fmt: skip
    """Train `steps` steps on this process's rank; rank 0 shows progress and writes the figures of each step.

    options: what is not in the job: the seed, where the run is saved and goes on, and where programs are kept.

    machine: of the mesh "auto", whose plan goes before what the job says.
    """
    trace = to.trace
    model = _parallel(job, mesh, options, machine)
    first = dist.get_rank() == 0
    console = Console(quiet=not first)
    args, kwargs = batch_arguments(job.batch_of(0))
    start = time.monotonic()
    compiled = model.prepare(*args, **kwargs)
    how = "read" if model.programs[-1].compiled.is_read else "compiled"
    console.print(
        f"mesh {compiled.mesh}: {how} {len(compiled.program.graph.nodes)} nodes with "
        f"{len(compiled.collectives)} collectives in {time.monotonic() - start:.1f} s"
    )
    optimizer = job.make_optimizer(tables.parameters(model))
    recorder = Recorder(torch.cuda.synchronize if torch.cuda.is_available() else None)
    # loads the newest checkpoint, if there is one, into what is compiled and placed by now
    numbers, done = _numbers(options, steps, model, optimizer)
    if done:
        console.print(
            f"resumed from step {done} of {options.checkpoint}", markup=False, highlight=False, soft_wrap=True
        )
    write, close = _writer(to, done) if first else (lambda figures, more: None, lambda: None)
    device = next(iter(tables.parameters(model))).device
    mfu = _mfu_on(compiled, device) if first else (lambda seconds: None)
    with _bar(console, steps, str(compiled.mesh)) as show:
        for step in numbers:
            start = time.perf_counter()
            args, kwargs = batch_arguments(job.batch_of(step))
            traced = trace is not None and step >= steps - TRACED
            if traced:
                recorder.step = step
                model.prepare(*args, **kwargs)
                model.record(recorder)
            with recorder.timed(f"step {step}") if traced else nullcontext():
                loss = model.forward_backward(*args, **kwargs).item()
            with recorder.timed("optimizer") if traced else nullcontext():
                optimizer.step()
                optimizer.zero_grad()
            seconds = time.perf_counter() - start
            count, unit = _amount([tensor for _, tensor in take_call_apart(args, kwargs).tensors()])
            figures = _Figures(step, loss, seconds, count, unit, mfu(seconds), _most_bytes(device))
            show(figures)
            layers = model.last.imbalance if to.log is not None else {}
            write(figures, {"imbalance": layers} if layers else {})
    close()
    if trace is not None:
        console.print(f"trace: {write_trace(trace, compiled, recorder)}", markup=False, highlight=False)
    _show_after(job, model, console)


def _mfu_on(compiled: Compiled, device: torch.device) -> Callable[[float], float | None]:
    """A function of a step's seconds to the share of this machine's peak that the model's own FLOPs took; to None where
    there is no built-in machine of its name, or the programs are read from a cache and tell no FLOPs."""
    try:
        step = compiled.time(machine_here(device))
    except (MachineError, ArtifactError):
        return lambda seconds: None
    return lambda seconds: step.mfu_of(1e6 * seconds)


def _most_bytes(device: torch.device) -> int:
    """The most bytes that this rank has held on its device so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _parallel(job: Job, mesh: str, options: CommandOptions, machine: str | None) -> ParallelModule:
    """The job's model, parallel on this process's rank."""
    made: ParallelModule = parallelize(
        job.model,
        mesh,
        loss_fn=job.loss_fn,
        seed=options.seed,
        cuda_graphs=job.cuda_graphs,
        check_replicas=job.check_replicas,
        on_nonfinite=job.on_nonfinite,
        machine=machine,
        timeout=job.timeout,
        cache=options.cache,
        **(job.step if mesh != AUTO else {**job.step, **PLANNED}),  # type: ignore[typeddict-item]
    )
    return made


def _numbers(options: CommandOptions, steps: int, model: Any, optimizer: Any) -> tuple[Iterable[int], int]:
    """The steps that are to be done, and how many were done before. Saves are synchronous, so that no death of a rank
    costs more than the steps since the last of them."""
    if options.checkpoint is None:
        return range(steps), 0
    given = {name: value for name in ("every", "keep") if (value := getattr(options, name)) is not None}
    checkpointer = Checkpointer(options.checkpoint, asynchronous=False, **given)
    resume = "auto" if Settings.read().attempt else options.resume or "auto"
    resume = int(resume) if resume.isdecimal() else resume
    return checkpointer.steps(steps, model, optimizer, resume=resume), checkpointer.done


def _writer(to: Outputs, done: int) -> tuple[Callable[[_Figures, dict[str, Any]], None], Callable[[], None]]:
    """A function that writes the figures of a step to where they are wanted, and one that closes the files."""
    lines = None if to.log is None else _opened(to.log, done)
    board = None
    if to.tensorboard is not None:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(to.tensorboard), purge_step=done or None)  # steps of a run that ended are done anew

    def write(figures: _Figures, more: dict[str, Any]) -> None:
        if lines is not None:
            lines.write(json.dumps({**figures.line, **more}) + "\n")
        if board is not None:
            for name, value in {"loss": figures.loss, **figures.rates}.items():
                board.add_scalar(name, value, figures.step)

    def close() -> None:
        if lines is not None:
            lines.close()
        if board is not None:
            board.close()

    return write, close


def _opened(log: Path, done: int) -> TextIO:
    """The log, with the lines of the steps that are done; a line reaches the file at once."""
    kept = []
    for line in log.read_text().splitlines() if done and log.exists() else ():
        with suppress(json.JSONDecodeError, KeyError, TypeError):  # of one that was ended in the middle of it
            kept += [line] if json.loads(line)["step"] < done else []
    lines = log.open("w", buffering=1)
    lines.writelines(f"{line}\n" for line in kept)
    return lines


def _show_after(job: Job, model: Any, console: Console) -> None:
    """Call what the job wants called after training, and show its text."""
    text = job.after(model) if job.after is not None else None
    if text:
        console.rule("after training")
        console.print(text, markup=False, highlight=False)


def _amount(tensors: list[torch.Tensor]) -> tuple[int, str]:
    """How much is in a batch: tokens if it begins with integers of two dims, else samples."""
    leaves = [tensor for tensor in tensors if tensor.ndim]
    if not leaves:
        return 1, "samples"
    is_text = leaves[0].ndim == 2 and not leaves[0].is_floating_point()
    return (leaves[0].numel(), "tokens") if is_text else (leaves[0].shape[0], "samples")


@contextmanager
def _bar(console: Console, steps: int, mesh: str) -> Iterator[Any]:
    """A function that shows a step: a bar on a terminal, a line now and then elsewhere."""
    columns = (
        TextColumn(mesh), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(), TextColumn("left"),
    )  # fmt: skip
    every = max(1, steps // 10)
    with Progress(*columns, console=console, disable=not console.is_terminal, expand=True) as progress:
        bar = progress.add_task("", total=steps, figures="")

        def show(figures: _Figures) -> None:
            progress.update(bar, advance=1, figures=figures)
            step = figures.step
            if not console.is_terminal and (step % every == 0 or step == steps - 1):
                seconds = round((steps - step - 1) * figures.seconds)
                left = f"  {timedelta(seconds=seconds)} left" if step < steps - 1 else ""
                console.print(
                    f"step {step + 1}/{steps}  {figures}  {1e3 * figures.seconds:.0f} ms/step{left}", soft_wrap=True
                )

        yield show
