"""Ranks that do not do the same: every one of them must be told, and nothing may change."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from autopar.errors import RankError
from autopar.torch_compat import local_of
from benchmarks.journeys.actions import action
from benchmarks.journeys.parts import ROWS
from benchmarks.journeys.side import Side, parallel

SEEDS = st.integers(0, 5)


@action("ready", "ranks", "!local", must_refuse=RankError, seed=SEEDS)
def other_data_on_one_rank(side: Side, seed: int) -> None:
    """A loader that is one batch ahead on one rank."""
    side.forward_backward(*side.batch(ROWS, seed + 10 * (dist.get_rank() == 1)))


@action("ready", "ranks", must_refuse=RankError, seed=SEEDS)
def another_call_on_one_rank(side: Side, seed: int) -> None:
    """`if rank == 0: model.full_state_dict()`, while the others go on."""
    if dist.get_rank() == 0:
        parallel(side).full_state_dict()
    else:
        side.forward_backward(*side.batch(ROWS, seed))


@action("ready", "ranks", "!local", must_refuse=RankError, seed=SEEDS)
def other_mode_on_one_rank(side: Side, seed: int) -> None:
    """One rank in eval mode."""
    with side.in_mode(side.model.training != (dist.get_rank() == 1)):
        side.forward_backward(*side.batch(ROWS, seed))


@action("ready", "replicated", must_refuse=RankError)
def other_weight_on_one_rank(side: Side) -> None:
    """A weight that becomes another on one rank; the check that comes every 100 steps is asked for at once."""
    store = parallel(side)._store
    name = next(name for name, layout in store.layouts.items() if layout.is_replicated and store.owners[name] is None)
    part = local_of(side.model.get_parameter(name))
    was = part.detach().clone()
    with torch.no_grad():
        part.add_(0.01 * (dist.get_rank() == 1))  # every rank writes, so that the numbers alone differ
        try:
            parallel(side).check_replicas()
        finally:
            part.copy_(was)
