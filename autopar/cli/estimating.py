"""`autopar estimate`: what a step takes on a machine that need not be here."""

from __future__ import annotations

from typing import Any

from autopar.cli.arguments.command_options import CommandOptions
from autopar.cli.compiling import compiled_of
from autopar.cli.show import show, show_aside, show_json, show_notes
from autopar.compiled import Compiled
from autopar.ir.ops.measure import human
from autopar.machines import Machine
from autopar.planning.price.step_report import StepTime
from autopar.report.memory.report import MemoryReport


def estimate_target(
    target: str, mesh: str, machine: Machine, imbalance: float, as_json: bool, options: CommandOptions
) -> None:
    """Show the time and the peak of the TARGET's step on a machine. imbalance: of experts."""
    compiled = compiled_of(target, mesh, options, machine, show_aside if as_json else show)
    found = compiled.time(machine, imbalance)
    largest, worst = _peaks(compiled, machine)
    if as_json:
        show_json({**_fields(found, largest), "worst_bytes": worst, "notes": list(compiled.notes)})
        return
    show(str(found))
    more = "" if worst is None else f"; {human(worst)} if all rows go to the experts of one rank"
    show(f"  at most {human(largest.peak)} of {human(machine.device.memory)} a device, on rank {largest.rank}{more}")
    if largest.host:
        show(f"  {human(largest.host)} of the host's memory for that rank")
    if largest.disk:
        show(f"  {human(largest.disk)} of the disk for that rank")
    show_notes(compiled)


def _peaks(compiled: Compiled, machine: Machine) -> tuple[MemoryReport, int | None]:
    """The memory of the fullest rank, and the most bytes of one whose experts get all rows, where rows move."""
    device = "cpu" if machine.is_host else "cuda"
    reports = [compiled.memory(ranks[0], device=device) for ranks in compiled.alike]
    worst = [report.worst for report in reports if report.worst is not None]
    return max(reports, key=lambda report: report.peak), max(worst, default=None)


def _fields(found: StepTime, largest: MemoryReport) -> dict[str, Any]:
    """What `--json` prints of a step (docs/cli.md)."""
    return {
        "mesh": found.mesh,
        "ranks": found.ranks,
        "machine": found.machine.name,
        "dtype": found.dtype,
        "step_us": found.total,
        "computing_us": found.computed,
        "waits_us": dict(found.exposed),
        "host_us": found.hosted,
        "bubble_us": found.bubble,
        "optimizer_us": found.optimizer,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "device_bytes": found.machine.device.memory,
        "peak_bytes": largest.peak,
        "peak_rank": largest.rank,
        "host_memory_bytes": largest.host,
        "disk_bytes": largest.disk,
    }
