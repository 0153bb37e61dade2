"""What all ranks agree on: one exchange a phase, whatever is checked in it, and an error of one is one of all."""

from __future__ import annotations

import re
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.parallel.agree.agreement import WIDTH, Agreement

pytestmark = pytest.mark.gloo
BATCH = torch.ones(12, 16), torch.zeros(12, 8)


def _only(rank: int, arguments: dict[str, Any], state: str = "") -> None:
    """Rank 1 alone is asked for something else, or given another kind of model."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8, device="meta" if state == "meta" else None)
    if rank and state == "attribute":
        model.weight.place = 1
    if rank and state == "meta":
        model.reset_parameters = _no_reset
    autopar.parallelize(model, **{"mesh": "dp=2", "loss_fn": models.square_loss, **(arguments if rank else {})})


def _no_reset() -> None:
    raise RuntimeError("no values")


ALONE = {
    "mesh": ({"mesh": "dp=3"}, "", "MeshError: mesh 'dp=3' has 3 ranks, but 2 are running."),
    "options": ({"zero": 7}, "", "PlanError: zero=7: write 0, 1 (optimizer states are split), 2 (and gradients)"),
    "options, batch": ({"batch": "mine"}, "", "BatchError: batch='mine': write "),
    "options, replicas": ({"check_replicas": -1}, "", "AutoparError: check_replicas=-1: write a number of"),
    "options, timeout": ({"timeout": 0}, "", "AutoparError: timeout=0: write the seconds that a rank waits for the"),
    "options, compiler": ({"compile": "gcc"}, "", "CompileError: compile='gcc': write auto, executor, "),
    "compiler": ({"cuda_graphs": True}, "", "CompileError: cuda_graphs=True records what a GPU does, and this rank"),
    "model, attribute": ({}, "attribute", "AutoparError: the parameter 'weight' has an attribute 'place'"),
    "model, values": ({}, "meta", "RuntimeError: no values"),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_one_rank_alone_cannot_do_ends_all(two: Ranks, name: str) -> None:
    """Each rank takes part in the exchange of the phase in which it failed, and they go on in step."""
    arguments, state, said = ALONE[name]
    mine, bad = [str(outcome.error) for outcome in two.attempt(_only, arguments, state, timeout=30)]
    assert bad.startswith(said)
    what = name.partition(",")[0]
    assert mine == f"RankError: the {what} failed on some ranks, not on this one:\n  rank 1: {bad}"
    two.run(_step)


def parallel(**options: Any) -> autopar.ParallelModule:
    torch.manual_seed(0)
    return autopar.parallelize(nn.Linear(16, 8), "dp=2", loss_fn=models.square_loss, **options)


def _step(rank: int) -> None:
    parallel().forward_backward(*BATCH)


def _exchanges(rank: int) -> tuple[int, int]:
    """How often ranks compare anything while a model is made parallel, and in its first step."""
    reduce, sizes = dist.all_reduce, []

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append((tensor.numel(), tensor.dtype))
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        model = parallel(check_replicas=None)
        made = sizes.count((WIDTH, torch.int64))
        model.forward_backward(*BATCH)
    finally:
        dist.all_reduce = reduce
    return made, sizes.count((WIDTH, torch.int64)) - made


def test_ranks_compare_once_a_phase(two: Ranks) -> None:
    """Arguments, initial values; then the call and its program."""
    assert two.run(_exchanges) == [(2, 3), (2, 3)]  # with the generators of the host


def _beside_nccl() -> autopar.ParallelModule:
    """A model whose ranks think that the default group is NCCL's."""
    of_torch = dist.get_backend_config
    dist.get_backend_config = lambda *_: "cuda:nccl"  # type: ignore[assignment]
    try:
        return parallel()
    finally:
        dist.get_backend_config = of_torch


def _over_own_group(rank: int) -> list[tuple[bool, str]]:
    """Of what ranks agree on before a step: whether it goes over another group than the default one, from where."""
    model, all_reduce, seen = _beside_nccl(), dist.all_reduce, []
    model.forward_backward(*BATCH)

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs.get("group") not in (None, dist.group.WORLD), tensor.device.type))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    try:
        model.prepare(*BATCH)
    finally:
        dist.all_reduce = all_reduce
    return seen


def test_beside_nccl_ranks_agree_over_a_group_of_their_own(two: Ranks) -> None:
    """The host must not wait for what its GPU still computes."""
    assert two.run(_over_own_group) == [[(True, "cpu")]] * 2
    for outcome in two.attempt(_in_other_calls, timeout=30):
        said = re.sub(r" at \S+:\d+", "", str(outcome.error))
        told = "0 calls check_replicas(), rank 1 calls full_state_dict(): every rank must make the same calls. Under"
        assert told in said and said.endswith("and no call of the model, as of an evaluation.")


def _in_other_calls(rank: int) -> None:
    model = _beside_nccl()
    model.full_state_dict() if rank else model.check_replicas()


def _orders(rank: int, places: tuple[int, int]) -> None:
    Agreement(torch.device("cpu")).check_within("order of collectives", places[rank], [f"forward_0: reduce_{rank}"])


def test_ranks_of_other_stages_need_not_be_alike(two: Ranks) -> None:
    two.run(_orders, (0, 1))
    for outcome in two.attempt(_orders, (0, 0), timeout=30):
        assert str(outcome.error) == (
            "RankError: ranks disagree on the order of collectives:\n"
            "  rank 1 has 'forward_0: reduce_1' where the others have 'forward_0: reduce_0'\n"
            "Give every rank the same order of collectives."
        )
