"""`autopar estimate`: what a step takes on a machine that need not be here."""

from __future__ import annotations

from autopar.cli.arguments.command_options import CommandOptions
from autopar.cli.compiling import compiled_of
from autopar.cli.show import show, show_notes
from autopar.ir.ops.measure import human
from autopar.machines import named


def estimate_target(target: str, mesh: str, machine: str, imbalance: float, options: CommandOptions) -> None:
    """Show the time and the peak of the TARGET's step on a machine. imbalance: of experts."""
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
