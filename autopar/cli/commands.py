"""The command line: autopar run, compile, inspect, explain, verify, estimate, plan, machine."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer

from autopar.cli.arguments.command_options import CommandOptions, takes_options
from autopar.cli.compiling import compiled_of, job_of
from autopar.cli.estimating import estimate
from autopar.cli.explaining import MeshOption, Target, explain
from autopar.cli.launch import Stopped
from autopar.cli.machine import app as machine_app
from autopar.cli.planning import plan_
from autopar.cli.preflight import check_auto, check_checkpoints, check_run
from autopar.cli.ranks import on_ranks, running_mesh
from autopar.cli.show import draw_timeline, out, show, show_memory, show_notes, show_pass, show_rank, write_page
from autopar.cli.training import train
from autopar.cli.verifying import verify
from autopar.compiled import load
from autopar.errors import AutoparError, TargetError
from autopar.ir.ops.measure import human

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
app.add_typer(machine_app, name="machine")

RunMesh = Annotated[str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2; one size may be -1; or auto")]


def _version(asked: bool) -> None:
    if asked:
        show(f"autopar {version('autopar')}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def _every(
    versions: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show the versions of autopar and torch")
    ] = False,
) -> None:
    """The command line: autopar run, compile, inspect, explain, verify, estimate, plan, machine."""


@app.command()
@takes_options(run=True)
def run(
    target: Target,
    mesh: RunMesh,
    steps: Annotated[int, typer.Option(help="training steps")] = 100,
    log: Annotated[Path | None, typer.Option(help="write a JSON line a step here")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write what each rank did in the last steps")
    ] = None,
    machine: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="what --mesh auto plans for")] = None,
    *,
    options: CommandOptions,
) -> None:
    """Compile and train: on local processes, or as a part of a running torchrun job."""
    check_run(options, steps, log, trace)
    check_checkpoints(options)
    check_auto(options.flags(), machine, mesh)
    arguments = ["run", target, "--mesh", mesh, "--steps", str(steps), *options.arguments()]
    more = {"--log": log, "--trace": trace, "--machine": machine}
    arguments += [word for flag, value in more.items() if value is not None for word in (flag, str(value))]

    def train_here() -> None:
        train(job_of(target, running_mesh(mesh), options), mesh, steps, options, log, trace, machine)

    on_ranks(mesh, arguments, train_here, options.max_restarts or 0)


@app.command("compile")
@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout")
def compile_(
    target: Target,
    mesh: MeshOption,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="a new or empty folder")],
    *,
    options: CommandOptions,
) -> None:
    """Write the programs of the distinct ranks as readable Python and JSON."""
    compiled = compiled_of(target, mesh, options)
    compiled.save(out_dir)
    programs, times = len(compiled.alike), sum(row.times for row in compiled.collectives)
    moved = sum(row.bytes * row.times for row in compiled.collectives)
    out.print(
        f"{out_dir}: {programs} distinct program{'s' * (programs > 1)} for {compiled.mesh.size} ranks "
        f"(mesh {compiled.mesh}), "
        f"{len(compiled.program.graph.nodes)} nodes, {times} collectives of {human(moved)} a step."
    )
    show_notes(compiled)


@app.command()
@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout")
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
    options: CommandOptions,
) -> None:
    """Show a rank's program, its collectives with their reasons, and the bytes that it holds."""
    if formula and (mesh is None or Path(target).is_dir()):
        raise TargetError(f"--formula compiles the model at other sizes: it needs a TARGET and --mesh, not '{target}'.")
    if pass_ is not None and diff is not None:
        raise TargetError("--pass and --diff: write one of them.")
    if device is not None and not (memory or formula):
        raise TargetError(f"--device {device}: it is of --memory and --formula; add one of them.")
    if Path(target).is_dir():
        if mesh is not None or options != CommandOptions(seed=options.seed):
            raise TargetError(f"'{target}' is compiled already: it takes no --mesh and no options of a step.")
        compiled = load(target)
    elif mesh is None:
        raise TargetError(f"inspect '{target}': a TARGET needs --mesh, e.g. --mesh dp=2,tp=2.")
    else:
        compiled = compiled_of(target, mesh, options)
    if html is not None:
        write_page(compiled, html, target)
        return
    if timeline or timeline_file is not None or over is not None:
        draw_timeline(compiled, timeline or timeline_file is None, timeline_file, over, target)
        return
    if pass_ is not None or diff is not None:
        show_pass(compiled, pass_, diff)
        return
    if not 0 <= rank < compiled.mesh.size:
        raise TargetError(f"--rank {rank}: mesh '{compiled.mesh}' has ranks 0 to {compiled.mesh.size - 1}.")
    if memory or formula:
        show_memory(compiled, target, options, rank, device, formula)
        return
    show_rank(compiled, rank, graph, full)


app.command()(verify)
app.command()(explain)
app.command()(estimate)
app.command("plan")(plan_)


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
