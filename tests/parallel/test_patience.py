"""How long ranks wait for each other where nobody said it: by the steps that were measured."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from processes import ranks_of
from torch import nn

import autopar
from autopar.parallel.agree.patience import EVERY, LEAST_S, TIMES, Patience


def steps(patience: Patience, seconds: float, count: int, at: float = 0.0) -> float:
    """Let steps begin, so many seconds one after another."""
    for _ in range(count):
        patience.step(at)
        at += seconds
    return at


def test_it_follows_the_longest_step() -> None:
    patience = Patience()
    at = steps(patience, 1.0, EVERY)
    assert patience.bound is None, "not enough steps"
    at = steps(patience, 1.0, 1, at)
    assert patience.bound == LEAST_S, "short steps"
    at = steps(patience, 100.0, 1, at)  # a save, before the next one
    at = steps(patience, 1.0, EVERY, at)
    assert patience.bound == TIMES * 100.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _bounds(rank: int, port: int, timeout: float | None) -> list[float]:
    """Of all groups, once steps were measured, where autopar joins the ranks."""
    dist.destroy_process_group()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = {} if timeout is None else {"timeout": timeout}
    model = autopar.parallelize(nn.Linear(4, 4), "dp=2", loss_fn=lambda m, x: m(x).square().mean(), **options)
    for _ in range(EVERY + 1):
        model.forward_backward(torch.ones(4, 4))
    groups = [dist.group.WORLD, model._session.store.distributor.device_mesh.get_group("dp")]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


@pytest.mark.gloo
def test_groups_have_it_unless_the_user_said_one() -> None:
    for timeout, wanted in ((None, [LEAST_S, LEAST_S]), (77.0, [77.0, 77.0])):
        with ranks_of(2) as ranks:
            assert ranks.run(_bounds, free_port(), timeout) == [wanted, wanted]
