"""`autopar verify`: is a step right?"""

from __future__ import annotations

import typer

from autopar.cli.arguments.command_options import CommandOptions
from autopar.cli.compiling import job_of
from autopar.cli.ranks import on_ranks, running_mesh
from autopar.cli.show import show
from autopar.compiler.meshes import mesh_of
from autopar.verification.verify import verify as verify_job
from autopar.verification.verify_ranks import verify_on_ranks


def verify_target(target: str, mesh: str, steps: int, backend: str, ddp: bool, options: CommandOptions) -> None:
    """Verify the TARGET's step in this process, or on local ones."""
    if backend == "gloo":
        arguments = ["verify", target, "--mesh", mesh, "--steps", str(steps), "--backend", "gloo", *["--ddp"] * ddp]
        arguments += options.arguments()

        def verify_here() -> None:
            known = running_mesh(mesh)
            _finish(verify_on_ranks(job_of(target, known, options), str(known), steps, options.seed, ddp=ddp))

        on_ranks(mesh, arguments, verify_here)
        return
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
