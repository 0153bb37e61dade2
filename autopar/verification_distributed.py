"""verify, on real processes: the parallel module of every rank against the plain module on rank 0."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from autopar.choices import choices_of
from autopar.comparison import Report, Table, Values
from autopar.compiler import batch_arguments
from autopar.job import Job
from autopar.meshes import mesh_of
from autopar.module import ParallelModule
from autopar.torch_compat import tree_map
from autopar.verification import Plain, cast


def verify_on_ranks(job: Job, mesh: str, steps: int, seed: int, dtype: torch.dtype = torch.float64) -> Report | None:
    """As `autopar.verify`, on this process's rank; call it on all of them. The report is rank 0's, None elsewhere."""
    model = job.model.to(dtype=dtype)
    plain_model = copy.deepcopy(model)
    batch = tree_map(lambda leaf: cast(leaf, dtype), job.batch)
    args, kwargs = batch_arguments(batch)
    parallel = ParallelModule(
        model,
        mesh,
        loss_fn=job.loss_fn,
        choices=choices_of(**job.step),
        batch="global",
        seed=seed,
        device="cpu",
        compile=job.compile,
        lift=dtype,
    )
    parallel.prepare(*args, **kwargs)
    optimizer = job.make_optimizer(parallel.parameters())
    plain = Plain(plain_model, job.loss_fn, job.make_optimizer)
    table = Table.of(dtype)
    for step in range(steps):
        optimizer.zero_grad()
        found: Values = {("loss", "loss"): parallel.forward_backward(*args, **kwargs)}
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
            table.compare(expected, found, {})
    if dist.get_rank() != 0:
        return None
    where = "over gloo" if job.compile is None else f"over gloo, compiled by {job.compile}"
    return Report(f"{mesh_of(mesh, dist.get_world_size())} {where}", dtype, steps, table.tolerance, table.rows())
