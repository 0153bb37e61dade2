"""`autopar plan`: the best plans for devices that need not be here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.progress import Progress

from autopar.cli.arguments.command_options import CommandOptions, takes_options
from autopar.cli.show import out, show, write_text
from autopar.errors import TargetError
from autopar.ir.plan import DEVICES
from autopar.machines import named
from autopar.planning.jobs import layers_of
from autopar.planning.others import fastest, reasons, scales, with_batches
from autopar.planning.planner import Asked, Planned, Tell, planned
from autopar.planning.price.layers import Layers
from autopar.planning.space.batch_sizes import read_batches
from autopar.planning.space.batches import rows_of_batch
from autopar.planning.space.decisions import PLANNED, write_plan
from autopar.planning.space.fixed import read_fixed, ways_text
from autopar.report.emitted import checked
from autopar.report.page.plans_page import plans_page
from autopar.report.plans import plan_line, planned_text, scales_text

T = TypeVar("T")
_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_UNITS = {"": 1, "MB": 1e6, "GB": 1e9, "MiB": 2**20, "GiB": 2**30}


@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout", "stages", *PLANNED)
def plan_(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="file.py:function or package.module:function")],
    gpus: Annotated[str, typer.Option(metavar="N|N,N,...", help="devices; of several, how the best plans scale")],
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N|N,N,...|N-N", help="rows of a step, on all devices together; by default the job's batch"
        ),
    ] = None,
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="see `autopar machine show`")] = DEVICES,
    memory: Annotated[str | None, typer.Option(metavar="70GiB", help="what a rank may hold")] = None,
    top: Annotated[int, typer.Option(help="plans to show", min=1)] = 10,
    fix: Annotated[
        list[str] | None, typer.Option(metavar="tp=8", help=f"what is decided; may be repeated: {ways_text()}")
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.toml", help="write the best plan, for --plan of other commands"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a page: time against memory, and each plan's timeline")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="15T", help="of a training: the days and device hours that it takes")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="compile the best plans, and show what their programs take"),
    ] = True,
    *,
    options: CommandOptions,
) -> None:
    """Find the fastest plan that fits: sizes and order of axes, ZeRO, recomputation, micro-batches, schedule."""
    sizes, amount = _sizes(gpus), _tokens(tokens)
    rows = [] if batch is None else read_batches(batch, sizes[0])
    _check_one(sizes, rows, batch)
    _check_files(sizes, out_file, html)
    fixed = dict(read_fixed(text) for text in fix or ())
    job = options.job(target)
    asked = Asked(sizes[0], rows_of_batch(job.batch), named(machine), _bytes(memory), fixed, top)
    layers = layers_of(job, asked.machine)
    each = [replace(asked, gpus=size) for size in sizes]
    if len(sizes) == 1:
        each = with_batches(asked, layers, rows, is_range="-" in (batch or ""))
    if len(each) > 1 or amount is not None:
        made = _with_bar("best plans", lambda tell: scales(layers, each, tell))
        show(scales_text(made, amount, "devices" if each[0].batch == each[-1].batch else "rows"))
        if each[0].batch == each[-1].batch:
            return
        each = [fastest(made)]
    found = _found(layers, each[0], check)
    show(planned_text(found))
    lost = _with_bar("other plans", lambda _: list(reasons(found)))
    for line in lost:
        show(f"  {line}")
    if html is not None:
        write_text(html, _with_bar("page", lambda _: plans_page(found, target, lost)))
    if out_file is not None:
        _write(out_file, found, f"autopar plan {target} --gpus {gpus} --batch {each[0].batch} --machine {machine}", fix)
        show(f"{out_file}: autopar run {target} --plan {out_file}")


def _found(layers: Layers, asked: Asked, is_checked: bool) -> Planned:
    """The plans that fit, the best ones compiled if that was asked for."""
    found = _with_bar("plans", lambda tell: planned(layers, asked, tell))
    return _with_bar("compiled plans", lambda tell: checked(found, tell)) if is_checked else found


def _with_bar(words: str, work: Callable[[Tell], T]) -> T:
    """What some work gives, with a progress bar until then."""
    with Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task(words, total=None)
        return work(lambda done, all_: bar.update(task, completed=done, total=all_))


def _sizes(text: str) -> list[int]:
    sizes = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if not all(sizes):
        raise TargetError(f"--gpus {text}: write a number of 1 or more, or several with commas: 8,64,512.")
    return sizes


def _check_one(sizes: Sequence[int], rows: Sequence[int], batch: str | None) -> None:
    if len(sizes) > 1 and len(rows) > 1:
        raise TargetError(
            f"--batch {batch}: it is {len(rows)} batches, and there are {len(sizes)} numbers of devices behind --gpus. "
            f"Write one of either."
        )


def _tokens(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMBT]?)", text)
    if match is None or not float(match[1]) > 0:
        raise TargetError(f"--tokens {text}: write a number above 0, such as 15T, 300B or 1.5e12.")
    return float(match[1]) * _COUNTS[match[2]]


def _check_files(sizes: Sequence[int], *files: Path | None) -> None:
    """Refuse files that would not be written, before the search."""
    for flag, file in zip(("--out", "--html"), files, strict=True):
        if file is not None and len(sizes) > 1:
            raise TargetError(
                f"{flag} {file}: it is of one number of devices, and there are {len(sizes)} behind --gpus."
            )
        if file is not None and not file.parent.is_dir():
            raise TargetError(f"{flag} {file}: there is no folder '{file.parent}'; make it first.")


def _write(path: Path, planned: Planned, command: str, fix: Sequence[str] | None) -> None:
    """Write the best plan, with the command and what is predicted as comments."""
    best = planned.found.best[0].candidate
    notes = (" ".join((command, *(f"--fix {text}" for text in fix or ()))), plan_line(planned))
    write_plan(path, best.mesh, best.options(), notes)


def _bytes(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS or not float(match[1]) > 0:
        raise TargetError(f"--memory {text}: write a number of bytes, or one with {', '.join(filter(None, _UNITS))}.")
    return float(match[1]) * _UNITS[match[2]]
