"""What the examples show at their end: a curve, drawn as text, and the same steps on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn


def one_device(
    model: nn.Module, loss_fn: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Callable[[int], Any],
    steps: int,
) -> list[float]:  # fmt: skip
    """The losses of an ordinary loop in plain PyTorch, of the optimizer's own model."""
    losses = []
    for step in range(steps):
        loss = loss_fn(model, *batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def beside(ours: Sequence[float], alone: Sequence[float], what: str = "loss") -> str:
    """One line: how far two runs are apart."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, alone, strict=True))
    return f"{what} on one device: {alone[0]:.4f} to {alone[-1]:.4f}, largest relative difference {worst:.0e}"


def curve(values: Sequence[float], title: str, width: int = 64, height: int = 10) -> str:
    """Values over their numbers, as lines of text: each column is the mean of the values that it stands for."""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    columns = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(columns), max(columns)
    rows = [round((high - value) / ((high - low) or 1) * (height - 1)) for value in columns]
    lines = [f"{'':9}{title}"]
    for row in range(height):
        label = f"{high - (high - low) * row / (height - 1):8.3f}" if row in (0, height - 1) else " " * 8
        lines.append(f"{label} |" + "".join("*" if row == place else " " for place in rows).rstrip())
    return "\n".join([*lines, f"{'':9}+{'-' * width} {len(values)}"])
