"""`autopar estimate`: what a step takes on a machine that need not be here."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.arguments.command_options import CommandOptions, takes_options
from autopar.cli.compiling import compiled_of
from autopar.cli.show import show, show_notes
from autopar.ir.ops.measure import human
from autopar.ir.plan import DEVICES
from autopar.machines import named


@takes_options("cuda_graphs", "check_replicas", "on_nonfinite", "timeout")
def estimate(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="file.py:function or package.module:function")],
    mesh: Annotated[str, typer.Option("--mesh", help="axis=size pairs, e.g. dp=2,tp=2")],
    machine: Annotated[str, typer.Option(metavar="NAME|FILE", help="see `autopar machine show`")] = DEVICES,
    imbalance: Annotated[
        float, typer.Option(help="of experts: the rows of the busiest rank over the mean, as model.last says", min=1.0)
    ] = 1.0,
    *,
    options: CommandOptions,
) -> None:
    """Simulate a step of the programs on a machine: its time, what it is made of, and the bytes at the peak."""
    chosen = named(machine)
    compiled = compiled_of(target, mesh, options, chosen)
    show(str(compiled.time(chosen, imbalance)))
    device = "cpu" if chosen.is_host else "cuda"
    reports = [compiled.memory(ranks[0], device=device) for ranks in compiled.alike]
    largest = max(reports, key=lambda report: report.peak)
    worst = [report.worst for report in reports if report.worst is not None]
    more = f"; {human(max(worst))} if all rows go to the experts of one rank" if worst else ""
    show(f"  at most {human(largest.peak)} of {human(chosen.device.memory)} a device, on rank {largest.rank}{more}")
    show_notes(compiled)
