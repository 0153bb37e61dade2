"""One model, captured once, as pipelines of many kinds: what each gives, against the plain module."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import gpt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.compiled import Compiled
from autopar.compiler.meshes import mesh_of
from autopar.ir.options import StepOptions
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import make_pipeline, run_passes
from autopar.verification.plain import Plain
from autopar.verification.virtual_side import Virtual

ROWS, TIME, VOCABULARY = 56, 4, 12  # divided by 1, 2, 4, 7 and 8
SEED = torch.tensor([3, 5])


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)


@dataclass(frozen=True)
class Subject:
    """A tied GPT with dropout; in the first rows nearly all labels are ignored, so that no two micro-batches weigh
    the same. `expected`: what one device gives, by (kind, name)."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    captured: Captured
    expected: dict[tuple[str, str], Tensor]


def descent(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


@functools.cache
def subject() -> Subject:
    torch.manual_seed(0)
    config = gpt.GPTConfig(vocabulary=VOCABULARY, context=TIME, layers=2, heads=2, width=8, dropout=0.1)
    model = gpt.GPT(config).double()
    x, y = (torch.randint(0, VOCABULARY, (ROWS, TIME)) for _ in range(2))
    y[:9, 1:] = -1
    y[20:22] = -1
    captured = capture(model, loss_fn, (x, y), {}, lift=torch.float64)
    expected = Plain(copy.deepcopy(model), loss_fn, descent).step((x, y), {}, SEED)
    return Subject(model, (x, y), captured, expected)


@functools.cache
def _local(mesh: str, microbatches: int, sequence_parallel: bool) -> tuple[tuple[str, Program], ...]:
    """The program before it is cut: stages change nothing in it."""
    options = StepOptions(microbatches=microbatches, sequence_parallel=sequence_parallel)
    plan = Plan(mesh_of(mesh), options=options)
    return run_passes(subject().captured.program, plan)


def compiled_as(mesh: str, microbatches: int, sequence_parallel: bool = False, **more: Any) -> Compiled:
    parsed = mesh_of(mesh)
    options = StepOptions(microbatches=microbatches, sequence_parallel=sequence_parallel, **more)
    plan = Plan(parsed, options=options)
    inside = ",".join(f"{axis}={size}" for axis, size in parsed.axes if axis != "pp")
    history = (
        _local(f"pp=1,{inside}" if inside else "pp=1", microbatches, sequence_parallel) if microbatches > 1 else None
    )
    history = history or run_passes(subject().captured.program, plan)
    return Compiled(plan, history, make_pipeline(history[-1][1], plan))


def error_of(compiled: Compiled) -> float:
    """The largest error of loss, gradients and weights, over the norm of all gradients (or the value's, if larger)."""
    known = subject()
    run = Virtual(copy.deepcopy(known.model), known.captured, compiled, descent)
    found = run.step(known.batch, {}, SEED)
    assert found.keys() == known.expected.keys()
    assert max(run.replicas.values(), default=0.0) == 0.0, "ranks that should hold the same differ"
    scale = sum(value.norm() ** 2 for (kind, _), value in known.expected.items() if kind == "gradient") ** 0.5
    return max(
        ((found[key] - value).norm() / max(value.norm(), 1e-3 * scale)).item() for key, value in known.expected.items()
    )
