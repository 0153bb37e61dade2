"""The options of a training step, validated once for `parallelize`, `compile`, `verify`, `Job` and the CLI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch

from autopar.errors import CompileError, LayoutError, PlanError, ScheduleError, one_of
from autopar.ir.layout import Layout
from autopar.ir.plan import PRECISIONS, RECOMPUTE, Memory, Recompute, Staging
from autopar.passes.schedules import UserSchedule, check_schedule_name

Shard = Mapping[str, "str | Layout"]
SequenceParallel = bool | Literal["auto"]
ScheduleLike = str | Path | UserSchedule
Compiler = Literal["inductor"]
COMPILERS: tuple[Compiler, ...] = ("inductor",)
CHECK_EVERY = 100  # training steps from one comparison of replicas to the next


class StepOptions(TypedDict, total=False):
    """How a step is computed: keyword arguments of `parallelize`, `compile`, `verify` and `Job`, told at the first."""

    shard: Shard | None
    sequence_parallel: SequenceParallel
    specialize: bool
    microbatches: int | None
    schedule: ScheduleLike
    stages: Sequence[str] | None
    chunks: int | None
    stage_memory: int | None
    zero: int | None
    reshard_after_forward: bool
    recompute: Recompute
    precision: str | None
    reduce_dtype: torch.dtype
    bucket_bytes: int | None


@dataclass(frozen=True, slots=True)
class Choices:
    """The same, checked. uneven: a batch that its axes cannot divide is computed whole by every rank, not refused.
    stored: see `Plan`."""

    shard: Shard | None = None
    sequence_parallel: SequenceParallel = False
    uneven: bool = False
    specialize: bool = False
    microbatches: int | None = None
    staging: Staging = field(default_factory=Staging)
    memory: Memory = field(default_factory=Memory)
    stored: Mapping[str, Layout] = field(default_factory=dict)


def choices_of(**options: Unpack[StepOptions]) -> Choices:
    """The options, checked as far as they can be without a mesh.

    Raises LayoutError, ScheduleError or PlanError, and TypeError for an option that does not exist.
    """
    given: dict[str, Any] = dict(options)
    unknown = given.keys() - StepOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"there is no option '{min(unknown)}'; there is {', '.join(StepOptions.__annotations__)}.")
    shard, sequence = given.pop("shard", None), given.pop("sequence_parallel", False)
    specialize, microbatches = given.pop("specialize", False), given.pop("microbatches", None)
    staging = _staging(**{name: given.pop(name) for name in _STAGING if name in given})
    return Choices(dict(shard or {}), sequence, False, specialize, microbatches, staging, _memory(**given))


_STAGING = ("schedule", "stages", "chunks", "stage_memory")


def _staging(
    schedule: ScheduleLike = "1f1b",
    stages: Sequence[str] | None = None,
    chunks: int | None = None,
    stage_memory: int | None = None,
) -> Staging:
    if isinstance(stages, str) or not all(isinstance(entry, str) for entry in stages or ()):
        raise LayoutError(
            f'stages={stages!r}: write a list of modules, a stage an entry: ["blocks.0-3", "blocks.4-7"].'
        )
    for name, value in (("chunks", chunks), ("stage_memory", stage_memory)):
        if value is not None and not _is_count(value):
            raise ScheduleError(f"{name}={value!r}: write a number of 1 or more.")
    check_schedule_name(schedule)
    return Staging(schedule, chunks, None if stages is None else tuple(stages), stage_memory)


def _memory(
    zero: int | None = None,
    reshard_after_forward: bool = True,
    recompute: Recompute = "none",
    precision: str | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    bucket_bytes: int | None = None,
) -> Memory:
    if zero is not None and (isinstance(zero, bool) or zero not in (0, 1, 2, 3)):
        raise PlanError(
            f"zero={zero!r}: write 0, 1 (optimizer states are split), 2 (and gradients) or 3 (and parameters)."
        )
    if precision is not None and precision not in PRECISIONS:
        raise PlanError(f"precision={precision!r}: write {one_of(PRECISIONS)}, or None to compute as the model is.")
    if reduce_dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise PlanError(f"reduce_dtype={reduce_dtype!r}: write torch.float32, torch.bfloat16 or torch.float16.")
    if bucket_bytes is not None and not _is_count(bucket_bytes):
        raise PlanError(f"bucket_bytes={bucket_bytes!r}: write a number of bytes, 1 or more, or None.")
    policies = recompute.values() if isinstance(recompute, Mapping) else (recompute,)
    for policy in policies:
        _check_policy(policy)
    return Memory(zero, bool(reshard_after_forward), recompute, precision, reduce_dtype, bucket_bytes)


def _check_policy(policy: Any) -> None:
    if isinstance(policy, str) and policy in RECOMPUTE:
        return
    is_number = isinstance(policy, (int, float)) and not isinstance(policy, bool)
    if not is_number or not 0 <= policy <= (1 if isinstance(policy, float) else math.inf):
        raise PlanError(
            f"recompute={policy!r}: write {one_of(RECOMPUTE)}, a number of bytes (an int), or the part of what "
            f"'none' saves that may be saved (a float from 0.0 to 1.0)."
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def compiler_of(name: str | None) -> Compiler | None:
    """The compiler of that name; None is our executor. Raises CompileError if there is none."""
    found: Compiler | None = next((compiler for compiler in COMPILERS if compiler == name), None)
    if found is None and name is not None:
        raise CompileError(
            f'compile={name!r}: write "inductor", or leave it out: the programs then run on autopar\'s own executor.'
        )
    return found
