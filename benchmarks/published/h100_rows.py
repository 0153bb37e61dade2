"""Rows of H100: FSDP of MPT and Llama, and Llama in 3D parallelism, all with a fused attention and bf16."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from autopar.errors import one_of
from autopar.machines import Machine, named
from benchmarks.published.case import MEMORY, STEP, Case, Row, mesh, numbers, pipelined
from benchmarks.published.models import GPT, Llama, eager_loss

MPT_WORDS, NANOTRON_WORDS = 50368, 131072
MPT = {  # layers, width, heads
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64),
}  # fmt: skip
NANOTRON = {  # billions of parameters: layers, width, heads, hidden, tied
    1.34: (16, 2048, 32, 8192, True), 3.57: (28, 3072, 32, 8192, True), 8.86: (32, 4096, 32, 14336, False),
    80.0: (80, 8192, 64, 28672, False), 469.0: (126, 16384, 128, 53248, False),
}  # fmt: skip
LLAMA = {  # layers, width, heads, heads of keys, hidden, words
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000), "llama3-8b": (32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": (80, 8192, 64, 8, 28672, 128256),
}  # fmt: skip
# torchtitan's selective recomputation keeps attention and every second product of a block, from the first one on.
EVERY_SECOND = {
    **dict.fromkeys((f"blocks.*.{each}" for each in ("q", "v", "core", "gate", "down")), "selective"),
    "*": "full",
}
NEAR = 0.02  # of a model's name, which is rounded
RESERVED = 8.5  # GiB: 7 to 10 (../shared/MACHINES.md, "Measured steps")
RECOMPUTE: dict[str, Any] = {"none": "none", "full": "full", "per op": EVERY_SECOND}


def mpt(row: Row) -> Case:
    """llm-foundry: FlashAttention, FSDP; FS is ZeRO-3, SGO ZeRO-2, AC full recomputation."""
    length, gpus, ga, gbs = numbers(row, "seq", "gpus", "ga", "gbs")
    if row["model"].lower() not in MPT:
        raise ValueError(f"model is {row['model']}; MPT has {one_of(MPT)}")
    layers, width, heads = MPT[row["model"].lower()]
    options: dict[str, Any] = {"zero": 3 if row["sharding"] == "FS" else 2, "precision": "bf16"}
    options |= {"recompute": "full"} if row["ac"] == "AC" else {}
    options |= {"microbatches": ga} if ga > 1 else {}
    tokens = float(row["tok_s_gpu"]) * gpus
    return Case(
        f"{row['model']} seq={length} gpus={gpus} {row['sharding']} {row['ac']}",
        f"{row['model']} {length} {gpus} {gbs}",
        partial(GPT, layers, width, heads, MPT_WORDS, length, is_fused=True), mesh(dp=gpus), gbs, length,
        _first_flash(), {STEP: gbs * length / tokens}, options,
    )  # fmt: skip


def _first_flash() -> Machine:
    """H100 with the first FlashAttention, in Triton (the default of `--attn_impl` in llm-foundry's
    submit_benchmarks.py): half as fast as the second one (arXiv 2307.08691, abstract)."""
    found = named("h100-80g")
    return replace(found, device=replace(found.device, attention=found.device.attention / 2))


def nanotron(row: Row) -> Case:
    """The best found of all that fit: fp32 accumulation, no recomputation, tp with sequence parallelism."""
    dp, tp, pp, microbatches, mbs = numbers(row, "dp", "tp", "pp", "grad_acc", "mbs")
    named_ = min(NANOTRON, key=lambda billions: abs(float(row["params_B"]) - billions))
    if abs(float(row["params_B"]) / named_ - 1) > NEAR:
        raise ValueError(f"params_B is {row['params_B']}; the models of nanotron have {one_of(NANOTRON)}")
    layers, width, heads, hidden, tied = NANOTRON[named_]
    options: dict[str, Any] = {"precision": "bf16", **pipelined(pp, microbatches)}
    options |= {"zero": int(row["zero"][1:])} if dp > 1 else {}
    options |= {"sequence_parallel": True} if tp > 1 else {}
    gbs = dp * microbatches * mbs
    return Case(
        f"{row['params_B']}B pp={pp} dp={dp} tp={tp} m={microbatches} {row['zero']}",
        f"{row['params_B']}B {row['gpus']} {gbs}",
        partial(Llama, layers, width, heads, heads, hidden, NANOTRON_WORDS, 4096, tied), mesh(pp=pp, dp=dp, tp=tp),
        gbs, 4096, named("h100-80g"), {STEP: float(row["step_ms"]) / 1e3}, options,
    )  # fmt: skip


def _grand_teton() -> Machine:
    """H100 with HBM2e of 2.4 TB/s (torchtitan's docs); they ran at 500 W, of which the model knows nothing."""
    found = named("h100-80g")
    return replace(found, device=replace(found.device, bandwidth=2.4e12))


def _llama(name: str, length: int) -> partial[Llama]:
    layers, width, heads, keys, hidden, words = LLAMA[name]
    return partial(Llama, layers, width, heads, keys, hidden, words, length, tied=False)


def _fsdp(row: Row, measured: dict[str, float]) -> Case:
    length, gpus, local = numbers(row, "seq", "gpus", "local_batch")
    is_compiled = row["compiled"] == "1"
    options = {"zero": 3, "precision": "bf16", "recompute": RECOMPUTE[row["recompute"]]}
    options |= {"compile": "triton"} if is_compiled else {}
    return Case(
        f"{row['model']} dp={gpus} recompute={row['recompute']}{' compiled' if is_compiled else ''}",
        f"{row['model']} {gpus} {row['compiled']}",
        _llama(row["model"], length), mesh(dp=gpus), local * gpus, length, _grand_teton(), measured, options,
        loss=eager_loss,
    )  # fmt: skip


def torchtitan(row: Row) -> Case:
    """FSDP2 with recomputation of every second product."""
    return _fsdp(row, {STEP: float(row["step_s"])})


def fsdp2(row: Row) -> Case:
    """Memory of FSDP2 at its peak. What an allocator has reserved in eager mode is more than what is active."""
    reserved = RESERVED if row["reserved"] == "1" and row["compiled"] == "0" else 0.0
    return _fsdp(row, {MEMORY: (float(row["memory_gib"]) - reserved) * 2**30})


def nemo(row: Row) -> Case:
    """Megatron-Core: interleaved 1F1B, sequence and context parallelism, ZeRO-1; the middle of all versions."""
    length, gpus, tp, pp, cp, chunks, mbs, microbatches = numbers(
        row, "seq", "gpus", "tp", "pp", "cp", "chunks", "mbs", "microbatches"
    )
    dp = gpus // (tp * pp * cp)
    options: dict[str, Any] = {
        "precision": "bf16",
        "zero": 1,
        "compile": "triton",
        **pipelined(pp, microbatches, chunks),
    }
    options |= {"sequence_parallel": True} if tp > 1 else {}
    return Case(
        f"{row['model']} pp={pp} dp={dp} cp={cp} tp={tp} m={microbatches}", row["model"], _llama(row["model"], length),
        mesh(pp=pp, dp=dp, cp=cp, tp=tp), dp * microbatches * mbs, length, named("h100-80g"),
        {STEP: (float(row["least_s"]) + float(row["most_s"])) / 2}, options,
    )  # fmt: skip
