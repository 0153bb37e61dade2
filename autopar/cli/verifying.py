"""`autopar verify`: is a step right?"""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.arguments.command_options import CommandOptions, takes_options
from autopar.cli.compiling import job_of
from autopar.cli.explaining import MeshOption, Target
from autopar.cli.preflight import check_run
from autopar.cli.ranks import on_ranks, running_mesh
from autopar.cli.show import show
from autopar.compiler.meshes import mesh_of
from autopar.errors import TargetError
from autopar.verification.verify import verify as verify_job
from autopar.verification.verify_ranks import verify_on_ranks


@takes_options("check_replicas", "on_nonfinite", "timeout")
def verify(
    target: Target,
    mesh: MeshOption,
    steps: Annotated[int, typer.Option(help="optimizer steps to compare")] = 2,
    backend: Annotated[str, typer.Option(help="virtual (one process) or gloo (local processes)")] = "virtual",
    ddp: Annotated[bool, typer.Option("--ddp", help='compare batch="ddp" with DistributedDataParallel')] = False,
    *,
    options: CommandOptions,
) -> None:
    """Compare loss, every gradient and every updated weight with one device, in float64. Exit code 1 on a mismatch."""
    check_run(options, steps)
    if backend == "gloo":
        arguments = ["verify", target, "--mesh", mesh, "--steps", str(steps), "--backend", "gloo", *["--ddp"] * ddp]
        arguments += options.arguments()

        def verify_here() -> None:
            known = running_mesh(mesh)
            _finish(verify_on_ranks(job_of(target, known, options), str(known), steps, options.seed, ddp=ddp))

        on_ranks(mesh, arguments, verify_here)
        return
    if backend != "virtual":
        raise TargetError(f"--backend {backend}: write virtual or gloo.")
    if options.cuda_graphs:
        raise TargetError("--cuda-graphs: a dry run of what each process would record; add --backend gloo.")
    job = job_of(target, mesh_of(mesh), options)
    _finish(
        verify_job(
            job.model,
            mesh,
            loss_fn=job.loss_fn,
            batch=job.batch,
            steps=steps,
            optimizer=job.optimizer,
            seed=options.seed,
            ddp=ddp,
            **job.step,
        )
    )


def _finish(found: object) -> None:
    """Show a report (rank 0 has it) and leave with its verdict."""
    if found is None:
        return
    show(str(found))
    if not getattr(found, "ok", False):
        raise typer.Exit(1)
