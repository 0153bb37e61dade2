"""Rows of Megatron-LM on A100, as it was from 2021 to 2023: fp16, no fused attention, dropout, equal stages.

Where a block is computed again all of it is, its last product and the sum of that over tp too, which no gradient needs:
its checkpoint runs the whole forward pass of a block (arXiv 2104.04473 counts 96 B s l h^2 FLOPs, 24 of them for that).

In 2021 every collective was waited for where it was called. Korthikanti et al. had, in 2022, the collectives of tp in
the backward pass beside the gradients of weights (from memory of arXiv 2205.05198, and the help of Megatron-LM's
`--no-async-tensor-model-parallel-allreduce`): their programs start collectives early (`overlap`), but cut no product
into chunks, as those for a machine where nothing hides a collective (`decompose`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from autopar.machines import Machine, named
from benchmarks.published.case import BACKWARD, FORWARD, MEMORY, STEP, Case, Row, mesh, numbers, pipelined, stages
from benchmarks.published.models import GPT

LENGTH, WORDS = 2048, 51200
FIRST, LAST = "tokens, positions", "norm, head"
KERNELS: dict[str, Any] = {"precision": "fp16", "compile": "triton"}  # those fused by the JIT and by hand
# Gradients were summed over ranks in fp16 (from memory of Megatron-LM's `--accumulate-allreduce-grads-in-fp32`, which
# is off by default, and of DeepSpeed's `communication_data_type`).
FULL = {**KERNELS, "recompute": "full", "reduce_dtype": torch.float16}
OUTLIERS = {("3.6", "8", "64"), ("3.6", "8", "2")}  # model, tp, rows of a micro-batch


def _waiting(machine: Machine) -> Machine:
    """As Megatron-LM of 2021 used it: all collectives are waited for where they are called."""
    return replace(machine, is_host=True)


def _staged(layers: int, pp: int, microbatches: int, chunks: int = 1) -> dict[str, Any]:
    """As many layers on each stage, or one more on some."""
    found, count = pipelined(pp, microbatches, chunks), pp * chunks
    if pp > 1:
        ends = [layers * i // count for i in range(count + 1)]
        found["stages"] = stages([end - begin for begin, end in pairwise(ends)], FIRST, LAST)
    return found


def _gpt(layers: int, width: int, heads: int, length: int = LENGTH, recompute: str = "full") -> partial[GPT]:
    return partial(GPT, layers, width, heads, WORDS, length, is_fused=False, is_whole=recompute == "full")


def sc21(row: Row) -> Case:
    """arXiv 2104.04473, table 1: Selene, full recomputation."""
    heads, width, layers, tp, pp, chunks, dp, gbs, microbatches = numbers(
        row, "heads", "hidden", "layers", "tp", "pp", "chunks", "dp", "gbs", "microbatches"
    )
    return Case(
        f"{row['params_B']}B pp={pp} dp={dp} tp={tp} m={microbatches} v={chunks}", f"{row['params_B']}B {gbs}",
        _gpt(layers, width, heads), mesh(pp=pp, dp=dp, tp=tp), gbs, LENGTH, _waiting(named("a100-80g")),
        {STEP: float(row["step_s"])}, {**FULL, **_staged(layers, pp, microbatches, chunks)},
    )  # fmt: skip


def vtrain(row: Row) -> Case:
    """Megatron-DeepSpeed on nodes with 800 Gb/s for 8 GPUs, full recomputation, 1F1B."""
    gbs, mbs, width, heads, layers, length, tp, dp, pp = numbers(
        row, "gbs", "mbs", "hidden", "heads", "layers", "seq", "tp", "dp", "pp"
    )
    machine = _waiting(named("a100-80g"))
    return Case(
        f"{row['params_B']}B pp={pp} dp={dp} tp={tp} mbs={mbs}", f"{row['params_B']}B {row['gpus']} {gbs}",
        _gpt(layers, width, heads, length), mesh(pp=pp, dp=dp, tp=tp), gbs, length,
        replace(machine, between=replace(machine.between, bandwidth=12.5e9)), {STEP: float(row["iter_ms"]) / 1e3},
        {**FULL, **_staged(layers, pp, gbs // dp // mbs)},
        is_outlier=(row["params_B"], row["tp"], row["mbs"]) in OUTLIERS,
    )  # fmt: skip


def layer(row: Row) -> Case:
    """arXiv 2205.05198: one layer of a model, forward and backward apart."""
    width, heads, length, tp, mbs = numbers(row, "hidden", "heads", "seq", "tp", "mbs")
    is_split = row["sequence_parallel"] == "1"
    return Case(
        f"{row['params_B']}B layer {row['recompute']}{' SP' if is_split else ''}", row["params_B"],
        _gpt(4, width, heads, length, row["recompute"]), mesh(tp=tp), 2 * mbs, length, named("a100-80g"),
        {FORWARD: float(row["forward_ms"]) / 1e3, BACKWARD: float(row["backward_ms"]) / 1e3},
        {**KERNELS, "recompute": row["recompute"], "sequence_parallel": is_split, "microbatches": 2},
        shorter=_gpt(3, width, heads, length, row["recompute"]), made_for=_waiting(named("a100-80g")),
    )  # fmt: skip


def korthikanti(row: Row) -> Case:
    """arXiv 2205.05198: whole steps with full recomputation, and with selective and sequence parallelism."""
    layers, width, heads, tp, pp, chunks, gbs, mbs = numbers(
        row, "layers", "hidden", "heads", "tp", "pp", "chunks", "gbs", "mbs"
    )
    is_split = row["sequence_parallel"] == "1"
    options = {**KERNELS, "recompute": row["recompute"], "sequence_parallel": is_split}
    return Case(
        f"{row['params_B']}B pp={pp} tp={tp} {row['recompute']}{' SP' if is_split else ''}", f"{row['params_B']}B",
        _gpt(layers, width, heads, recompute=row["recompute"]), mesh(pp=pp, tp=tp), gbs, LENGTH, named("a100-80g"),
        {STEP: float(row["step_s"])}, {**options, **_staged(layers, pp, gbs // mbs, chunks)},
        made_for=_waiting(named("a100-80g")),
    )  # fmt: skip


def zero_bubble(row: Row) -> Case:
    """arXiv 2401.10241, table 4: memory of schedules; the first and the last rank have a layer less."""
    layers, width, heads, length, pp, mbs, microbatches = numbers(
        row, "layers", "hidden", "heads", "seq", "pp", "mbs", "microbatches"
    )
    each = (layers + 2) // pp
    is_interleaved = row["schedule"].startswith("interleaved")
    counts = [1] * (pp * each) if is_interleaved else [each] * pp
    counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    options = pipelined(pp, microbatches, each if is_interleaved else 1, row["schedule"])
    return Case(
        f"{row['params_B']}B pp={pp} m={microbatches} {row['schedule']}", row["params_B"],
        partial(_gpt(layers, width, heads, length, "none"), is_kept=True), mesh(pp=pp), mbs * microbatches, length,
        _waiting(named("a100-80g")), {MEMORY: float(row["memory_gb"]) * 2**30},
        {**KERNELS, **options, "stages": stages(counts, FIRST, LAST)},
    )  # fmt: skip
