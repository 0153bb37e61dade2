"""The command line: autopar run, compile, inspect, explain, verify."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from autopar.capture.capture import capture
from autopar.compiled import STEP, Compiled, load
from autopar.compiler import Choices, batch_arguments, lower
from autopar.errors import AutoparError, TargetError
from autopar.execution import compiler_of
from autopar.inspection import collectives_text, human, memory_text
from autopar.ir.text import diff_programs, print_program
from autopar.job import Job
from autopar.launch import launch, report
from autopar.meshes import mesh_of
from autopar.page import page_text
from autopar.settings import Settings
from autopar.target import load_job
from autopar.training import train
from autopar.verification import verify as verify_job
from autopar.verification_distributed import verify_on_ranks

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
out = Console(soft_wrap=True)

Target = Annotated[str, typer.Argument(metavar="TARGET", help="file.py:function or package.module:function")]
MeshOption = Annotated[str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2; one size may be -1")]
Seed = Annotated[int, typer.Option(help="of the initial weights and of random ops")]
SequenceOption = Annotated[
    bool, typer.Option("--sequence-parallel", help="split activations over tp on the sequence, between the weights")
]

SpecializeOption = Annotated[
    bool, typer.Option("--specialize", help="take values that the model reads from tensors from the example batch")
]
CompileOption = Annotated[
    str | None, typer.Option("--compile", metavar="inductor", help="run the programs as code that Inductor writes")
]


@app.command()
def run(
    target: Target,
    mesh: MeshOption,
    steps: Annotated[int, typer.Option(help="training steps")] = 100,
    seed: Seed = 0,
    sequence_parallel: SequenceOption = False,
    specialize: SpecializeOption = False,
    compile: CompileOption = None,
    log: Annotated[Path | None, typer.Option(help="write a JSON line a step here")] = None,
) -> None:
    """Compile and train: on local processes, or as a part of a running torchrun job."""
    options = ["run", target, "--mesh", mesh, "--steps", str(steps), "--seed", str(seed)]
    options += ["--log", str(log)] if log is not None else []
    options += _passed_on(sequence_parallel, specialize, compile)
    _on_ranks(
        mesh, options, lambda: train(_job(target, seed, sequence_parallel, specialize, compile), mesh, steps, seed, log)
    )


@app.command("compile")
def compile_(
    target: Target,
    mesh: MeshOption,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="a new or empty folder")],
    seed: Seed = 0,
    sequence_parallel: SequenceOption = False,
    specialize: SpecializeOption = False,
) -> None:
    """Write the programs of the distinct ranks as readable Python and JSON."""
    compiled = _compile(target, mesh, seed, sequence_parallel, specialize)
    compiled.save(out_dir)
    moved = sum(row.bytes for row in compiled.collectives)
    out.print(
        f"{out_dir}: 1 distinct program for {compiled.mesh.size} ranks (mesh {compiled.mesh}), "
        f"{len(compiled.program.graph.nodes)} nodes, {len(compiled.collectives)} collectives of {human(moved)} a step."
    )
    _show_notes(compiled)


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(metavar="TARGET|DIR", help="a TARGET, or what `autopar compile` wrote")],
    mesh: Annotated[str | None, typer.Option(help="needed with a TARGET")] = None,
    rank: Annotated[int, typer.Option(help="whose program")] = 0,
    graph: Annotated[str, typer.Option(metavar="NAME", help="which of the rank's graphs")] = STEP,
    pass_: Annotated[str | None, typer.Option("--pass", metavar="NAME", help="the program after this pass")] = None,
    diff: Annotated[str | None, typer.Option(metavar="NAME", help="what this pass changed")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write a page to look at in a browser")] = None,
    seed: Seed = 0,
    sequence_parallel: SequenceOption = False,
    specialize: SpecializeOption = False,
) -> None:
    """Show a rank's program, its collectives with their reasons, and the bytes that it holds."""
    if Path(target).is_dir():
        compiled = load(target)
    elif mesh is None:
        raise TargetError(f"inspect '{target}': a TARGET needs --mesh, e.g. --mesh dp=2,tp=2.")
    else:
        compiled = _compile(target, mesh, seed, sequence_parallel, specialize)
    if html is not None:
        _write_page(compiled, html, target)
        return
    if pass_ is not None or diff is not None:
        _show_pass(compiled, pass_, diff)
        return
    if not 0 <= rank < compiled.mesh.size:
        raise TargetError(f"--rank {rank}: mesh '{compiled.mesh}' has ranks 0 to {compiled.mesh.size - 1}.")
    names = list(compiled.ranks[rank].programs)
    if graph not in names:
        raise TargetError(f"--graph {graph}: rank {rank} has {', '.join(names)}.")
    coord = ",".join(f"{axis}={place}" for axis, place in compiled.ranks[rank].coord.items())
    out.print(f"rank {rank} ({coord}) of mesh {compiled.mesh}, graph '{graph}'", markup=False, highlight=False)
    out.print(compiled.text(rank, graph), markup=False, highlight=False)
    out.print(f"\ncollectives of a step\n{collectives_text(compiled)}", markup=False, highlight=False)
    out.print(f"\nbytes on each rank\n{memory_text(compiled)}", markup=False, highlight=False)
    _show_notes(compiled)


@app.command()
def explain(
    target: Target,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="a parameter, a module path, or a node such as %add")],
    mesh: MeshOption,
    seed: Seed = 0,
    sequence_parallel: SequenceOption = False,
    specialize: SpecializeOption = False,
) -> None:
    """Show what decided the layout of a value on each axis, what else it could have been, and what it moves."""
    compiled = _compile(target, mesh, seed, sequence_parallel, specialize)
    out.print(str(compiled.explain(value)), markup=False, highlight=False)
    _show_notes(compiled)


@app.command()
def verify(
    target: Target,
    mesh: MeshOption,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare")] = 2,
    backend: Annotated[str, typer.Option(help="virtual (one process) or gloo (local processes)")] = "virtual",
    seed: Seed = 0,
    sequence_parallel: SequenceOption = False,
    specialize: SpecializeOption = False,
    compile: CompileOption = None,
) -> None:
    """Compare loss, every gradient and every updated weight with one device, in float64. Exit code 1 on a mismatch."""
    if backend == "gloo":
        options = ["verify", target, "--mesh", mesh, "--steps", str(steps), "--seed", str(seed), "--backend", "gloo"]
        options += _passed_on(sequence_parallel, specialize, compile)

        def check() -> None:
            _finish(verify_on_ranks(_job(target, seed, sequence_parallel, specialize, compile), mesh, steps, seed))

        _on_ranks(mesh, options, check)
        return
    if backend != "virtual":
        raise TargetError(f"--backend {backend}: write virtual or gloo.")
    if compile is not None:
        raise TargetError(
            f"--compile {compile}: it compiles what a process runs, collectives included; add --backend gloo. "
            f"One process that plays all ranks has only autopar's own executor."
        )
    job = _job(target, seed, sequence_parallel, specialize)
    _finish(
        verify_job(
            job.model,
            mesh,
            loss_fn=job.loss_fn,
            batch=job.batch,
            steps=steps,
            optimizer=job.optimizer,
            seed=seed,
            sequence_parallel=job.sequence_parallel,
            specialize=job.specialize,
        )
    )


def _finish(found: object) -> None:
    """Show a report (rank 0 has it) and leave with its verdict."""
    if found is None:
        return
    out.print(str(found), markup=False, highlight=False)
    if not getattr(found, "ok", False):
        raise typer.Exit(1)


def _passed_on(sequence_parallel: bool, specialize: bool, compile: str | None) -> list[str]:
    """Options that each rank is started with."""
    compiler = compiler_of(compile)
    flags = {"--sequence-parallel": sequence_parallel, "--specialize": specialize}
    return [*(flag for flag, is_on in flags.items() if is_on), *(["--compile", compiler] if compiler else [])]


def _job(target: str, seed: int, sequence_parallel: bool, specialize: bool, compile: str | None = None) -> Job:
    """The TARGET's job, with what the command line says of it."""
    job = load_job(target, seed)
    job = replace(job, sequence_parallel=True) if sequence_parallel else job
    job = replace(job, specialize=True) if specialize else job
    return replace(job, compile=compiler_of(compile)) if compile is not None else job


def _compile(target: str, mesh: str, seed: int, sequence_parallel: bool, specialize: bool) -> Compiled:
    parsed = mesh_of(mesh)
    job = _job(target, seed, sequence_parallel, specialize)
    args, kwargs = batch_arguments(job.batch)
    captured = capture(job.model, job.loss_fn, args, kwargs, specialize=job.specialize)
    return lower(captured, parsed, Choices(sequence_parallel=job.sequence_parallel))


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


def _show_notes(compiled: Compiled) -> None:
    for note in compiled.notes:
        out.print(f"note: {note}", markup=False, highlight=False)


def _on_ranks(mesh: str, options: list[str], work: Callable[[], None]) -> None:
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
    parsed = mesh_of(mesh, _world(mesh))
    if parsed.size == 1:
        work()
        return
    failure = launch(options, parsed)
    if failure is not None:
        raise _Failed(failure)


class _Failed(AutoparError):
    """A rank failed; the text says which and why."""


def _world(mesh: str) -> int | None:
    """How many ranks -1 may take on this machine: its GPUs."""
    if "-1" not in mesh:
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return count
    return mesh_of(mesh, None).size  # says what is missing


def main() -> None:
    """The entry point. An error of the user's is one message, not a traceback."""
    try:
        app()
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        raise SystemExit(1) from None
