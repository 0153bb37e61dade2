"""Jobs that plans are made for, and the programs that the compiler emits for these plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from models import Llama, token_loss
from verified import Once

import autopar
from autopar.compiled import Compiled
from autopar.ir.plan import Fixed
from autopar.machines import Machine
from autopar.planning.price.layers import Layers
from autopar.planning.space.candidates import Candidate
from autopar.report.memory.estimate import memory_report
from autopar.report.memory.known_results import KnownResults
from autopar.report.memory.report import MemoryReport


def llama_job(
    layers: int = 6,
    width: int = 256,
    heads: int = 8,
    hidden: int = 512,
    words: int = 512,
    length: int = 64,
    rows: int = 2,
) -> autopar.Job:  # fmt: skip
    """A Llama with as many heads of keys as of queries, on no device."""
    with torch.device("meta"):
        model = Llama(layers, width, heads, heads, hidden, words, length)
        ids = torch.empty(rows, length, dtype=torch.int64)
    return autopar.Job(model, token_loss, (ids, ids), precision="bf16")


def captured(job: autopar.Job) -> Once:
    """Capture a job's step, for all plans with as many rows (`rows_of`): it is a fifth of what such a case costs."""
    return Once.of(job.model, job.loss_fn, job.batch, None, precision=job.precision)


def on_same_captures(layers: Layers, machine: Machine, **options: Any) -> Layers:
    """The programs of the same captures on another machine, or with options that no capture reads; none is made yet."""
    micros = layers.micros
    return Layers(micros.captures, replace(micros.options, **options), machine)


def rows_of(candidate: Candidate) -> int:
    """The rows of a step."""
    return candidate.dp * candidate.fsdp * candidate.rows * candidate.microbatches


def compiled_for(once: Once, candidate: Candidate, machine: Machine | None = None, **options: object) -> Compiled:
    """Compile what `autopar.compile` does for a plan. options: further ones of the step."""
    fixed = None if machine is None else Fixed(machine=machine)
    return once.compiled(candidate.mesh, fixed, **candidate.options(), **options)  # type: ignore[arg-type]


@cache
def _results() -> KnownResults:
    """What ops give on the meta device: torch infers it once for each form of operands, whatever report asks."""
    return KnownResults()


def reports_of(compiled: Compiled) -> list[MemoryReport]:
    """What ranks of a GPU hold, one of those that are alike."""
    return [memory_report(compiled, ranks[0], device="cuda", known=_results()) for ranks in compiled.alike]


def peaks_of(compiled: Compiled) -> list[int]:
    """The bytes that ranks of a GPU hold at most, one of those that are alike."""
    return [report.peak for report in reports_of(compiled)]
