"""verify, on real processes: the parallel module of every rank against the plain module on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture.containers import map_tensors
from autopar.compiler.compile import batch_arguments
from autopar.compiler.meshes import mesh_of
from autopar.compiler.options import options_of
from autopar.ir.program import PARTNER
from autopar.job import Job
from autopar.parallel.joining import Asked
from autopar.parallel.module import ParallelModule
from autopar.verification.borrowed import in_dtype
from autopar.verification.comparison import Report, Row, Values
from autopar.verification.copies import copied
from autopar.verification.dtypes import cast, module_in
from autopar.verification.noise import Trained, judged, move_away
from autopar.verification.reference import SCALE, Plain, Reference, optimized, short_of, values_of
from autopar.verification.sums import wrong_sums


def verify_on_ranks(job: Job, mesh: str, steps: int, seed: int, dtype: torch.dtype = torch.float64) -> Report | None:
    """As `autopar.verify`, on this process's rank; call it on all of them. The report is rank 0's, None elsewhere."""
    batch, model = job.batch, job.model
    is_exact = short_of(options_of(**job.step)) is None
    if is_exact:
        model, batch = module_in(model, dtype), map_tensors(lambda leaf: cast(leaf, dtype), batch)
    trial = _Trial(model, job, mesh, batch_arguments(batch), steps, seed, dtype if is_exact else None)
    with in_dtype(model, job.loss_fn, dtype) if is_exact else nullcontext():
        plain, trained, sums = trial.run()
        rows = trained.table.rows()
        rows = trial.judged_by_noise(rows, trained)
    if dist.get_rank() != 0:
        return None
    where = "over gloo" if job.compile is None else f"over gloo, compiled by {job.compile}"
    shown = f"{mesh_of(mesh, dist.get_world_size())} {where}"
    return Report(shown, plain.dtype, steps, trained.table.tolerance, rows, None, plain.note, sums)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Some steps of training on all ranks, and on rank 0 plainly. The model is copied by each run, and not changed.

    lift: as of `capture`.
    """

    model: nn.Module
    job: Job
    mesh: str
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]  # of the loss function, behind the model
    steps: int
    seed: int
    lift: torch.dtype | None

    def run(self, is_away: bool = False) -> tuple[Reference, Trained, tuple[str, ...]]:
        """Train both sides. The table, and what the plain module gave, are rank 0's; with the sums of gradients that
        have another dtype than was asked for. is_away: where the model may refuse the numbers."""
        job, (args, kwargs) = self.job, self.arguments
        plain = Reference(self.model, job.loss_fn, job.make_optimizer, options_of(**job.step))
        parallel = self._parallel()
        parallel.prepare(*args, **kwargs)
        plain.borrow(parallel.programs[-1].captured.partners)
        optimizer = job.make_optimizer(optimized(parallel))
        steps, failed = [], False
        for drawn in self._seeds():
            given = self._step(parallel, optimizer)
            if dist.get_rank() == 0 and not failed:
                try:
                    steps.append(plain.step(args, kwargs, drawn))
                    plain.compare(*_of_both(steps[-1], given), {})
                except Exception:
                    if not is_away:
                        raise
                    failed = True  # the other ranks go on, and this one with them
        partners = parallel.programs[-1].captured.partners

        low = options_of(**job.step).low_dtype

        def again(change: Callable[[nn.Module], None], is_short: bool) -> list[Values]:
            model = copied(self.model)
            change(model)
            other = Plain(model, job.loss_fn, job.make_optimizer, low if is_short else None, partners)
            return [other.step(args, kwargs, drawn) for drawn in self._seeds()]

        if failed:
            raise ArithmeticError("the plain module takes no such numbers")
        trained = Trained(plain.table, steps, again, plain.limits, low)
        return plain, trained, wrong_sums(parallel.programs[-1].compiled)

    def judged_by_noise(self, rows: tuple[Row, ...], trained: Trained) -> tuple[Row, ...]:
        """The rows, of which those are right that differ by rounding alone, here and elsewhere: on rank 0, but every
        rank must call this."""
        found = rows
        if dist.get_rank() == 0:
            if not all(row.ok for row in rows):
                found = judged(rows, trained, self._elsewhere)
            self._ask(False)  # nothing more
        else:
            while self._ask(False):
                self._train_away()
        return found

    def _elsewhere(self) -> Trained | None:
        """What both sides give away from here, asked for by rank 0; None if the model takes no other numbers."""
        self._ask(True)
        return self._train_away()

    def _train_away(self) -> Trained | None:
        model = copied(self.model)
        away = replace(self, model=model, arguments=move_away(model, self.arguments))
        try:
            return away.run(is_away=True)[1]
        except Exception:
            return None

    def _ask(self, value: bool) -> bool:
        """Whether rank 0 asks for one more run, on every rank."""
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]

    def _parallel(self) -> ParallelModule:
        job = self.job
        asked = Asked(
            copied(self.model), self.mesh, job.step,
            loss_fn=job.loss_fn, seed=self.seed, device="cpu",
            cuda_graphs="dry-run" if job.cuda_graphs else False, lift=self.lift,
        )  # fmt: skip
        parallel = ParallelModule(asked)
        if parallel.loss_scale is not None:
            parallel.loss_scale.scale = SCALE  # as the other side: no step is skipped
        return parallel

    def _step(self, parallel: ParallelModule, optimizer: torch.optim.Optimizer) -> Values:
        """What a step on all ranks gives, with the state behind it."""
        (args, kwargs), has_loss = self.arguments, self.job.loss_fn is not None
        optimizer.zero_grad()
        found: Values = {("loss", "loss"): parallel.forward_backward(*args, **kwargs).detach()}
        found.update(values_of(parallel.last_aux if has_loss else None))
        found.update({("gradient", name): value for name, value in parallel.full_gradients().items()})
        optimizer.step()
        return {**found, **{("state", name): value for name, value in parallel.full_state_dict().items()}}

    def _seeds(self) -> list[torch.Tensor]:
        return [torch.tensor([self.seed, step]) for step in range(self.steps)]


def _of_both(expected: Values, given: Values) -> tuple[Values, Values]:
    """What both sides have: the state under the names of weights and buffers. A buffer that is not persistent is in no
    state dict, and plain modules in the loss are compared on the virtual mesh."""
    found = {key: value for key, value in given.items() if key[0] != "state"}
    found.update({
        (kind, name): given["state", name]
        for kind, name in expected
        if kind in ("weight", "buffer") and ("state", name) in given
    })  # fmt: skip
    kept = {key for key in expected if key[0] != "buffer" or key in found}
    return {key: expected[key] for key in expected if key in kept and not key[1].startswith(PARTNER)}, found
