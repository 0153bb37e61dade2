"""What `autopar plan` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from autopar.ir.ops.measure import human
from autopar.ir.text.text_tables import table_text
from autopar.planning.others import BestPlan
from autopar.planning.planner import Planned
from autopar.planning.price.predict import Prediction
from autopar.planning.price.step_report import time_text

HEADS = ("plan", "step", "tokens/s", "MFU", "memory", "idle", "waits for tp, cp", "data axes", "optimizer", "figures")
FIGURES = ("predicted", "emitted")


def planned_text(planned: Planned) -> str:
    """The plans that fit, the fastest first, and what became of the others."""
    return "\n".join(_lines(planned))


def plan_line(planned: Planned) -> str:
    """What is known of the best plan."""
    best, asked = planned.found.best[0], planned.asked
    known = "as emitted for" if best.is_emitted else "predicted on"
    return (
        f"{known} {asked.machine.name}: {time_text(best.total)} a step, {planned.rate:,.0f} tokens a second, "
        f"MFU {_mfu(planned, best):.1%}, {human(best.memory)} of {human(asked.limit)} a device"
    )


def reason_line(planned: Planned) -> str:
    """The best plan and why it is the best, for a log."""
    best, asked = planned.found.best[0], planned.asked
    others = [f"the next, {each.candidate}, takes {_longer(each, best)}" for each in planned.found.best[1:2]]
    words = f"{best.candidate} for {asked.gpus} ranks of {asked.machine.name} and {asked.batch} rows"
    found = f"{words}: {time_text(best.total)} a step, {human(best.memory)} of {human(asked.limit)}"
    return "; ".join((found, *others, planned.certificate))


SCALE_HEADS = ("plan", "step", "tokens/s", "a device", "MFU", "memory")


def scales_text(scales: Sequence[BestPlan], tokens: float | None, of: Literal["devices", "rows"] = "devices") -> str:
    """The best plan for each number of devices, or of rows a step. tokens: of a training, for its days and its hours of
    devices."""
    more = () if tokens is None else (f"days for {tokens:.3g} tokens", "device hours")
    heads = (of, *SCALE_HEADS, *more)
    rows = [(f"{_count(each, of)}", *_scale_row(each.found, tokens)) for each in scales if each.found is not None]
    faults = [f"{_count(each, of)} {of}: {each.fault}" for each in scales if each.fault]
    return "\n".join([table_text(heads, rows), *faults])


def _count(scale: BestPlan, of: str) -> int:
    return scale.asked.gpus if of == "devices" else scale.asked.batch


def _scale_row(planned: Planned, tokens: float | None) -> tuple[str, ...]:
    best, gpus, rate = planned.found.best[0], planned.asked.gpus, planned.rate
    row = (
        str(best.candidate), time_text(best.total), f"{rate:,.0f}", f"{rate / gpus:,.0f}", f"{_mfu(planned, best):.1%}",
        human(best.memory),
    )  # fmt: skip
    if tokens is None:
        return row
    hours = tokens / rate / 3600
    return (*row, f"{hours / 24:,.1f}", f"{hours * gpus:,.0f}")


def _longer(prediction: Prediction, best: Prediction) -> str:
    more = prediction.total / best.total - 1
    return f"{abs(more):.1%} {'shorter' if more < 0 else 'longer'}"


def _mfu(planned: Planned, prediction: Prediction) -> float:
    flops = planned.asked.machine.device.flops
    peak = planned.asked.gpus * flops.get(planned.work.dtype, flops["float32"])
    return planned.work.flops / peak / prediction.total * 1e6


def head_line(planned: Planned) -> str:
    """What was asked for."""
    asked = planned.asked
    layers = f", {planned.model.layers} equal layers" if planned.model.layers else ""
    compiler = planned.programs.micros.options.compile
    return (
        f"{asked.gpus} devices of {asked.machine.name}, {asked.batch} rows ({planned.tokens:,} tokens) a step, at most "
        f"{human(asked.limit)} a device{layers}; products in {planned.work.dtype}, compile={compiler}"
    )


def fields_of(planned: Planned, lost: Sequence[str]) -> dict[str, Any]:
    """What `--json` prints of plans (docs/cli.md). lost: why others lost."""
    asked = planned.asked
    return {
        "devices": asked.gpus, "machine": asked.machine.name, "rows": asked.batch, "tokens": planned.tokens,
        "limit_bytes": asked.limit, "dtype": planned.work.dtype, "layers": planned.model.layers,
        "plans": [
            {
                "plan": str(each.candidate), "mesh": str(each.candidate.mesh), "options": each.candidate.options(),
                "step_us": each.total, "tokens_per_second": planned.tokens / each.total * 1e6,
                "mfu": _mfu(planned, each), "memory_bytes": each.memory,
                "host_memory_bytes": 0 if each.candidate.folder else each.host,
                "disk_bytes": each.host if each.candidate.folder else 0,
                "figures": FIGURES[each.is_emitted],
            }
            for each in planned.found.best
        ],
        "lost": list(lost), "certificate": planned.certificate,
    }  # fmt: skip


def _lines(planned: Planned) -> Iterator[str]:
    yield head_line(planned)
    yield table_text(HEADS, [row_of(planned, each) for each in planned.found.best])
    yield planned.certificate


def memory_text(prediction: Prediction) -> str:
    """The bytes of a device, and of the host's memory for a rank, if any are there."""
    where = "on disk" if prediction.candidate.folder else "of the host"
    there = f" + {human(prediction.host)} {where}" if prediction.host else ""
    return f"{human(prediction.memory)}{there}"


def row_of(planned: Planned, prediction: Prediction) -> tuple[str, ...]:
    """A row of the table of plans."""
    parts = (prediction.bubble, prediction.exposed, prediction.data, prediction.optimizer)
    return (
        str(prediction.candidate), time_text(prediction.total), f"{planned.tokens / prediction.total * 1e6:,.0f}",
        f"{_mfu(planned, prediction):.1%}", memory_text(prediction),
        *(f"{us / prediction.total:.1%}" for us in parts), FIGURES[prediction.is_emitted],
    )  # fmt: skip
