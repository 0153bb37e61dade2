"""From a command line to a job, and to its compiled step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopar.cli.arguments.command_options import CommandOptions
from autopar.cli.preflight import check_options, idle_options
from autopar.cli.show import out, show, show_notes
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import batch_arguments
from autopar.compiler.meshes import mesh_of
from autopar.ir.mesh import Mesh
from autopar.ir.ops.measure import human
from autopar.ir.plan import Fixed
from autopar.job import Job
from autopar.machines import Machine
from autopar.report.memory.within_memory import compile_step
from autopar.settings import Settings

Tell = Callable[[str], None]


def compiled_of(
    target: str, mesh: str, options: CommandOptions, machine: Machine | None = None, tell: Tell = show
) -> Compiled:
    """The TARGET's step, compiled for a mesh with what the command line says. machine: what it decides for. tell: of
    options that change nothing."""
    check_options(options)
    parsed = mesh_of(mesh)
    job = job_of(target, parsed, options, tell)
    chosen = options_of(**job.step)  # what is cheap to find is found before the capture
    fixed = None if machine is None else Fixed(machine=machine)
    made = compile_step(job.model, job.loss_fn, *batch_arguments(job.batch), parsed, chosen, fixed=fixed)
    return Compiled.of(made[1])


def job_of(target: str, mesh: Mesh, options: CommandOptions, tell: Tell = show) -> Job:
    """The TARGET's job; rank 0 tells which options change nothing."""
    job = options.job(target)
    if not Settings.read().rank:
        for text in idle_options(options, job, mesh):
            tell(f"note: {text}")
    return job


def show_saved(compiled: Compiled, folder: Path) -> None:
    """Show what `autopar compile` wrote into a folder."""
    programs, times = len(compiled.alike), sum(row.times for row in compiled.collectives)
    moved = sum(row.bytes * row.times for row in compiled.collectives)
    out.print(
        f"{folder}: {programs} distinct program{'s' * (programs > 1)} for {compiled.mesh.size} ranks "
        f"(mesh {compiled.mesh}), "
        f"{len(compiled.program.graph.nodes)} nodes, {times} collectives of {human(moved)} a step."
    )
    show_notes(compiled)
