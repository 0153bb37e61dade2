"""A published measurement: a model on no device, a plan, a machine, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.machines import Machine
from benchmarks.published.models import token_loss

Row = Mapping[str, str]
STEP, MEMORY, FORWARD, BACKWARD = "step", "memory", "forward", "backward"
UNITS = {STEP: (1.0, "s"), MEMORY: (2.0**30, "GiB"), FORWARD: (1e-3, "ms"), BACKWARD: (1e-3, "ms")}


@dataclass(frozen=True)
class Case:
    """name: of the model and its plan. group: of the cases that train the same model on as many devices with the same
    batch. model: made on no device. rows, length: of the global batch. measured: by what it is: seconds of a step, of a
    layer's forward or backward pass, or bytes of a rank at its peak. is_outlier: by ../shared/MACHINES.md. shorter: the
    model with a layer less, where a layer was measured. made_for: what the programs are made for, if that is not
    `machine`, which they are simulated on. loss: of the model and a batch."""

    name: str
    group: str
    model: Callable[[], nn.Module]
    mesh: str
    rows: int
    length: int
    machine: Machine
    measured: Mapping[str, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_outlier: bool = False
    shorter: Callable[[], nn.Module] | None = None
    made_for: Machine | None = None
    loss: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] = token_loss

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.empty(self.rows, self.length, dtype=torch.int64, device="meta")
        return ids, ids

    def with_options(self, more: Mapping[str, Any]) -> Case:
        """The same with other options of a step."""
        return replace(self, options={**self.options, **more})


def numbers(row: Row, *names: str) -> list[int]:
    """Some columns of a row as whole numbers."""
    return [int(row[name]) for name in names]


def mesh(**sizes: int) -> str:
    """Axes of more than one rank. The last axis is numbered fastest: it lies within a node."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "dp=1"


def pipelined(pp: int, microbatches: int, chunks: int = 1, schedule: str = "") -> dict[str, Any]:
    """The options of 1F1B or, with chunks, of interleaved 1F1B; or of another schedule."""
    found: dict[str, Any] = {"microbatches": microbatches} if microbatches > 1 else {}
    if pp > 1:
        found["schedule"] = schedule or ("1f1b" if chunks == 1 else "interleaved-1f1b")
    if pp > 1 and chunks > 1:
        found["chunks"] = chunks
    return found


def stages(counts: list[int], first: str, last: str) -> list[str]:
    """So many blocks on each stage. first, last: modules before the blocks, on the first stage, and behind them."""
    begins = [sum(counts[:i]) for i in range(len(counts))]
    named = [_blocks(begin, count) for begin, count in zip(begins, counts, strict=True)]
    named[0], named[-1] = [first, *named[0]], [*named[-1], last]
    return [", ".join(modules) for modules in named]


def _blocks(begin: int, count: int) -> list[str]:
    if count <= 1:
        return [f"blocks.{begin}"] * count
    return [f"blocks.{begin}-{begin + count - 1}"]
