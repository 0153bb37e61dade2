"""The command line: autopar run, compile, inspect, explain, verify."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from autopar.cli.launch import Stopped, launch, report
from autopar.cli.options import Options, takes_options
from autopar.cli.preflight import check_options, check_run, idle_options
from autopar.cli.training import train
from autopar.compiled import Compiled, load
from autopar.compiler.compile import batch_arguments, compile_step
from autopar.compiler.meshes import mesh_of
from autopar.compiler.options import options_of
from autopar.errors import AutoparError, TargetError
from autopar.ir.measure import human
from autopar.ir.mesh import Mesh
from autopar.ir.text import diff_programs, print_program
from autopar.job import Job
from autopar.report.inspection_pipeline import rank_texts
from autopar.report.memory.show import formula_texts, memory_texts
from autopar.report.page import page_text
from autopar.report.timeline.show import picture_of, show_timeline, write_timeline
from autopar.settings import Settings
from autopar.verification.distributed import verify_on_ranks
from autopar.verification.verify import verify as verify_job

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
out = Console(soft_wrap=True)

Target = Annotated[str, typer.Argument(metavar="TARGET", help="file.py:function or package.module:function")]
MeshOption = Annotated[str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2; one size may be -1")]


@app.command()
@takes_options()
def run(
    target: Target,
    mesh: MeshOption,
    steps: Annotated[int, typer.Option(help="training steps")] = 100,
    log: Annotated[Path | None, typer.Option(help="write a JSON line a step here")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write what each rank did in the last steps")
    ] = None,
    *,
    options: Options,
) -> None:
    """Compile and train: on local processes, or as a part of a running torchrun job."""
    check_run(options, steps, log, trace)
    arguments = ["run", target, "--mesh", mesh, "--steps", str(steps), *options.arguments()]
    files = {"--log": log, "--trace": trace}
    arguments += [word for flag, path in files.items() if path is not None for word in (flag, str(path))]
    _on_ranks(mesh, arguments, lambda: train(_job(target, _mesh(mesh), options), mesh, steps, options.seed, log, trace))


@app.command("compile")
@takes_options("compile", "check_replicas")
def compile_(
    target: Target,
    mesh: MeshOption,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="a new or empty folder")],
    *,
    options: Options,
) -> None:
    """Write the programs of the distinct ranks as readable Python and JSON."""
    compiled = _compile(target, mesh, options)
    compiled.save(out_dir)
    programs, times = len(compiled.alike), sum(row.times for row in compiled.collectives)
    moved = sum(row.bytes * row.times for row in compiled.collectives)
    out.print(
        f"{out_dir}: {programs} distinct program{'s' * (programs > 1)} for {compiled.mesh.size} ranks "
        f"(mesh {compiled.mesh}), "
        f"{len(compiled.program.graph.nodes)} nodes, {times} collectives of {human(moved)} a step."
    )
    _show_notes(compiled)


@app.command()
@takes_options("compile", "check_replicas")
def inspect(
    target: Annotated[str, typer.Argument(metavar="TARGET|DIR", help="a TARGET, or what `autopar compile` wrote")],
    mesh: Annotated[str | None, typer.Option(help="needed with a TARGET")] = None,
    rank: Annotated[int, typer.Option(help="whose program")] = 0,
    graph: Annotated[str | None, typer.Option(metavar="NAME", help="only this one of the rank's graphs")] = None,
    full: Annotated[bool, typer.Option("--full", help="all of a long list of instructions")] = False,
    pass_: Annotated[str | None, typer.Option("--pass", metavar="NAME", help="the program after this pass")] = None,
    diff: Annotated[str | None, typer.Option(metavar="NAME", help="what this pass changed")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write a page to look at in a browser")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="draw when each rank of a pipeline does what")] = False,
    timeline_file: Annotated[Path | None, typer.Option(metavar="FILE.svg|.html", help="draw it in a file")] = None,
    over: Annotated[Path | None, typer.Option(metavar="DIR", help="draw it over what `run --trace DIR` saw")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="the bytes that a step holds, with the peak")] = False,
    formula: Annotated[bool, typer.Option("--formula", help="the same as formulas in the sizes of the batch")] = False,
    device: Annotated[str | None, typer.Option(metavar="cuda|cpu", help="of --memory and --formula")] = None,
    *,
    options: Options,
) -> None:
    """Show a rank's program, its collectives with their reasons, and the bytes that it holds."""
    if formula and (mesh is None or Path(target).is_dir()):
        raise TargetError(f"--formula compiles the model at other sizes: it needs a TARGET and --mesh, not '{target}'.")
    if pass_ is not None and diff is not None:
        raise TargetError("--pass and --diff: write one of them.")
    if device is not None and not (memory or formula):
        raise TargetError(f"--device {device}: it is of --memory and --formula; add one of them.")
    if Path(target).is_dir():
        if mesh is not None or options != Options(seed=options.seed):
            raise TargetError(f"'{target}' is compiled already: it takes no --mesh and no options of a step.")
        compiled = load(target)
    elif mesh is None:
        raise TargetError(f"inspect '{target}': a TARGET needs --mesh, e.g. --mesh dp=2,tp=2.")
    else:
        compiled = _compile(target, mesh, options)
    if html is not None:
        _write_page(compiled, html, target)
        return
    if timeline or timeline_file is not None or over is not None:
        shown = picture_of(compiled, over)
        if timeline or timeline_file is None:
            show_timeline(out, shown)
        if timeline_file is not None:
            size = write_timeline(shown, timeline_file, target)
            out.print(f"{timeline_file}: {human(size)}", markup=False, highlight=False)
        return
    if pass_ is not None or diff is not None:
        _show_pass(compiled, pass_, diff)
        return
    if not 0 <= rank < compiled.mesh.size:
        raise TargetError(f"--rank {rank}: mesh '{compiled.mesh}' has ranks 0 to {compiled.mesh.size - 1}.")
    if memory or formula:
        _show_memory(compiled, target, options, rank, device, formula)
        return
    names = list(compiled.ranks[rank].programs)
    if graph is not None and graph not in names:
        raise TargetError(f"--graph {graph}: rank {rank} has {', '.join(names)}.")
    for title, text in rank_texts(compiled, rank, graph, full):
        out.print(f"{title}\n{text}", markup=False, highlight=False)
    _show_notes(compiled)


@app.command()
@takes_options("compile", "check_replicas")
def explain(
    target: Target,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="a parameter, a module path, or a node such as %add")],
    mesh: MeshOption,
    *,
    options: Options,
) -> None:
    """Show what decided the layout of a value on each axis, what else it could have been, and what it moves."""
    compiled = _compile(target, mesh, options)
    out.print(str(compiled.explain(value)), markup=False, highlight=False)
    _show_notes(compiled)


@app.command()
@takes_options("check_replicas")
def verify(
    target: Target,
    mesh: MeshOption,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare")] = 2,
    backend: Annotated[str, typer.Option(help="virtual (one process) or gloo (local processes)")] = "virtual",
    *,
    options: Options,
) -> None:
    """Compare loss, every gradient and every updated weight with one device, in float64. Exit code 1 on a mismatch."""
    check_run(options, steps)
    if backend == "gloo":
        arguments = ["verify", target, "--mesh", mesh, "--steps", str(steps), "--backend", "gloo", *options.arguments()]

        def verify_here() -> None:
            _finish(verify_on_ranks(_job(target, _mesh(mesh), options), mesh, steps, options.seed))

        _on_ranks(mesh, arguments, verify_here)
        return
    if backend != "virtual":
        raise TargetError(f"--backend {backend}: write virtual or gloo.")
    if options.compile is not None:
        raise TargetError(
            f"--compile {options.compile}: it compiles what a process runs, collectives included; add --backend gloo. "
            f"One process that plays all ranks has only autopar's own executor."
        )
    job = _job(target, mesh_of(mesh), options)
    _finish(
        verify_job(
            job.model,
            mesh,
            loss_fn=job.loss_fn,
            batch=job.batch,
            steps=steps,
            optimizer=job.optimizer,
            seed=options.seed,
            **job.step,
        )
    )


def _finish(found: object) -> None:
    """Show a report (rank 0 has it) and leave with its verdict."""
    if found is None:
        return
    out.print(str(found), markup=False, highlight=False)
    if not getattr(found, "ok", False):
        raise typer.Exit(1)


def _compile(target: str, mesh: str, options: Options) -> Compiled:
    check_options(options)
    parsed = mesh_of(mesh)
    job = _job(target, parsed, options)
    chosen = options_of(**job.step)  # what is cheap to find is found before the capture
    return Compiled.of(compile_step(job.model, job.loss_fn, *batch_arguments(job.batch), parsed, chosen)[1])


def _write_page(compiled: Compiled, path: Path, title: str) -> None:
    text = page_text(compiled, title).encode()
    try:
        path.write_bytes(text)
    except OSError as error:
        raise TargetError(f"--html {path}: cannot write it: {error.strerror}.") from None
    out.print(f"{path}: {human(len(text))}, open it in a browser.", markup=False, highlight=False)


def _show_pass(compiled: Compiled, pass_: str | None, diff: str | None) -> None:
    names = [name for name, _ in compiled.history]
    wanted = pass_ or diff
    if wanted not in names:
        raise TargetError(f"there is no program after pass '{wanted}'; there is {', '.join(names)}.")
    position = names.index(wanted)
    program = compiled.history[position][1]
    if pass_ is not None:
        out.print(print_program(program), markup=False, highlight=False)
    elif position == 0:
        raise TargetError(f"'{wanted}' is the first program: nothing was changed before it.")
    else:
        out.print(diff_programs(compiled.history[position - 1][1], program), markup=False, highlight=False)


def _show_memory(
    compiled: Compiled, target: str, options: Options, rank: int, device: str | None, formula: bool
) -> None:
    job = None if Path(target).is_dir() else options.job(target)
    optimizer = None if job is None else job.optimizer
    for text in memory_texts(compiled, rank, optimizer, device):
        out.print(text, markup=False, highlight=False)
    if formula:
        assert job is not None
        for text in formula_texts(job, compiled.mesh, options_of(**job.step), compiled, rank, device):
            out.print(text, markup=False, highlight=False)


def _show_notes(compiled: Compiled) -> None:
    for note in compiled.notes:
        out.print(f"note: {note}", markup=False, highlight=False)


def _job(target: str, mesh: Mesh, options: Options) -> Job:
    """The TARGET's job; rank 0 says which options change nothing."""
    job = options.job(target)
    if not Settings.read().rank:
        for text in idle_options(options, job, mesh):
            out.print(f"note: {text}", markup=False, highlight=False)
    return job


def _on_ranks(mesh: str, arguments: list[str], work: Callable[[], None]) -> None:
    """Do the work here if this is a rank already or if one is enough; else on a process for each rank."""
    settings = Settings.read()
    if settings.world_size is not None:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (settings.local_world_size or 1)))
        try:
            work()
        except AutoparError as error:
            report(error)
            raise SystemExit(1) from None
        except Exception as error:
            report(error)
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return
    parsed = _mesh(mesh)
    if parsed.size == 1:
        work()
        return
    failure = launch(arguments, parsed)
    if failure is not None:
        raise _Failed(failure)


class _Failed(AutoparError):
    """A rank failed; the text says which and why."""


def _mesh(mesh: str) -> Mesh:
    """The mesh; -1 takes the ranks of the running job, else this machine's GPUs."""
    world = Settings.read().world_size
    if world is None and "-1" in mesh and torch.cuda.is_available():
        world = torch.cuda.device_count() or None
    return mesh_of(mesh, world)


def main() -> None:
    """The entry point. An error of the user's is one message, not a traceback."""
    try:
        app()
    except Stopped as stopped:
        print(f"autopar: {stopped}", file=sys.stderr)
        stopped.end()
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        raise SystemExit(1) from None
