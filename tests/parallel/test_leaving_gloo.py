"""A process that ends has none of Gloo's threads left: one that frees a tensor meanwhile would abort it (rc -6)."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import ranks_of
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError, RankError
from autopar.runtime.ranks.process_groups import default_group

HELD: list[Any] = []  # as the names of a script, which are there until Python ends


def _of_gloo() -> list[str]:
    names = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _left(rank: int, is_destroyed: bool) -> None:
    """What is left of Gloo where a script ends, with models of several meshes that it still holds."""
    for mesh, options in (("tp=2", {}), ("dp=2", {"zero": 3, "timeout": 30}), ("pp=2", {"microbatches": 2})):
        model = autopar.parallelize(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), mesh, loss_fn=loss_fn, **options
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model.forward_backward(torch.ones(12, 6))
        optimizer.step()
        HELD.extend((model, optimizer))
    assert _of_gloo(), "they have other names by now"
    if is_destroyed:
        dist.destroy_process_group()
        with pytest.raises(RankError) as refused:
            default_group()
        assert str(refused.value) == (
            "the process groups of this model are gone: dist.destroy_process_group() ended them. Call it after the "
            "last use of the model."
        )
    atexit._run_exitfuncs()
    assert not _of_gloo(), f"{_of_gloo()} are left"


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names in /proc alone")
@pytest.mark.parametrize("is_destroyed", [True, False])
def test_no_thread_of_gloo_is_left(is_destroyed: bool) -> None:
    """Red before: all were, whether the script destroyed its groups or not."""
    with ranks_of(2) as ranks:
        ranks.run(_left, is_destroyed)


def _again(rank: int, port: int) -> list[float]:
    """Losses of a script that parallelizes, destroys the groups, and parallelizes again, and holds all of it."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    losses = []
    for _ in range(3):
        torch.manual_seed(0)
        HELD.append(autopar.parallelize(nn.Linear(4, 4), "dp=2", loss_fn=loss_fn))
        losses.append(HELD[-1].forward_backward(torch.ones(4, 4)).item())
        dist.destroy_process_group()
    return losses


@pytest.mark.gloo
def test_groups_are_made_again_while_a_model_holds_those_before() -> None:
    """Red before: the store of those before stood, and rank 1 waited at an address of theirs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with ranks_of(2) as ranks:
        losses = ranks.run(_again, port)
    assert len({loss for its in losses for loss in its}) == 1


def _refused(rank: int) -> None:
    with pytest.raises(PlanError) as refused:
        autopar.parallelize(
            nn.Linear(6, 8), "dp=2", loss_fn=loss_fn, offload="parameters", zero=3, reshard_after_forward=False
        )
    HELD.append(refused)
    atexit._run_exitfuncs()
    assert not _of_gloo(), f"{_of_gloo()} are left"


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names in /proc alone")
def test_no_thread_is_left_where_a_model_was_refused() -> None:
    with ranks_of(2) as ranks:
        ranks.run(_refused)


def _gone(rank: int) -> list[str]:
    """What each use of a model says behind `dist.destroy_process_group()`."""
    model = autopar.parallelize(nn.Linear(8, 8), "tp=2", loss_fn=lambda m, x: m(x).square().mean())
    x = torch.ones(4, 8)
    model.forward_backward(x)
    dist.destroy_process_group()
    weight: Any = next(model.parameters())
    uses: list[Callable[[], object]] = [
        lambda: model.forward_backward(x), lambda: model(x), lambda: model.prepare(x[:2]),
        lambda: model.training_loss(x), lambda: weight.norm(), weight.full_tensor, model.full_state_dict,
        model.check_replicas, lambda: model.gathered().__enter__(), lambda: autopar.save("nowhere", model),
    ]  # fmt: skip
    said = []
    for use in uses:
        with pytest.raises(RankError) as caught:
            use()
        said.append(str(caught.value))
    return said


@pytest.mark.gloo
def test_a_model_whose_groups_are_gone_says_so() -> None:
    """Red before: torch's `ValueError: Default process group has not been initialized`."""
    with ranks_of(2) as ranks:
        for said in ranks.run(_gone):
            assert all("the process groups of this model are gone: dist.destroy" in each for each in said), said
