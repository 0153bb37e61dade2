"""What another plan would change: the time and the memory of two compiled steps, part by part, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from autopar.compiler.lowered import Lowered
from autopar.ir.ops.measure import human
from autopar.ir.text.text_tables import table_text
from autopar.machines import Machine
from autopar.planning import StepTime, step_time
from autopar.planning.price.step_report import time_text
from autopar.report.memory.estimate import memory_report
from autopar.report.memory.report import MemoryReport


def instead_text(before: Lowered, after: Lowered, machine: Machine, changes: str) -> str:
    """A table of both steps with the difference, by parts. changes: what is decided otherwise."""
    times = _times(step_time(before, machine), step_time(after, machine), _moved(before), _moved(after))
    bytes_ = _bytes(_fullest(before, machine), _fullest(after, machine))
    heads = ("", str(before.mesh), f"{after.mesh} {changes}", "change", "why")
    return table_text(heads, [*times, *bytes_])


def _fullest(compiled: Lowered, machine: Machine) -> MemoryReport:
    device = "cpu" if machine.is_host else "cuda"
    reports = [memory_report(compiled, ranks[0], None, device) for ranks in compiled.alike]
    return max(reports, key=lambda report: report.peak)


def _moved(compiled: Lowered) -> Counter[str]:
    """The bytes that take part in collectives, by axis, on the ranks of the first stage."""
    moved = Counter[str]()
    for row in compiled.collectives:
        if row.place == 0:
            moved[row.axis] += row.bytes * row.times
    return moved


def _times(before: StepTime, after: StepTime, moved: Counter[str], then: Counter[str]) -> Iterator[tuple[str, ...]]:
    more = f"{after.total / before.total - 1:+.1%}" if after.total != before.total else ""
    yield _row("step", before.total, after.total, time_text, more)
    flops = [each.flops + each.recomputed for each in (before, after)]
    again = f"{flops[1] / flops[0] - 1:+.1%} FLOPs" if flops[0] and abs(flops[1] / flops[0] - 1) > 1e-3 else ""
    calls = f"{before.calls:,} calls, then {after.calls:,}" if before.calls != after.calls else ""
    yield _row("  computing", before.computed, after.computed, time_text, ", ".join(filter(None, (again, calls))))
    for axis in sorted(before.exposed.keys() | after.exposed.keys()):
        why = f"moves {human(moved[axis])}, then {human(then[axis])}"
        yield _row(f"  waits for {axis}", before.exposed.get(axis, 0.0), after.exposed.get(axis, 0.0), time_text, why)
    yield _row("  waits for the host", before.hosted, after.hosted, time_text)
    yield _row("  idle in the pipeline", before.bubble, after.bubble, time_text)
    yield _row("  optimizer (AdamW)", before.optimizer, after.optimizer, time_text)


def _bytes(before: MemoryReport, after: MemoryReport) -> Iterator[tuple[str, ...]]:
    places = f"at rank {before.rank}, then at rank {after.rank}" if before.rank != after.rank else ""
    yield _row("memory of a device", before.peak, after.peak, human, places)
    for name in dict.fromkeys((*before.categories, *after.categories)):
        found, then = before.categories.get(name, 0), after.categories.get(name, 0)
        if found or then:
            yield _row(f"  {name}", found, then, human)


def _row(name: str, before: float, after: float, words: Callable[[float], str], why: str = "") -> tuple[str, ...]:
    more = after - before
    change = "" if more == 0 else f"{'+' if more > 0 else '-'}{words(abs(more))}"
    return name, words(before), words(after), change, why
