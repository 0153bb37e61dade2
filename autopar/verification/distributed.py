"""verify, on real processes: the parallel module of every rank against the plain module on rank 0."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from autopar.capture.containers import map_tensors
from autopar.compiler.compile import batch_arguments
from autopar.compiler.meshes import mesh_of
from autopar.compiler.options import options_of
from autopar.ir.program import PARTNER
from autopar.job import Job
from autopar.parallel.joining import Asked
from autopar.parallel.module import ParallelModule
from autopar.verification.borrowed import in_dtype
from autopar.verification.comparison import Report, Values
from autopar.verification.dtypes import cast, module_in
from autopar.verification.reference import SCALE, Reference, short_of, values_of


def verify_on_ranks(job: Job, mesh: str, steps: int, seed: int, dtype: torch.dtype = torch.float64) -> Report | None:
    """As `autopar.verify`, on this process's rank; call it on all of them. The report is rank 0's, None elsewhere."""
    options, batch, model = options_of(**job.step), job.batch, job.model
    is_exact = short_of(options) is None
    if is_exact:
        model, batch = module_in(model, dtype), map_tensors(lambda leaf: cast(leaf, dtype), batch)
    plain = Reference(model, job.loss_fn, job.make_optimizer, options)
    args, kwargs = batch_arguments(batch)
    lift = dtype if is_exact else None
    asked = Asked(
        model, mesh, job.step, loss_fn=job.loss_fn, seed=seed, device="cpu", compile=job.compile,
        cuda_graphs="dry-run" if job.cuda_graphs else False, lift=lift,
    )  # fmt: skip
    parallel = ParallelModule(asked)
    with in_dtype(model, job.loss_fn, dtype) if is_exact else nullcontext():
        return _compare(parallel, plain, job, args, kwargs, steps, seed, mesh)


def _compare(
    parallel: ParallelModule, plain: Reference, job: Job, args: Any, kwargs: Any, steps: int, seed: int, mesh: str
) -> Report | None:
    parallel.prepare(*args, **kwargs)
    plain.borrow(parallel.programs[-1].captured.partners)
    optimizer = job.make_optimizer(parallel.parameters())
    if parallel.loss_scale is not None:
        parallel.loss_scale.scale = SCALE  # as the other side: no step is skipped
    for step in range(steps):
        optimizer.zero_grad()
        found: Values = {("loss", "loss"): parallel.forward_backward(*args, **kwargs).detach()}
        found.update(values_of(parallel.last_aux if job.loss_fn else None))
        found.update({("gradient", name): value for name, value in parallel.full_gradients().items()})
        optimizer.step()
        state = parallel.full_state_dict()
        if dist.get_rank() == 0:
            expected = plain.step(args, kwargs, torch.tensor([seed, step]))
            for kind, name in expected:
                if name in state and kind in ("weight", "buffer"):
                    found[kind, name] = state[name]
            for key in [key for key in expected if key[0] == "buffer" and key not in found]:
                del expected[key]  # not persistent: it is in no state dict
            for key in [key for key in expected if key[1].startswith(PARTNER)]:
                del expected[key]  # of a plain module in the loss, which the virtual mesh compares
            plain.compare(expected, found, {})
    if dist.get_rank() != 0:
        return None
    table = plain.table
    where = "over gloo" if job.compile is None else f"over gloo, compiled by {job.compile}"
    return Report(
        f"{mesh_of(mesh, dist.get_world_size())} {where}",
        plain.dtype,
        steps,
        table.tolerance,
        table.rows(),
        None,
        plain.note,
    )
