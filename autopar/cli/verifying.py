"""`autopar verify`: is a step right?"""

from __future__ import annotations

import math
from typing import Any

import typer

from autopar.cli.arguments.command_options import CommandOptions
from autopar.cli.compiling import job_of
from autopar.cli.ranks import on_ranks, running_mesh
from autopar.cli.show import show, show_aside, show_json
from autopar.compiler.meshes import mesh_of
from autopar.machines import Machine
from autopar.verification.judge.comparison import Mismatch, Report
from autopar.verification.verify import verify as verify_job
from autopar.verification.verify_ranks import verify_on_ranks


def verify_target(
    target: str, mesh: str, steps: int, backend: str, ddp: bool, machine: Machine, as_json: bool,
    options: CommandOptions,
) -> None:  # fmt: skip
    """Verify the TARGET's step in this process, as the programs are made for a machine, or on local ones."""
    tell = show_aside if as_json else show
    if backend == "gloo":
        arguments = ["verify", target, "--mesh", mesh, "--steps", str(steps), "--backend", "gloo"]
        arguments += [*["--ddp"] * ddp, *["--json"] * as_json, *options.arguments()]

        def verify_here() -> None:
            known = running_mesh(mesh)
            job = job_of(target, known, options, tell)
            _finish(verify_on_ranks(job, str(known), steps, options.seed, ddp=ddp), as_json)

        on_ranks(mesh, arguments, verify_here)
        return
    job = job_of(target, mesh_of(mesh), options, tell)
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
            machine=machine,
            **job.step,
        ),
        as_json,
    )


def _finish(found: Report | None, as_json: bool) -> None:
    """Show a report (rank 0 has it) and leave with its verdict."""
    if found is None:
        return
    if as_json:
        show_json(_fields(found))
    else:
        show(str(found))
    if not found.ok:
        raise typer.Exit(1)


def _fields(report: Report) -> dict[str, Any]:
    """What `--json` prints of a report (docs/cli.md)."""
    return {
        "ok": report.ok,
        "mesh": report.mesh,
        "dtype": str(report.dtype).removeprefix("torch."),
        "steps": report.steps,
        "tolerance": report.tolerance,
        "max_error": _finite(report.max_error),
        "compared": [
            {"kind": row.kind, "name": row.name, "error": _finite(row.error), "ok": row.ok} for row in report.rows
        ],
        "mismatch": None if report.mismatch is None else _place(report.mismatch),
        "undecided": report.undecided,
        "sums": list(report.sums),
        "note": report.note,
    }


def _place(mismatch: Mismatch) -> dict[str, Any]:
    return {
        "node": mismatch.node,
        "pass": mismatch.pass_name,
        "module": mismatch.module,
        "source": mismatch.source,
        "error": _finite(mismatch.error),
        "text": mismatch.text,
    }


def _finite(number: float) -> float | None:
    """A number as JSON has it: none for NaN and infinity."""
    return number if math.isfinite(number) else None
