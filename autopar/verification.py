"""verify: the plain module on one device against the emitted programs of all ranks, in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import torch
from torch import nn

from autopar.capture import Captured, capture
from autopar.capture.capture import LossFn, loss_of
from autopar.capture.raising import Raise, default_dtype
from autopar.choices import StepOptions, choices_of
from autopar.comparison import Report, Table, Values
from autopar.compiled import Compiled
from autopar.compiler import batch_arguments, check_model, lower
from autopar.meshes import MeshLike, mesh_of
from autopar.torch_compat import backward, tree_map
from autopar.verification_virtual import OptimizerFactory, Virtual

__all__ = ["Plain", "Report", "cast", "descent", "verify", "verify_compiled"]


def verify(
    model: nn.Module,
    mesh: MeshLike,
    *,
    loss_fn: LossFn | None = None,
    batch: Any,
    steps: int = 2,
    dtype: torch.dtype = torch.float64,
    optimizer: OptimizerFactory | None = None,
    seed: int = 0,
    **options: Unpack[StepOptions],
) -> Report:
    """Train `steps` steps twice from the same weights: plainly, and with the programs of every rank of `mesh`.

    Loss, every gradient, every updated weight and buffer are put together from the ranks and compared. Random ops
    draw from the counter-based generator on both sides, and casts that the model itself makes to another float
    (`.float()` in a norm) go to `dtype` on both sides: else their rounding, not the programs, would be compared. The
    model is copied and not changed; `optimizer` makes one from parameters (AdamW by default, see `descent`).
    `options` are those of a step, as of `autopar.parallelize`. On a difference the report names the first node that
    differs.
    """
    check_model(model)
    parsed, choices = mesh_of(mesh), choices_of(**options)  # what is cheap to find is found first
    model = copy.deepcopy(model).to(dtype=dtype)
    batch = tree_map(lambda leaf: cast(leaf, dtype), batch)
    args, kwargs = batch_arguments(batch)
    captured = capture(model, loss_fn, args, kwargs, lift=dtype, specialize=choices.specialize)
    compiled = lower(captured, parsed, choices)
    return verify_compiled(
        model, captured, compiled, loss_fn=loss_fn, batch=batch, steps=steps, optimizer=optimizer, seed=seed
    )


def verify_compiled(
    model: nn.Module,
    captured: Captured,
    compiled: Compiled,
    *,
    loss_fn: LossFn | None,
    batch: Any,
    steps: int = 2,
    optimizer: OptimizerFactory | None = None,
    seed: int = 0,
) -> Report:
    """As `verify`, for a program that is compiled already; `model` and `batch` have the dtype to compare in."""
    make = optimizer or descent
    dtype = next(model.parameters()).dtype
    args, kwargs = batch_arguments(batch)
    plain = Plain(copy.deepcopy(model), loss_fn, make)
    virtual = Virtual(copy.deepcopy(model), captured, compiled, make)
    table = Table.of(dtype)
    for step in range(steps):
        drawn = torch.tensor([seed, step])
        expected, given = plain.step(args, kwargs, drawn), virtual.step(args, kwargs, drawn)
        table.compare(expected, given, virtual.replicas)
    rows = table.rows()
    mismatch = None
    if not all(row.ok for row in rows):
        first = Virtual(copy.deepcopy(model), captured, compiled, make)
        mismatch = first.locate(args, kwargs, torch.tensor([seed, 0]), table.tolerance)
    return Report(str(compiled.mesh), dtype, steps, table.tolerance, rows, mismatch)


def descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with an eps far above rounding. With 1e-8 the step of a weight whose gradient is zero but for rounding (a
    bias before a normalisation) would be rounding enlarged 1e8 times, and the next gradients' too."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def cast(leaf: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in `dtype`; anything else as it is."""
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class Plain:
    """The user's module, trained as it is."""

    def __init__(self, model: nn.Module, loss_fn: LossFn | None, make: OptimizerFactory) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], seed: torch.Tensor) -> Values:
        self.optimizer.zero_grad()
        args, kwargs = tree_map(_copied, (args, dict(kwargs)))  # the model may write into them
        dtype = next(self.model.parameters()).dtype
        with default_dtype(dtype), Raise(None, seed, dtype):
            if self.loss_fn is None:
                loss = loss_of(self.model(*args, **kwargs))
            else:
                loss = self.loss_fn(self.model, *args, **kwargs)
            backward(loss)
        found: Values = {("loss", "loss"): loss.detach()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found["gradient", name] = parameter.grad.clone()
        self.optimizer.step()
        for name, parameter in self.model.named_parameters():
            found["weight", name] = parameter.detach().clone()
        for name, tensor in self.model.named_buffers():
            found["buffer", name] = tensor.clone()
        return found
