"""verify: the plain module on one device against the emitted programs of all ranks, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import nn

from autopar.capture import Captured, LossFn
from autopar.capture.data.reads import Answers
from autopar.capture.inputs.containers import map_batch
from autopar.capture.inputs.module_state import device_of
from autopar.compiler.check_options import options_of, with_known_names
from autopar.compiler.lowered import Lowered
from autopar.compiler.meshes import MeshLike, mesh_of
from autopar.compiler.models import check_plain_model
from autopar.ir.options import StepKeywords
from autopar.ir.plan import Fixed
from autopar.machines import DEVICES, MachineLike, machine_like
from autopar.parallel.session.compilers import check_in_one_process, compiler_on
from autopar.verification.copies import copied
from autopar.verification.dtypes import cast, in_dtype, module_in
from autopar.verification.judge.comparison import Report
from autopar.verification.places import Made, batches_of, programs_of, whole_batch
from autopar.verification.plain import OptimizerFactory
from autopar.verification.reference import short_of
from autopar.verification.trial import Trial
from autopar.verification.versions import Versions

__all__ = ["Report", "cast", "descent", "verify", "verify_compiled"]


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
    ddp: bool = False,
    machine: MachineLike = DEVICES,
    **options: Unpack[StepKeywords],
) -> Report:
    """Train `steps` steps twice from the same weights: plainly, and with the programs of every rank of `mesh`.

    Loss, every gradient, every updated weight and buffer are put together from the ranks and compared. Random ops
    draw from the counter-based generator on both sides, and casts that the model itself makes to another float
    (`.float()` in a norm) go to `dtype` on both sides: else their rounding, not the programs, would be compared. So do
    float tensors outside of parameters, buffers and batch, where an op meets them (class weights in the loss). Under
    a precision the programs run in it, and what they give is compared with float64: no tensor may be further off than
    twice what torch.autocast is on one device (see `Reference`), and every sum of gradients must be in `reduce_dtype`
    (see `sum_dtypes.py`). The model is copied and not changed; `optimizer` makes one from parameters (AdamW by default,
    see `descent`). `options` are those of a step, see `autopar.StepOptions`, and machine is as of `parallelize`; what
    compile="inductor" writes runs on processes alone (`autopar verify --backend gloo`).
    Where a model enlarges rounding beyond the tolerance, the report says how far rounding alone moves the plain module.
    What lies within some times that is right, if it leaves something to compare, here or from other weights and another
    batch (see `noise.py`); where it leaves nothing, the same has to be right in float64, each step from the plain
    module's weights: else it is UNDECIDED. In any shorter dtype the programs run once more in float64, beside the
    captured ones (see `lifted.py`), to find errors below its resolution. A difference is told with its first node.
    ddp: compare what `parallelize(batch="ddp")` does with what DistributedDataParallel does: each place of the data
    axes computes the loss of a batch of its own, of losses and gradients all take the mean, and buffers are those of
    the first place. A list as `batch` has a batch for each place, of any sizes; any other is cut into them, on the dims
    that count samples (`batch_dims`; dim 0 where nothing is said).
    """
    check_plain_model(model, loss_fn)
    parsed, chosen = mesh_of(mesh), options_of(**with_known_names(options, verify))
    chosen = compiler_on(chosen, device_of(model))
    check_in_one_process(chosen.compile)
    is_exact = short_of(chosen) is None
    given, example, model = model, batch, copied(model)
    if is_exact:
        model, batch = module_in(model, dtype), map_batch(lambda leaf: cast(leaf, dtype), batch)
    batches = batches_of(batch, parsed, chosen, model, loss_fn, ddp)
    lift, fixed = dtype if is_exact else None, Fixed(machine=machine_like(machine))
    with in_dtype(model, loss_fn, dtype) if is_exact else nullcontext():
        versions = Versions([], partial(programs_of, model, loss_fn, batches, parsed, chosen, lift, fixed))
        first, *others = versions.of(torch.tensor([seed, 0], device="cpu"))
        trial = Trial(
            model, *first, loss_fn, batches, steps, optimizer or descent, seed, others=tuple(others), versions=versions
        )
        report = trial.report()
    if not report.asks_longer_float or (is_exact and dtype is torch.float64):
        return report
    plainly: Any = {key: value for key, value in options.items() if key not in ("precision", "reduce_dtype")}
    exact = verify(
        given, mesh, loss_fn=loss_fn, batch=example, steps=steps, optimizer=optimizer, seed=seed, ddp=ddp,
        machine=machine, **plainly,
    )  # fmt: skip
    return _told_by(report, exact)


def _told_by(report: Report, exact: Report) -> Report:
    """A report of which a longer float says what rounding leaves open."""
    rows = tuple(replace(row, ok=exact.ok if row.noise is not None else row.ok) for row in report.rows)
    return replace(report, rows=rows, mismatch=exact.mismatch)


def verify_compiled(
    model: nn.Module,
    captured: Captured,
    compiled: Lowered,
    *,
    loss_fn: LossFn | None,
    batch: Any,
    steps: int = 2,
    optimizer: OptimizerFactory | None = None,
    seed: int = 0,
) -> Report:
    """Verify a program that is compiled already; `model` and `batch` have the dtype to compare in, or under a
    precision their own."""
    trial = Trial(model, captured, compiled, loss_fn, whole_batch(batch), steps, optimizer or descent, seed)
    return trial.report().settled()


def verify_ways(
    model: nn.Module, made: Made, remake: Callable[[Answers], Made], loss_fn: LossFn | None, batch: Any
) -> Report:
    """Verify a program as `verify_compiled` does. remake: makes that of another way through branches which draws or
    data decide."""
    versions = Versions([[made]], lambda answers: [remake(answers)])
    trial = Trial(model, *made, loss_fn, whole_batch(batch), 2, descent, 0, versions=versions)
    return trial.report().settled()


def descent(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with an eps far above rounding. With 1e-8 the step of a weight whose gradient is zero but for rounding (a
    bias before a normalisation) would be rounding enlarged 1e8 times, and the next gradients' too. A short float has no
    such eps: there it is SGD."""
    given = list(parameters)
    if any(parameter.dtype.itemsize < torch.float32.itemsize for parameter in given):
        return torch.optim.SGD(given, lr=1e-2)
    return torch.optim.AdamW(given, lr=1e-3, eps=1e-4)
