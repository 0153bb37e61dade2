"""verify, on real processes: the parallel module of every rank against the plain module on rank 0."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.capture.draws.host_draws import drawing_for
from autopar.capture.inputs.containers import map_batch
from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import first_sentence
from autopar.job import Job
from autopar.parallel.module import ParallelModule
from autopar.parallel.session.session import Requested
from autopar.verification.copies import copied
from autopar.verification.dtypes import cast, in_dtype, module_in
from autopar.verification.judge.comparison import ComparedRow, Exact, Report, Values, of_both
from autopar.verification.judge.noise import Trained, judged, move_away
from autopar.verification.judge.sum_dtypes import wrong_sums
from autopar.verification.places import Arguments, Batches, aux_at, batches_of, on_meta, places_of, seeds_of, shapes_of
from autopar.verification.plain import SCALE, DrawsOf, draws_of, gradients_of_batch, optimized, own_batch, values_of
from autopar.verification.reference import Reference, short_of


def verify_on_ranks(
    job: Job, mesh: str, steps: int, seed: int, dtype: torch.dtype = torch.float64, ddp: bool = False
) -> Report | None:
    """Verify on this process's rank; call it on all of them. The report is rank 0's, None elsewhere.

    In a shorter float the same job runs in float64 as well: what is wrong by less than its resolution shows there.
    """
    if dtype == torch.float64 and short_of(options_of(**job.step)) is None:
        return _report(job, mesh, steps, seed, dtype, ddp)
    exact = _exact(replace(job, model=copied(job.model)), mesh, steps, seed, ddp)
    report = _report(job, mesh, steps, seed, dtype, ddp, is_exact=not (exact.failed or exact.is_wrong))
    return report and replace(report, exact=exact).settled()


def _exact(job: Job, mesh: str, steps: int, seed: int, ddp: bool) -> Exact:
    """What the ranks give in float64."""
    plainly = replace(job, precision=None, reduce_dtype=torch.float32)
    try:
        longer = _report(plainly, mesh, steps, seed, torch.float64, ddp, is_away=True)
    except Exception as error:  # on rank 0 alone where the plain module does not run in float64
        return Exact(failed=first_sentence(str(error)))
    return Exact() if longer is None else Exact(longer.rows)


class _Refused(Exception):
    """The plain module, on rank 0, takes no such numbers or dtype."""


def _agreed(value: bool) -> bool:
    """What rank 0 says, on every rank."""
    said = [value]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _report(
    job: Job,
    mesh: str,
    steps: int,
    seed: int,
    dtype: torch.dtype,
    ddp: bool,
    is_away: bool = False,
    is_exact: bool = False,
) -> Report | None:
    """Verify in one dtype. is_away: the plain module may refuse it. is_exact: float64 is right."""
    batch, model, options = job.batch, job.model, options_of(**job.step)
    parsed = mesh_of(mesh, dist.get_world_size() if dist.is_initialized() else None)
    is_whole = short_of(options) is None
    if is_whole:
        model, batch = module_in(model, dtype), map_batch(lambda leaf: cast(leaf, dtype), batch)
    batches = batches_of(batch, parsed, options, model, job.loss_fn, ddp)
    trial = _Trial(model, job, mesh, batches, steps, seed, dtype if is_whole else None)
    with in_dtype(model, job.loss_fn, dtype) if is_whole else nullcontext():
        try:
            plain, trained, sums = trial.run(is_away)
        except _Refused:
            _agreed(False)  # the other ranks wait for what more there is to train
            raise
        if is_exact:
            trained = replace(trained, limits=trained.limits.after_float64())
        rows = trained.table.rows()
        rows = trial.judged_by_noise(rows, trained)
    if dist.get_rank() != 0:
        return None
    where = "over gloo" if job.compile in ("auto", "executor") else f"over gloo, compiled by {job.compile}"
    shown = f"{parsed}{', as DistributedDataParallel' * (len(batches) > 1)} {where}"
    return Report(shown, plain.dtype, steps, trained.table.tolerance, rows, None, plain.note, sums)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Some steps of training on all ranks, and on rank 0 plainly. The model is copied by each run, and not changed.

    lift: as of `capture`.
    """

    model: nn.Module
    job: Job
    mesh: str
    batches: Batches
    steps: int
    seed: int
    lift: torch.dtype | None

    def run(self, is_away: bool = False) -> tuple[Reference, Trained, tuple[str, ...]]:
        """Train both sides. The table, and what the plain module gave, are rank 0's; with the sums of gradients that
        have another dtype than was asked for. is_away: where the model may refuse the numbers."""
        job, places = self.job, len(self.batches)
        drew: dict[tuple[int, ...], DrawsOf] = {}  # by the seed of a place in a step
        plain = Reference(
            self.model, job.loss_fn, job.make_optimizer, options_of(**job.step), places=places,
            draws=lambda drawn: drew[tuple(drawn.tolist())](drawn),
        )  # fmt: skip
        parallel = self._parallel()
        self._prepare(parallel)
        plain.borrow(parallel.programs[-1].captured.partners, parallel.programs[-1].compiled)
        optimizer = job.make_optimizer(optimized(parallel))
        steps, failed = [], None
        for drawn in self._seeds():
            with drawing_for(seeds_of(drawn, places)[0]):  # what the host draws is rank 0's
                given = self._step(parallel, optimizer)
            running = parallel.programs[-1]
            for own, rows in zip(seeds_of(drawn, places), self._of_places(running.mask_rows), strict=True):
                drew[tuple(own.tolist())] = partial(draws_of, running.captured, rows=rows)
            if dist.get_rank() == 0 and failed is None:
                try:
                    steps.append(plain.step(self.batches, drawn))
                    plain.compare(*of_both(steps[-1], given), {})
                except Exception as error:
                    if not is_away:
                        raise
                    failed = error  # the other ranks go on, and this one with them
        if failed is not None:
            raise _Refused(first_sentence(str(failed))) from failed
        trained = plain.trained(self.model, self.batches, self._seeds(), steps)
        return plain, trained, wrong_sums(parallel.programs[-1].compiled)

    def judged_by_noise(self, rows: tuple[ComparedRow, ...], trained: Trained) -> tuple[ComparedRow, ...]:
        """The rows, of which those are right that differ by rounding alone, here and elsewhere: on rank 0, but every
        rank must call this."""
        compared_rows = rows
        if dist.get_rank() == 0:
            if not all(row.ok for row in rows):
                compared_rows = judged(rows, trained, self._elsewhere)
            _agreed(False)  # nothing more
        else:
            while _agreed(False):
                self._train_away()
        return compared_rows

    def _elsewhere(self) -> Trained | None:
        """What both sides give away from here, asked for by rank 0; None if the model takes no other numbers."""
        _agreed(True)
        return self._train_away()

    def _train_away(self) -> Trained | None:
        model = copied(self.model)
        away = replace(self, model=model, batches=move_away(model, self.batches))
        try:
            return away.run(is_away=True)[1]
        except Exception:
            return None

    def _parallel(self) -> ParallelModule:
        job = self.job
        asked = Requested(
            copied(self.model), self.mesh, job.step,
            loss_fn=job.loss_fn, seed=self.seed, device="cpu",
            cuda_graphs="dry-run" if job.cuda_graphs else False, lift=self.lift,
            batch="ddp" if len(self.batches) > 1 else "global",
        )  # fmt: skip
        parallel = ParallelModule(asked)
        if parallel.loss_scale is not None:
            parallel.loss_scale.scale = SCALE  # as the other side: no step is skipped
        return parallel

    def _step(self, parallel: ParallelModule, optimizer: torch.optim.Optimizer) -> Values:
        """What a step on all ranks gives, with the state behind it."""
        args, kwargs = own_batch(*self._own())
        optimizer.zero_grad()
        values: Values = {("loss", "loss"): parallel.forward_backward(*args, **kwargs).detach()}
        aux = values_of(parallel.last_aux if self.job.loss_fn is not None else None)
        values.update(self._aux({**aux, **gradients_of_batch(args, kwargs)}))
        values.update({("gradient", name): value for name, value in parallel.full_gradients().items()})
        optimizer.step()
        return {**values, **{("state", name): value for name, value in parallel.full_state_dict().items()}}

    def _places(self) -> list[int]:
        """The place of each rank, of whose batch it computes the step."""
        parsed = mesh_of(self.mesh, dist.get_world_size())
        return places_of(parsed) if len(self.batches) > 1 else [0] * parsed.size

    def _own(self) -> Arguments:
        return self.batches[self._places()[dist.get_rank()]]

    def _prepare(self, parallel: ParallelModule) -> None:
        """Make the first program: of batches of other shapes that of the first place decides how parameters lie."""
        args, kwargs = self._own()
        if len({shapes_of(batch) for batch in self.batches}) > 1:
            args, kwargs = on_meta(self.batches[0])
        parallel.prepare(*args, **kwargs)

    def _aux(self, own: Values) -> Values:
        """What comes beside the loss, of each place on every rank."""
        if len(self.batches) == 1:
            return own
        return {
            aux_at(key, place): value
            for place, values in enumerate(self._of_places(own))
            for key, value in values.items()
        }

    def _of_places(self, own: Any) -> list[Any]:
        """What each place has, on every rank."""
        if len(self.batches) == 1:
            return [own]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return [every[self._places().index(place)] for place in range(len(self.batches))]

    def _seeds(self) -> list[torch.Tensor]:
        return [torch.tensor([self.seed, step], device="cpu") for step in range(self.steps)]
