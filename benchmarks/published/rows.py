"""The rows of a file as cases: a model on no device, a plan, a machine, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from csv import DictReader
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.machines import Machine, named
from benchmarks.published.models import GPT, Llama

Row = Mapping[str, str]
LENGTH, MEGATRON_WORDS, MPT_WORDS, NANOTRON_WORDS = 2048, 51200, 50368, 131072
MPT = {"1b": (24, 2048, 16), "7b": (32, 4096, 32)}  # layers, width, heads
NANOTRON = {  # layers, width, heads, hidden, tied
    "1.34": (16, 2048, 32, 8192, True), "3.57": (28, 3072, 32, 8192, True), "8.86": (32, 4096, 32, 14336, False),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """name: of the model and its plan. model: made on no device. rows, length: of the global batch. measured: s."""

    name: str
    model: Callable[[], nn.Module]
    mesh: str
    rows: int
    length: int
    machine: Machine
    measured: float
    options: dict[str, Any] = field(default_factory=dict)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.empty(self.rows, self.length, dtype=torch.int64, device="meta")
        return ids, ids


def cases(path: Path) -> Iterator[Case]:
    """The cases of a file, whose kind its name tells. Raises ValueError for another name."""
    kind = next((kind for kind in KINDS if path.name.startswith(kind)), None)
    if kind is None:
        raise ValueError(f"{path}: a file is named {', '.join(f'{kind}*.csv' for kind in KINDS)}.")
    with path.open() as file:
        for row in DictReader(file):
            yield KINDS[kind](row)


def _numbers(row: Row, *names: str) -> list[int]:
    return [int(row[name]) for name in names]


def _mesh(**sizes: int) -> str:
    """tp lies within a node: it is the last axis, which is numbered fastest."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1"


def _pipelined(pp: int, microbatches: int, chunks: int = 1, layers: int = 0) -> dict[str, Any]:
    """layers: as many on each stage, as Megatron-LM deals them out; else stages are cut by the costs."""
    found: dict[str, Any] = {"microbatches": microbatches} if microbatches > 1 else {}
    if layers and pp > 1:
        found["stages"] = _equal_stages(layers, pp * chunks)
    if pp > 1:
        found |= {"schedule": "1f1b"} if chunks == 1 else {"schedule": "interleaved-1f1b", "chunks": chunks}
    return found


def _equal_stages(layers: int, stages: int) -> list[str]:
    """The embeddings are on the first one, the logits on the last."""
    each = layers // stages
    named = [f"blocks.{i * each}-{(i + 1) * each - 1}" if each > 1 else f"blocks.{i}" for i in range(stages)]
    return [f"tokens, positions, {named[0]}", *named[1:-1], f"{named[-1]}, norm, head"]


def _megatron_lm(machine: Machine) -> Machine:
    """As Megatron-LM of 2021 used it: all collectives are waited for where they are called."""
    return replace(machine, is_host=True)


MEGATRON_LM = {"recompute": "full", "precision": "fp16", "compile": "triton"}  # kernels fused by the JIT and by hand


def _megatron(row: Row) -> Case:
    """arXiv 2104.04473, table 1: Selene, fp16, full recomputation, no fused attention, equal stages."""
    heads, width, layers, tp, pp, chunks, dp, gbs, microbatches = _numbers(
        row, "heads", "hidden", "layers", "tp", "pp", "chunks", "dp", "gbs", "microbatches"
    )
    return Case(
        f"{row['params_B']}B pp={pp} dp={dp} tp={tp} m={microbatches} v={chunks}",
        lambda: GPT(layers, width, heads, MEGATRON_WORDS, LENGTH, is_fused=False),
        _mesh(pp=pp, dp=dp, tp=tp), gbs, LENGTH, _megatron_lm(named("a100-80g")), float(row["step_s"]),
        {**MEGATRON_LM, **_pipelined(pp, microbatches, chunks, layers)},
    )  # fmt: skip


def _vtrain(row: Row) -> Case:
    """Megatron-DeepSpeed on nodes with 800 Gb/s for 8 GPUs, fp16, full recomputation, 1F1B, equal stages."""
    gbs, mbs, width, heads, layers, length, tp, dp, pp = _numbers(
        row, "gbs", "mbs", "hidden", "heads", "layers", "seq", "tp", "dp", "pp"
    )
    machine = _megatron_lm(named("a100-80g"))
    return Case(
        f"{row['params_B']}B pp={pp} dp={dp} tp={tp} mbs={mbs}",
        lambda: GPT(layers, width, heads, MEGATRON_WORDS, length, is_fused=False),
        _mesh(pp=pp, dp=dp, tp=tp), gbs, length,
        replace(machine, between=replace(machine.between, bandwidth=12.5e9)), float(row["iter_ms"]) / 1e3,
        {**MEGATRON_LM, **_pipelined(pp, gbs // dp // mbs, 1, layers)},
    )  # fmt: skip


def _mpt(row: Row) -> Case:
    """llm-foundry: FlashAttention, bf16, FSDP; FS is ZeRO-3, SGO ZeRO-2, AC full recomputation."""
    length, gpus, ga, gbs = _numbers(row, "seq", "gpus", "ga", "gbs")
    layers, width, heads = MPT[row["model"]]
    options: dict[str, Any] = {"zero": 3 if row["sharding"] == "FS" else 2, "precision": "bf16"}
    options |= {"recompute": "full"} if row["ac"] == "AC" else {}
    options |= {"microbatches": ga} if ga > 1 else {}
    tokens = float(row["tok_s_gpu"]) * gpus
    return Case(
        f"{row['model']} seq={length} gpus={gpus} {row['sharding']} {row['ac']}",
        lambda: GPT(layers, width, heads, MPT_WORDS, length, is_fused=True),
        _mesh(dp=gpus), gbs, length, named("h100-80g"), gbs * length / tokens, options,
    )  # fmt: skip


def _nanotron(row: Row) -> Case:
    """The best found of all that fit: bf16, fp32 accumulation, no recomputation, tp with sequence parallelism."""
    dp, tp, pp, microbatches, mbs = _numbers(row, "dp", "tp", "pp", "grad_acc", "mbs")
    layers, width, heads, hidden, tied = NANOTRON[row["params_B"]]
    options: dict[str, Any] = {"precision": "bf16", **_pipelined(pp, microbatches)}
    options |= {"zero": int(row["zero"][1:])} if dp > 1 else {}
    options |= {"sequence_parallel": True} if tp > 1 else {}
    return Case(
        f"{row['params_B']}B pp={pp} dp={dp} tp={tp} m={microbatches} {row['zero']}",
        lambda: Llama(layers, width, heads, hidden, NANOTRON_WORDS, 4096, tied),
        _mesh(pp=pp, dp=dp, tp=tp), dp * microbatches * mbs, 4096, named("h100-80g"), float(row["step_ms"]) / 1e3,
        options,
    )  # fmt: skip


KINDS: Mapping[str, Callable[[Row], Case]] = {
    "megatron": _megatron, "vtrain": _vtrain, "mpt": _mpt, "nanotron": _nanotron,
}  # fmt: skip
