"""Activations in the host's memory over Gloo: the same training, the estimate to the byte, an empty pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import offload_case as case
import pytest
import torch
from processes import Ranks, ranks_of

import autopar
from autopar.errors import PlanError
from autopar.runtime.tiers.host_tier import host_tier
from benchmarks.measured import host_memory, measure

pytestmark = pytest.mark.gloo
ON = {"offload": "activations"}
TABLE: list[tuple[str, str, dict[str, Any]]] = [
    ("deep", "fsdp=2", {"horizon": 1}),
    ("gpt", "dp=2", {"precision": "bf16", "recompute": 0.4, "zero": 2}),
    ("gpt", "tp=2", {"sequence_parallel": True, "recompute": "full"}),
    ("deep", "pp=2", {"microbatches": 4, "schedule": "zb-v"}),
]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks_of(2) as ranks:
        yield ranks


def trained(
    name: str, mesh: str, options: dict[str, Any]
) -> tuple[Any, dict[str, torch.Tensor], torch.optim.Optimizer]:
    model, loss_fn, batch = case.MADE[name]()
    parallel = autopar.parallelize(model, mesh, loss_fn=loss_fn, device="cpu", **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(parallel.forward_backward(*batch))
        optimizer.step()
    return parallel, {**parallel.full_state_dict(), "losses": torch.stack(losses)}, optimizer


def _train(rank: int) -> list[str]:
    """What differs, row by row."""
    wrong = []
    for name, mesh, options in TABLE:
        plain = {key: value for key, value in options.items() if key != "horizon" and not isinstance(value, float)}
        _, want, _ = trained(name, mesh, plain)
        parallel, got, optimizer = trained(name, mesh, {**options, **ON})
        row = f"{name} {mesh} {options}"
        wrong += [f"{row}: {key}" for key in want if not torch.equal(want[key], got[key])]
        pool = parallel.programs[0].runner.driver.tier.pool
        if pool.missed or pool.held or pool.moved["out"] != pool.moved["back"] or not pool.moved["out"]:
            wrong.append(f"{row}: {pool.missed} buffers made in steps, {pool.held} bytes held, moved {pool.moved}")
        optimizer.zero_grad()
        batch = case.MADE[name]()[2]
        held = measure(parallel, optimizer, *batch).step
        report = parallel.prepare(*batch).memory(rank)
        if abs(held - report.step) > report.step * 0.005:
            wrong.append(f"{row}: {held} bytes of the device, {report.step} estimated")
        if sum(one.nbytes for one in host_memory(parallel)) != report.host or pool.made != report.host:
            wrong.append(f"{row}: {pool.made} bytes of the host, {report.host} estimated")
    return wrong


def test_training_is_the_same_and_is_what_was_estimated(two: Ranks):
    assert two.run(_train, timeout=120) == [[], []]


def _differ(rank: int) -> None:
    model, loss_fn, _ = case.deep()
    autopar.parallelize(model, "dp=2", loss_fn=loss_fn, device="cpu", **(ON if rank else {}))


def test_ranks_that_do_not_mean_the_same(two: Ranks):
    for outcome in two.attempt(_differ):
        assert outcome.error == (
            "RankError: ranks disagree on the options:\n  rank 1 has 'offload=activations' where the others have "
            "'offload=None'\nGive every rank the same options."
        )


def test_a_host_without_memory():
    with pytest.raises(PlanError) as caught:
        host_tier(torch.device("cpu")).fill({1000: 3}, has=lambda: 2000)
    assert str(caught.value) == (
        "offload= needs 3000 bytes of the host's memory on this rank, and 2000 are free. Move less: a smaller part as "
        'offload={"activations": 0.5}, a smaller batch, or more micro-batches.'
    )


def test_recordings_are_refused():
    model, loss_fn, _ = case.deep()
    with pytest.raises(autopar.AutoparError) as caught:
        autopar.parallelize(model, "dp=1", loss_fn=loss_fn, device="cpu", cuda_graphs="dry-run", **ON)
    assert str(caught.value) == (
        "offload='activations' with cuda_graphs='dry-run': a recording would copy to the buffers of its first step. "
        "Leave one of them out."
    )


def test_plans_do_not_weigh_it():
    model, loss_fn, _ = case.deep()
    with pytest.raises(PlanError) as caught:
        autopar.parallelize(model, "auto", loss_fn=loss_fn, device="cpu", **ON)
    assert str(caught.value) == (
        "offload='activations': plans do not weigh what the host's memory holds. Leave it out, or write a mesh."
    )
