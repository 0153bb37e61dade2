"""What the commands show of a compiled step, on the terminal and in files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from autopar.cli.arguments.command_options import CommandOptions
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.errors import TargetError
from autopar.ir.ops.measure import human
from autopar.ir.text.text import diff_programs, print_program
from autopar.report.inspection import batch_text
from autopar.report.inspection_pipeline import rank_texts
from autopar.report.memory.show_memory import formula_texts, memory_texts
from autopar.report.page import page_text
from autopar.report.timeline.show_timeline import picture_of, write_timeline
from autopar.report.timeline.terminal import timeline_text

out = Console(soft_wrap=True)
aside = Console(soft_wrap=True, stderr=True)  # beside `--json`, which has stdout for itself


def show(text: str) -> None:
    """Print a text as it is."""
    out.print(text, markup=False, highlight=False)


def show_aside(text: str) -> None:
    """Print a text as it is, on stderr."""
    aside.print(text, markup=False, highlight=False)


def show_json(value: Mapping[str, Any]) -> None:
    """Print what `--json` asks for. Raises ValueError for a number that JSON does not have."""
    show(json.dumps(value, indent=2, allow_nan=False))


def show_notes(compiled: Compiled) -> None:
    """Show what a person should know of a compiled step."""
    for note in compiled.notes:
        show(f"note: {note}")


def write_page(compiled: Compiled, path: Path, title: str) -> None:
    """Write the page that a browser shows. Raises TargetError where that cannot be."""
    write_text(path, page_text(compiled, title))


def write_text(path: Path, page: str) -> None:
    """Write a page of `--html`. Raises TargetError where that cannot be."""
    text = page.encode()
    try:
        path.write_bytes(text)
    except OSError as error:
        raise TargetError(f"--html {path}: cannot write it: {error.strerror}.") from None
    show(f"{path}: {human(len(text))}, open it in a browser.")


def draw_timeline(compiled: Compiled, on_terminal: bool, file: Path | None, over: Path | None, title: str) -> None:
    """Draw when each rank of a pipeline does what. file: to draw it in. over: what `run --trace` saw."""
    shown = picture_of(compiled, over)
    if on_terminal:
        drawn = timeline_text(shown, out.width, out.color_system is not None)
        out.print(Text.assemble(*drawn.parts, no_wrap=True, overflow="crop"), soft_wrap=True)
    if file is not None:
        size = write_timeline(shown, file, title)
        show(f"{file}: {human(size)}")


def show_pass(compiled: Compiled, pass_: str | None, diff: str | None) -> None:
    """Show the program after a pass, or what a pass changed. Raises TargetError for a pass that did not run."""
    names = [name for name, _ in compiled.history]
    wanted = pass_ or diff
    if wanted not in names:
        raise TargetError(f"there is no program after pass '{wanted}'; there is {', '.join(names)}.")
    position = names.index(wanted)
    program = compiled.history[position][1]
    if pass_ is not None:
        show(print_program(program))
    elif position == 0:
        raise TargetError(f"'{wanted}' is the first program: nothing was changed before it.")
    else:
        show(diff_programs(compiled.history[position - 1][1], program))


def show_rank(compiled: Compiled, rank: int, graph: str | None, full: bool) -> None:
    """Show a rank's programs with their collectives and bytes, or one of its graphs. Raises TargetError for another."""
    names = list(compiled.ranks[rank].programs)
    if graph is not None and graph not in names:
        raise TargetError(f"--graph {graph}: rank {rank} has {', '.join(names)}.")
    batch = batch_text(compiled)
    if batch:
        show(f"batch tensors\n{batch}")
    for title, text in rank_texts(compiled, rank, graph, full):
        show(f"{title}\n{text}")
    show_notes(compiled)


def show_memory(
    compiled: Compiled, target: str, options: CommandOptions, rank: int, device: str | None, formula: bool
) -> None:
    """Show the bytes that a step holds; formula: also as formulas in the sizes of the batch."""
    job = None if Path(target).is_dir() else options.job(target)
    optimizer = None if job is None else job.optimizer
    for text in memory_texts(compiled, rank, optimizer, device):
        show(text)
    if formula:
        assert job is not None
        for text in formula_texts(job, compiled.mesh, options_of(**job.step), compiled, rank, device):
            show(text)
