"""`autopar machine measure`: the machine that this is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.cli.measuring import measure_here, ranks_asked
from autopar.cli.ranks import on_ranks
from autopar.cli.show import out, show
from autopar.ir.ops.measure import human
from autopar.machines import write_machine
from autopar.machines.fit import Fit, fits
from autopar.machines.measurement_plan import MeasuredMachine
from autopar.machines.samples import PRODUCT, SHARED, STREAM, UPDATE, Item
from autopar.machines.workload import KINDS
from autopar.settings import Settings

AFTER_S, LEAST_S = 10.0, 5.0  # to start, to fit and to end; to measure, however long the ranks took to start


def measure_machine(
    out_file: Path, ranks: int | None, device: str | None, seconds: float, until: float | None, disk: Path | None = None
) -> None:
    """Measure this machine and write it. until: the time at which all ranks end. disk: a folder whose disk is measured
    too."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    count = ranks_asked(ranks, device, Settings.read())
    until = until or time.time() - time.process_time() + seconds  # this process has taken a while to start
    arguments = ["machine", "measure", "--out", str(out_file), "--device", device, "--until", str(until)]
    arguments += [] if disk is None else ["--disk", str(disk)]

    def measure_as_rank() -> None:
        first = (Settings.read().rank or 0) == 0
        left = max(LEAST_S, until - time.time() - AFTER_S)
        with _bar(Console(quiet=not first)) as told:
            found = measure_here(device, out_file.stem, left, told, disk)
        if first:
            _report(found, out_file, count, device)

    on_ranks(f"dp={count}", arguments, measure_as_rank)


def _report(measured_machine: MeasuredMachine, path: Path, ranks: int, device: str) -> None:
    """Write the machine, and say how well it tells what was measured."""
    known = fits(measured_machine.machine, measured_machine.samples)
    units = f"CPU process of {_count(torch.get_num_threads(), 'thread')}" if device == "cpu" else "GPU"
    notes = [f"Measured on {date.today()} by autopar machine measure: {ranks} x {units}, torch {torch.__version__}."]
    write_machine(measured_machine.machine, path, [*notes, *measured_machine.remarks])
    show("what the machine says of what was measured: mean error, the largest, and where that is")
    for kind in (PRODUCT, *SHARED, STREAM, UPDATE, *KINDS):
        if kind in known:
            show(f"  {_line(kind, known[kind], measured_machine)}")
    for remark in measured_machine.remarks:
        show(remark)
    out.print(f"{path}: show it with autopar machine show {path}", markup=False, highlight=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _line(kind: str, fit: Fit, measured_machine: MeasuredMachine) -> str:
    item = fit.worst.item
    said = f"{item.us_on(measured_machine.machine):.4g} us for {fit.worst.us:.4g}"
    name = f"{item.name} {item.dtype}" if item.dtype else ""
    size = f"{item.size:.3g} FLOPs" if getattr(item, "flops", 0) else human(item.size)
    return f"{kind:15}{fit.count:4} measured {fit.mean:7.1%} {fit.most:7.1%}  {name} {size}: {said}".replace("  :", ":")


@contextmanager
def _bar(console: Console) -> Iterator[Callable[[int, int, Item], None]]:
    """A function that shows what is measured next: a bar on a terminal, a line now and then elsewhere. It is drawn only
    between two measurements, by no thread beside them."""
    columns = TextColumn("measure"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    what = TextColumn("{task.description}")
    with Progress(*columns, what, console=console, disable=not console.is_terminal, auto_refresh=False) as progress:
        bar = progress.add_task("", total=None)

        def told(done: int, total: int, item: Item) -> None:
            progress.update(bar, completed=done + 1, total=total, description=f"{item.kind} {item.name}", refresh=True)
            if not console.is_terminal and done % (total // 10) == 0:
                console.print(f"measured {done}/{total}: next {item.kind} {item.name}", highlight=False)

        yield told
