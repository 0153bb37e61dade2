"""The options of a training step, validated once for `parallelize`, `compile`, `verify`, `Job` and the CLI."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

import torch

from autopar.errors import CompileError, LayoutError, PlanError, ScheduleError, one_of
from autopar.ir.layout import Layout
from autopar.ir.plan import DTYPES, PRECISIONS, RECOMPUTE, Memory, Policy, Recompute, Staging
from autopar.passes.schedules import SCHEDULES, UserSchedule, check_schedule_name

Shard = Mapping[str, "str | Layout"]
SequenceParallel = bool | Literal["auto"]
ScheduleLike = str | Path | UserSchedule
Compiler = Literal["inductor"]
COMPILERS: tuple[Compiler, ...] = ("inductor",)
CHECK_EVERY = 100  # training steps from one comparison of replicas to the next


def read_stages(entries: Sequence[str]) -> tuple[str, ...]:
    """`a,b;c,d`, or several of these, as the modules of each stage."""
    return tuple(part.strip() for entry in entries for part in entry.split(";") if part.strip())


def read_recompute(text: str) -> Recompute:
    """`full`, `1000000`, `0.5` or `blocks.0-3=full,*=selective`."""
    if "=" not in text:
        return _policy(text)
    pairs = (entry.partition("=") for entry in text.split(","))
    return {pattern.strip(): _policy(policy) for pattern, _, policy in pairs}


def _policy(text: str) -> Policy:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text.strip()


@dataclass(frozen=True, slots=True)
class Flag:
    """How the command line has an option. kind: of what it is given, of which `read` makes the value."""

    help: str
    kind: Any = bool
    metavar: str | None = None
    read: Callable[[Any], Any] = lambda value: value


def option(default: Any, flag: Flag | None = None) -> Any:
    """A field of `StepOptions`, with its flag if it has one."""
    return field(default=default, metadata={"flag": flag})


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a training step is computed: keyword arguments of `parallelize`, `compile`, `verify` and `Job`, and options
    of the command line, which are made of these fields.

    shard: layouts by parameter pattern, e.g. `{"blocks.*.up.weight": "[tp,-]"}`, as constraints on the search.
    sequence_parallel: True splits norms, dropout and residuals over tp on the sequence: reduce-scatter and all-gather
      in place of all-reduce (arXiv 2205.05198). "auto" does so where the model allows it and where what the ranks no
      longer all compute outweighs the starts of more collectives (`passes/search/step_cost.py`); a note says so.
    specialize: values that the model reads from tensors (`if mask.any():`, `.item()`) are those of the first batch of
      each signature, and each step is checked to have the same; BatchError if not. Needs batch="global".
    microbatches: the parts of a rank's batch that are computed one after another. Loss, gradients and masks stay those
      of the whole batch. Without pp: accumulation of gradients, 1 by default; with it up to four for each stage.
    schedule: of a pipeline (an axis pp): "gpipe" (arXiv 1811.06965), "1f1b" or "interleaved-1f1b" (2104.04473),
      "zb-h1", "zb-h2" or "zb-v" (2401.10241); a CSV of actions such as 0F0; or a function, see docs/pipelines.md.
    stages: modules, a stage an entry, e.g. `["embed, blocks.0-3", "blocks.4-7, head"]`; by default the cut with the
      fastest slowest stage.
    chunks: stages on each rank.
    stage_memory: bytes that a stage may hold.
    zero: of which states a rank of the data axis keeps only its part (arXiv 1910.02054): 1 the optimizer's, 2 and
      gradients, 3 and parameters. With two data axes, "dp=2,fsdp=4", states are split over fsdp and replicated over
      dp; an axis fsdp means zero=3 if nothing else is said. Parameters are DTensors of the parts: any element-wise
      optimizer works.
    reshard_after_forward: False keeps what zero=3 gathered until the backward pass.
    recompute: what the backward pass computes again instead of keeping it: "none", "selective" (arXiv 2205.05198),
      "full", the bytes that a rank may keep (an int), or their part of what "none" keeps (a float); or those by
      pattern of modules, e.g. `{"blocks.0-3": "full", "*": "selective"}`.
    precision: "bf16" or "fp16" computes in it, with parameters and norms, softmax and loss in fp32; None as the model
      is.
    reduce_dtype: of the sums of gradients over ranks and micro-batches.
    bucket_bytes: of gradients or parameters that move together; None leaves it to the sizes of the model.
    """

    shard: Shard | None = option(None)
    sequence_parallel: SequenceParallel = option(
        False, Flag("split activations over tp on the sequence, between the weights")
    )
    specialize: bool = option(False, Flag("take values that the model reads from tensors from the example batch"))
    microbatches: int | None = option(None, Flag("parts of a rank's batch, one after another", int, "N"))
    schedule: ScheduleLike = option(
        "1f1b", Flag(f"of the axis pp: {', '.join(SCHEDULES)}, or a CSV file", str, "NAME|FILE.csv")
    )
    chunks: int | None = option(None, Flag("stages on a rank", int, "V"))
    stages: Sequence[str] | None = option(
        None,
        Flag("modules of the stages, ';' between stages; or once for each stage", list[str], '"a,b;c,d"', read_stages),
    )
    stage_memory: int | None = option(None, Flag("that a stage may hold", int, "BYTES"))
    zero: int | None = option(None, Flag("split optimizer states (1), gradients (2), parameters (3)", int, "0-3"))
    reshard_after_forward: bool = option(True, Flag("with --zero 3: keep what was gathered for the backward"))
    recompute: Recompute = option(
        "none",
        Flag(
            "what the backward pass computes again; a whole number is bytes, one with a point a part",
            str, "none|selective|full|BYTES|PART|MODULE=...,MODULE=...", read_recompute,
        ),
    )  # fmt: skip
    precision: str | None = option(None, Flag("to compute in", str, "bf16|fp16|fp32"))
    reduce_dtype: torch.dtype = option(
        torch.float32, Flag("of sums of gradients", str, "fp32|bf16|fp16", lambda text: DTYPES.get(text, text))
    )
    bucket_bytes: int | None = option(None, Flag("that move together", int, "BYTES"))

    @property
    def step(self) -> StepKeywords:
        """These options alone, as keyword arguments of `autopar.parallelize` and others."""
        return cast(StepKeywords, {each.name: getattr(self, each.name) for each in fields(StepOptions)})


class StepKeywords(TypedDict, total=False):
    """The fields of `StepOptions`, for type checkers (a test compares them)."""

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
    """The options, checked, as a plan takes them. uneven: a batch that its axes cannot divide is computed whole by
    every rank, not refused. stored: see `Plan`."""

    shard: Shard | None = None
    sequence_parallel: SequenceParallel = False
    uneven: bool = False
    specialize: bool = False
    microbatches: int | None = None
    staging: Staging = field(default_factory=Staging)
    memory: Memory = field(default_factory=Memory)
    stored: Mapping[str, Layout] = field(default_factory=dict)


def choices_of(**options: Unpack[StepKeywords]) -> Choices:
    """The options, checked as far as they can be without a mesh.

    Raises LayoutError, ScheduleError or PlanError, and TypeError for an option that does not exist.
    """
    names = [each.name for each in fields(StepOptions)]
    unknown = options.keys() - set(names)
    if unknown:
        raise TypeError(f"there is no option '{min(unknown)}'; there is {', '.join(names)}.")
    chosen = StepOptions(**options)
    sequence, specialize = chosen.sequence_parallel, chosen.specialize
    staging, memory = _staging(chosen), _memory(chosen)
    return Choices(dict(chosen.shard or {}), sequence, False, specialize, chosen.microbatches, staging, memory)


def _staging(chosen: StepOptions) -> Staging:
    stages = chosen.stages
    if isinstance(stages, str) or not all(isinstance(entry, str) for entry in stages or ()):
        raise LayoutError(
            f'stages={stages!r}: write a list of modules, a stage an entry: ["blocks.0-3", "blocks.4-7"].'
        )
    for name, value in (("chunks", chosen.chunks), ("stage_memory", chosen.stage_memory)):
        if value is not None and not _is_count(value):
            raise ScheduleError(f"{name}={value!r}: write a number of 1 or more.")
    check_schedule_name(chosen.schedule)
    return Staging(chosen.schedule, chosen.chunks, None if stages is None else tuple(stages), chosen.stage_memory)


def _memory(chosen: StepOptions) -> Memory:
    zero, precision, bucket_bytes = chosen.zero, chosen.precision, chosen.bucket_bytes
    if zero is not None and (isinstance(zero, bool) or zero not in (0, 1, 2, 3)):
        raise PlanError(
            f"zero={zero!r}: write 0, 1 (optimizer states are split), 2 (and gradients) or 3 (and parameters)."
        )
    if precision is not None and precision not in PRECISIONS:
        raise PlanError(f"precision={precision!r}: write {one_of(PRECISIONS)}, or None to compute as the model is.")
    if chosen.reduce_dtype not in DTYPES.values():
        raise PlanError(f"reduce_dtype={chosen.reduce_dtype!r}: write torch.float32, torch.bfloat16 or torch.float16.")
    if bucket_bytes is not None and not _is_count(bucket_bytes):
        raise PlanError(f"bucket_bytes={bucket_bytes!r}: write a number of bytes, 1 or more, or None.")
    recompute = chosen.recompute
    for policy in recompute.values() if isinstance(recompute, Mapping) else (recompute,):
        _check_policy(policy)
    again = bool(chosen.reshard_after_forward)
    return Memory(zero, again, recompute, precision, chosen.reduce_dtype, bucket_bytes)


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
