"""The command line: autopar run, compile, inspect, explain, verify, estimate, plan, machine."""

# What may be said is declared here, and read before torch is imported, which takes seconds: `--help` and slips of the
# pen do not wait for it. So each command imports what it does where it does it.

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.arguments.command_options import CommandOptions, takes_options
from autopar.cli.arguments.stopped import Stopped
from autopar.cli.arguments.wanted_plans import Wanted
from autopar.cli.preflight import check_auto, check_checkpoints, check_run
from autopar.errors import AutoparError, MachineError, TargetError
from autopar.ir.options import PLANNED
from autopar.machines import DEVICES, built_in, check_writable, machine_text, named, notes_of, path_of

if TYPE_CHECKING:
    from autopar.compiled import Compiled

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # boxes take half of a terminal's width from what they hold, and 0.1 s
)  # fmt: skip
machine_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show machines that plans are made for, and measure this one."
)
app.add_typer(machine_app, name="machine")

_TARGET = typer.Argument(metavar="TARGET", help="file.py:function or package.module:function")
Target = Annotated[str, _TARGET]
MeshOption = Annotated[str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2; one size may be -1")]
RunMesh = Annotated[
    str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2; one size may be -1; auto; or several: A|B")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, with notes on stderr")]
MachineOption = Annotated[str, typer.Option(metavar="NAME|FILE", help="what the programs are made for")]
SECONDS = 10.0, 3600.0  # that a measurement may take


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"autopar {version('autopar')}, torch {version('torch')}")
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
    losses: Annotated[Path | None, typer.Option(help="write a JSON line a step here")] = None,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="write what TensorBoard shows")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="DIR", help="write what each rank did in the last steps")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="what programs are made for, and --mesh auto plans for")
    ] = None,
    *,
    options: CommandOptions,
) -> None:
    """Compile and train. On local processes, or as a part of a running torchrun job."""
    check_run(options, steps, losses, trace, tensorboard)
    check_checkpoints(options)
    check_auto(options.flags(), mesh.split("|")[0])
    if machine is not None:
        named(machine)  # which there has to be, before ranks start
    from autopar.cli.compiling import job_of
    from autopar.cli.ranks import fitting_mesh, on_ranks, running_mesh
    from autopar.cli.training import Outputs, train

    mesh = fitting_mesh(mesh)

    arguments = ["run", target, "--mesh", mesh, "--steps", str(steps), *options.arguments()]
    more = {"--losses": losses, "--tensorboard": tensorboard, "--trace": trace, "--machine": machine}
    arguments += [word for flag, value in more.items() if value is not None for word in (flag, str(value))]

    def train_here() -> None:
        to = Outputs(losses, tensorboard, trace)
        train(job_of(target, running_mesh(mesh), options), mesh, steps, options, to, machine)

    on_ranks(mesh, arguments, train_here, options.max_restarts or 0)


@app.command("compile")
@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout")
def compile_(
    target: Target,
    mesh: MeshOption,
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="a new or empty folder")],
    machine: MachineOption = DEVICES,
    *,
    options: CommandOptions,
) -> None:
    """Write the programs of all ranks as readable Python and JSON."""
    made_for = named(machine)
    from autopar.cli.compiling import compiled_of, show_saved

    compiled = compiled_of(target, mesh, options, made_for)
    compiled.save(out_dir)
    show_saved(compiled, out_dir)


@app.command()
@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout", "memory")
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
    machine: MachineOption = DEVICES,
    as_json: AsJson = False,
    *,
    options: CommandOptions,
) -> None:
    """Show a rank's program, collectives with reasons, and bytes."""
    if formula and (mesh is None or Path(target).is_dir()):
        raise TargetError(f"--formula compiles the model at other sizes: it needs a TARGET and --mesh, not '{target}'.")
    if pass_ is not None and diff is not None:
        raise TargetError("--pass and --diff: write one of them.")
    if device is not None and not (memory or formula):
        raise TargetError(f"--device {device}: it is of --memory and --formula; add one of them.")
    others = (html, pass_, diff, timeline_file, over, graph, device)
    if as_json and (timeline or memory or formula or full or any(each is not None for each in others)):
        raise TargetError("--json prints collectives and the peak of a rank: of other options it takes --rank alone.")
    compiled = _compiled(target, mesh, options, machine, over)
    from autopar.cli.show import draw_timeline, show_memory, show_pass, show_rank, write_page

    if html is not None:
        write_page(compiled, html, target)
    elif timeline or timeline_file is not None or over is not None:
        draw_timeline(compiled, timeline or timeline_file is None, timeline_file, over, target)
    elif pass_ is not None or diff is not None:
        show_pass(compiled, pass_, diff)
    elif not 0 <= rank < compiled.mesh.size:
        raise TargetError(f"--rank {rank}: mesh '{compiled.mesh}' has ranks 0 to {compiled.mesh.size - 1}.")
    elif memory or formula:
        show_memory(compiled, target, options, rank, device, formula)
    elif as_json:
        from autopar.cli.as_json import inspected
        from autopar.cli.show import show_json

        show_json(inspected(compiled, rank))
    else:
        show_rank(compiled, rank, graph, full)


def _compiled(target: str, mesh: str | None, options: CommandOptions, machine: str, traced: Path | None) -> Compiled:
    """The step of a TARGET on a mesh for a machine, or of the folder that `autopar compile` wrote. traced: the folder
    of a trace, for whose machine the step is made. Raises TargetError and MachineError."""
    if Path(target).is_dir():
        if mesh is not None or machine != DEVICES or options != CommandOptions(seed=options.seed):
            raise TargetError(f"'{target}' is compiled already: it takes no --mesh, --machine or options of a step.")
        from autopar.compiled import load

        return load(target)
    if mesh is None:
        raise TargetError(f"inspect '{target}': a TARGET needs --mesh, e.g. --mesh dp=2,tp=2.")
    from autopar.cli.compiling import compiled_of
    from autopar.report.timeline.trace import machine_of

    found = machine_of(traced) if traced is not None else None
    return compiled_of(target, mesh, options, found or named(machine))


@app.command()
@takes_options("check_replicas", "on_nonfinite", "timeout")
def verify(
    target: Target,
    mesh: MeshOption,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare")] = 2,
    backend: Annotated[str, typer.Option(help="virtual (one process) or gloo (local processes)")] = "virtual",
    ddp: Annotated[bool, typer.Option("--ddp", help='compare batch="ddp" with DistributedDataParallel')] = False,
    machine: MachineOption = DEVICES,
    as_json: AsJson = False,
    *,
    options: CommandOptions,
) -> None:
    """Compare a step with that of one device, in float64. Loss, every gradient and every updated weight. Exit code 1 on
    a mismatch."""
    check_run(options, steps)
    if backend not in ("virtual", "gloo"):
        raise TargetError(f"--backend {backend}: write virtual or gloo.")
    if options.cuda_graphs and backend == "virtual":
        raise TargetError("--cuda-graphs: a dry run of what each process would record; add --backend gloo.")
    if machine != DEVICES and backend == "gloo":
        raise TargetError(
            f"--machine {machine}: processes of --backend gloo run what this machine gets. Leave one out."
        )
    from autopar.cli.verifying import verify_target

    verify_target(target, mesh, steps, backend, ddp, named(machine), as_json, options)


@app.command()
@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout")
def explain(
    target: Target,
    mesh: MeshOption,
    value: Annotated[
        str | None, typer.Argument(metavar="VALUE", help="a parameter, a module path, or a node such as %add")
    ] = None,
    instead: Annotated[
        list[str] | None, typer.Option(metavar="tp=4", help="what would change in time and memory; may be repeated")
    ] = None,
    machine: MachineOption = DEVICES,
    batch: Annotated[int | None, typer.Option(metavar="ROWS", help="of --instead; else the job's batch", min=1)] = None,
    as_json: AsJson = False,
    *,
    options: CommandOptions,
) -> None:
    """Show what decided the layout of a value, and what it moves. On each axis, with what else it could have been. Or
    what another plan would change."""
    if (value is None) == (instead is None):
        raise TargetError("explain: write a VALUE, or --instead with what another plan decides: --instead tp=4.")
    if as_json and instead is not None:
        raise TargetError("--json is of a VALUE; --instead prints a table.")
    from autopar.cli.compiling import compiled_of
    from autopar.cli.instead import compared
    from autopar.cli.show import show, show_aside, show_json, show_notes

    if instead is not None:
        show(compared(target, mesh, options, instead, machine, batch))
        return
    assert value is not None
    compiled = compiled_of(target, mesh, options, named(machine), show_aside if as_json else show)
    if as_json:
        from autopar.cli.as_json import explained

        show_json(explained(compiled.explain(value), compiled))
        return
    show(str(compiled.explain(value)))
    show_notes(compiled)


@app.command()
@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout")
def estimate(
    target: Target,
    mesh: Annotated[str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2")],
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="see `autopar machine show`")] = DEVICES,
    imbalance: Annotated[
        float, typer.Option(help="of experts: the rows of the busiest rank over the mean, as model.last says", min=1.0)
    ] = 1.0,
    as_json: AsJson = False,
    *,
    options: CommandOptions,
) -> None:
    """Simulate a step on a machine: its time, and bytes at the peak. And what the time is made of."""
    chosen = named(machine)
    from autopar.cli.estimating import estimate_target

    estimate_target(target, mesh, chosen, imbalance, as_json, options)


@app.command("plan")
@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout", "stages", "memory", *PLANNED)
def plan_(
    gpus: Annotated[str, typer.Option(metavar="N|N,N,...", help="devices; of several, how the best plans scale")],
    target: Annotated[str | None, _TARGET] = None,
    hf: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG.json", help="plan the language model of a transformers configuration, in place of TARGET"
        ),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(metavar="N", help="tokens of a row, with --hf; by default 4096 at most", min=1)
    ] = None,
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
        list[str] | None,
        typer.Option(
            metavar="tp=8",
            help="what is decided: an axis, an option as zero=3, or order=pp,dp,tp; may be repeated. What there is not "
            "is answered by all that there is",
        ),
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
    as_json: AsJson = False,
    *,
    options: CommandOptions,
) -> None:
    """Find the fastest plan that fits. Sizes and order of axes, ZeRO, recomputation, micro-batches, schedule."""
    wanted = Wanted(gpus, batch, machine, memory, top, fix or (), out_file, html, tokens, check, as_json, hf, sequence)
    wanted.check_words(target)
    from autopar.cli.planning import plan_target

    plan_target(target, wanted, options)


@machine_app.command("show")
def show_(
    name: Annotated[str | None, typer.Argument(metavar="NAME|FILE", help="all names, if left out")] = None,
) -> None:
    """Print what a machine file says, with units: peaks, bandwidths, latencies, and what is reached of them."""
    if name is None:
        for each in built_in():
            typer.echo(f"{each:10} {notes_of(path_of(each))[0]}")
        return
    typer.echo(machine_text(named(name), notes_of(path_of(name))).rstrip())


@machine_app.command()
def measure(
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE.toml", help="the machine that was measured")],
    ranks: Annotated[int | None, typer.Option(metavar="N", help="processes; one a GPU, or a core up to 8")] = None,
    device: Annotated[str | None, typer.Option(metavar="cuda|cpu", help="by default what there is")] = None,
    seconds: Annotated[float, typer.Option(help="of all; more of them measure more often")] = 60.0,
    disk: Annotated[Path | None, typer.Option(metavar="DIR", help="a folder whose disk is measured too")] = None,
    until: Annotated[float | None, typer.Option(hidden=True, help="what the launcher tells its ranks")] = None,
) -> None:
    """Measure this machine: products, memory and launches of a device, collectives and messages between its ranks."""
    check_writable(out_file)
    if not SECONDS[0] <= seconds <= SECONDS[1]:
        raise MachineError(f"--seconds {seconds:g}: write {SECONDS[0]:g} to {SECONDS[1]:g}.")
    from autopar.cli.machine import measure_machine

    measure_machine(out_file, ranks, device, seconds, until, disk)


def main() -> None:
    """The entry point. An error of the user's is one message, not a traceback."""
    try:
        app()
    except Stopped as stopped:
        print(f"autopar: {stopped}", file=sys.stderr)
        stopped.end()
    except AutoparError as error:
        print(f"autopar: {error}", file=sys.stderr)
        if "--json" in sys.argv:  # who reads that reads stdout
            print(json.dumps({"error": str(error)}))
        raise SystemExit(1) from None
