"""`autopar plan`: the best plans for devices that need not be here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from rich.progress import Progress

from autopar.cli.arguments.command_options import CommandOptions
from autopar.cli.arguments.configured import job_of_config
from autopar.cli.arguments.wanted_plans import Wanted
from autopar.cli.show import out, show, show_aside, show_json, write_text
from autopar.errors import TargetError
from autopar.machines import named
from autopar.planning.jobs import layers_of
from autopar.planning.others import fastest, reasons, scales, with_batches
from autopar.planning.planner import Asked, Planned, Tell, planned
from autopar.planning.price.layers import Layers
from autopar.planning.space.batch_sizes import read_batches
from autopar.planning.space.batches import rows_of_batch
from autopar.planning.space.decisions import write_plan
from autopar.planning.space.fixed import read_fixed
from autopar.report.emitted import checked
from autopar.report.page.plans_page import plans_page
from autopar.report.plans import fields_of, plan_line, planned_text, scales_text

T = TypeVar("T")
SECONDS = 10  # from one line of progress to the next


def plan_target(target: str | None, wanted: Wanted, options: CommandOptions) -> None:
    """Find the plans of a step, of the TARGET or of a configuration, show them, and write what is asked for."""
    sizes, amount, rows = wanted.sizes, wanted.trained, _rows(wanted)
    fixed = dict(read_fixed(text) for text in wanted.fix)
    job = options.over(job_of_config(wanted.hf, rows[0], wanted.sequence)) if wanted.hf else options.job(target or "")
    source = target or f"--hf {wanted.hf}" + (f" --sequence {wanted.sequence}" if wanted.sequence else "")
    asked = Asked(sizes[0], rows_of_batch(job.batch), named(wanted.machine), wanted.bytes, fixed, wanted.top)
    layers = layers_of(job, asked.machine)
    each = [replace(asked, gpus=size) for size in sizes]
    if len(sizes) == 1:
        each = with_batches(asked, layers, rows, is_range="-" in (wanted.batch or ""))
    if len(each) > 1 or amount is not None:
        made = _with_bar("best plans", lambda tell: scales(layers, each, tell))
        show(scales_text(made, amount, "devices" if each[0].batch == each[-1].batch else "rows"))
        if each[0].batch == each[-1].batch:
            return
        each = [fastest(made)]
    found = _found(layers, each[0], wanted.check)
    tell = show_aside if wanted.as_json else show
    if not wanted.as_json:
        show(planned_text(found))
    if wanted.out_file is not None:  # before the page, which takes longer than the plan
        command = f"autopar plan {source} --gpus {wanted.gpus} --batch {each[0].batch} --machine {wanted.machine}"
        _write(wanted.out_file, found, [command, *map(quote, options.arguments())], wanted.fix, options.flags())
    lost = _with_bar("other plans", lambda _: list(reasons(found)))
    if wanted.as_json:
        show_json(fields_of(found, lost))
    else:
        for line in lost:
            show(f"  {line}")
    if wanted.html is not None:
        write_text(wanted.html, _with_bar("page", lambda _: plans_page(found, source, lost)))
    if wanted.out_file is not None:
        tell(f"{wanted.out_file}: autopar run {target or 'TARGET'} --plan {wanted.out_file}")


def _rows(wanted: Wanted) -> Sequence[int]:
    """The batches that are asked for. Raises TargetError for several of them and several numbers of devices."""
    sizes, batch = wanted.sizes, wanted.batch
    rows = [] if batch is None else read_batches(batch, sizes[0])
    if len(sizes) > 1 and len(rows) > 1:
        raise TargetError(
            f"--batch {batch}: it is {len(rows)} batches, and there are {len(sizes)} numbers of devices behind --gpus. "
            f"Write one of either."
        )
    return rows


def _found(layers: Layers, asked: Asked, is_checked: bool) -> Planned:
    """The plans that fit, the best ones compiled if that was asked for."""
    found = _with_bar("plans", lambda tell: planned(layers, asked, tell))
    return _with_bar("compiled plans", lambda tell: checked(found, tell)) if is_checked else found


def _with_bar(words: str, work: Callable[[Tell], T]) -> T:
    """What some work gives, with a progress bar until then; where there is no terminal, a line now and then."""
    if not out.is_terminal:
        return work(_lines(words))
    with Progress(console=out, transient=True) as bar:
        task = bar.add_task(words, total=None)
        return work(lambda done, all_: bar.update(task, completed=done, total=all_))


def _lines(words: str) -> Tell:
    """Tells of progress on stderr, where a bar would fill a file."""
    last = time.monotonic()

    def tell(done: int, all_: int) -> None:
        nonlocal last
        if time.monotonic() - last > SECONDS:
            last = time.monotonic()
            show_aside(f"{words}: {done:,} of {all_:,}")

    return tell


def _write(path: Path, planned: Planned, command: list[str], fix: Sequence[str], given: Mapping[str, Any]) -> None:
    """Write the best plan, with the command and what is predicted as comments. given: options of the command line: the
    plan is one of steps that have them, `precision` say."""
    best = planned.found.best[0].candidate
    notes = (" ".join((*command, *(f"--fix {text}" for text in fix))), plan_line(planned))
    write_plan(path, best.mesh, {**given, **best.options()}, notes)
