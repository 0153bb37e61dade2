"""`autopar estimate` and `plan`: what a step takes on a machine that need not be here, and the best plans there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from autopar.cli.compiling import compiled_of
from autopar.cli.options import Options, takes_options
from autopar.cli.show import out, show, show_notes
from autopar.compiler.compile import batch_arguments
from autopar.errors import TargetError
from autopar.ir.measure import human
from autopar.ir.plan import DEVICES
from autopar.machines import named
from autopar.planning.batches import rows_of
from autopar.planning.candidates import RECOMPUTE
from autopar.planning.decisions import PLANNED, write_plan
from autopar.planning.plan import Asked, Planned, plan
from autopar.report.plans import plan_line, planned_text

_UNITS = {"": 1, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}
_SIZES = ("dp", "tp", "pp", "zero", "rows", "microbatches")


@takes_options("cuda_graphs", "check_replicas")
def estimate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="file.py:function or package.module:function")],
    mesh: Annotated[str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2")],
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="see `autopar machine show`")] = DEVICES,
    *,
    options: Options,
) -> None:
    """Simulate a step of the programs on a machine: its time, what it is made of, and the bytes at the peak."""
    chosen = named(machine)
    compiled = compiled_of(target, mesh, options, chosen)
    show(str(compiled.time(chosen)))
    device = "cpu" if chosen.is_host else "cuda"
    peaks = [compiled.memory(ranks[0], device=device).peak for ranks in compiled.alike]
    show(f"  at most {human(max(peaks))} of {human(chosen.device.memory)} a device, on rank "
         f"{compiled.alike[peaks.index(max(peaks))][0]}")  # fmt: skip
    show_notes(compiled)


@takes_options("cuda_graphs", "check_replicas", "stages", *PLANNED)
def plan_(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="file.py:function or package.module:function")],
    gpus: Annotated[int, typer.Option(help="devices", min=1)],
    batch: Annotated[
        int | None, typer.Option(help="rows of a step, on all devices together; by default the job's batch", min=1)
    ] = None,
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="see `autopar machine show`")] = DEVICES,
    memory: Annotated[str | None, typer.Option(metavar="70GiB", help="what a rank may hold")] = None,
    top: Annotated[int, typer.Option(help="plans to show", min=1)] = 10,
    fix: Annotated[list[str] | None, typer.Option(metavar="tp=8", help="what is decided; may be repeated")] = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.toml", help="write the best plan, for --plan of other commands"),
    ] = None,
    *,
    options: Options,
) -> None:
    """Find the fastest plan that fits: sizes of dp, tp and pp, ZeRO, recomputation, micro-batches, schedule."""
    fixed = dict(_decided(text) for text in fix or ())
    job = options.job(target)
    asked = Asked(gpus, batch or rows_of(*batch_arguments(job.batch)), named(machine), _bytes(memory), fixed, top)
    with Progress(console=out, transient=True) as bar:
        task = bar.add_task("plans", total=None)
        found = plan(job, asked, lambda done, all_: bar.update(task, completed=done, total=all_))
    show(planned_text(found))
    if out_file is not None:
        _write(out_file, found, f"autopar plan {target} --gpus {gpus} --batch {asked.batch} --machine {machine}", fix)
        show(f"{out_file}: autopar run {target} --plan {out_file}")


def _write(path: Path, found: Planned, command: str, fix: Sequence[str] | None) -> None:
    """Write the best plan, with the command and what is predicted as comments."""
    best = found.found.best[0].candidate
    notes = (" ".join((command, *(f"--fix {text}" for text in fix or ()))), plan_line(found))
    write_plan(path, best.mesh, best.options(), notes)


def _decided(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if name in _SIZES and value.isdigit():
        return name, int(value)
    if name == "recompute" and value in RECOMPUTE:
        return name, value
    known = ", ".join(f"{name}=N" for name in _SIZES)
    raise TargetError(f"--fix {text}: write {known} or recompute={'|'.join(RECOMPUTE)}.")


def _bytes(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or not float(match[1]) > 0:
        raise TargetError(f"--memory {text}: write a number of bytes, or one with {', '.join(filter(None, _UNITS))}.")
    return float(match[1]) * _UNITS[match[2]]
