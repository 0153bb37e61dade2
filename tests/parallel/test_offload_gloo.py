"""Activations and optimizer states in the host's memory over Gloo: the same training, as estimated, an empty pool."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from typing import Any

import offload_case as case
import pytest
import torch
from processes import Ranks, ranks_of

import autopar
from autopar.errors import MeshError, PlanError
from autopar.runtime.tiers.host_tier import host_tier
from autopar.torch_compat import local_of
from benchmarks.measured import host_memory, measure

pytestmark = pytest.mark.gloo
ON = {"offload": "activations"}
TABLE: list[tuple[str, str, dict[str, Any]]] = [
    ("deep", "fsdp=2", {"horizon": 1}),
    ("gpt", "dp=2", {"precision": "bf16", "recompute": 0.4, "zero": 2}),
    ("deep", "pp=2", {"microbatches": 4, "schedule": "zb-v"}),
    ("gpt", "fsdp=2", {"offload": ["activations", "optimizer"]}),
    ("deep", "pp=2", {"microbatches": 2, "offload": "optimizer"}),
    ("gpt", "dp=2", {"zero": 3, "offload": "parameters"}),
    ("gpt", "dp=2", {"offload": ["parameters", "activations"], "horizon": 2}),
    ("deep", "fsdp=2", {"precision": "bf16", "offload": "parameters", "recompute": "full"}),
    ("deep", "pp=2", {"microbatches": 2, "offload": "parameters"}),
    ("gpt", "fsdp=2", {"microbatches": 2, "offload": "parameters"}),
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
        alone = {key: value for key, value in options.items() if key not in ("horizon", "offload")}
        _, want, plain = trained(name, mesh, {**alone, **({"recompute": "none"} if "recompute" in alone else {})})
        parallel, got, optimizer = trained(name, mesh, {**ON, **options})
        row = f"{name} {mesh} {options}"
        wrong += [f"{row}: {key}" for key in want if not torch.equal(want[key], got[key])]
        for mine, its in zip(plain.state.values(), optimizer.state.values(), strict=True):
            same = all(torch.equal(local_of(mine[key]), local_of(its[key])) for key in ("exp_avg", "exp_avg_sq"))
            wrong += [] if same else [f"{row}: a state"]
        wrong += [f"{row}: {text}" for text in beside_estimate(rank, name, parallel, optimizer)]
    return wrong


def beside_estimate(rank: int, name: str, parallel: Any, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """What is not as the estimate says."""
    pool = parallel.programs[0].runner.driver.tier.pool
    is_free = pool.lasting or parallel.compiled.plan.offloads("parameters")  # states and parameters go another way
    if pool.missed or pool.held or (not is_free and pool.moved["out"] != pool.moved["back"]):
        yield f"{pool.missed} buffers made in steps, {pool.held} bytes held, moved {pool.moved}"
    batch, held = case.MADE[name]()[2], []
    for _ in range(3):  # a thread of Gloo may let go of a buffer late, where the machine is busy
        optimizer.zero_grad()
        held.append(measure(parallel, optimizer, *batch))
    report = parallel.prepare(*batch).memory(rank)
    before = sum(bytes_ for kind, bytes_ in report.states.items() if kind != "gradients")
    parts = (
        ("step", min(x.step for x in held), report.step),
        ("its", min(x.optimizer for x in held), report.optimizer),
        ("before", min(x.before for x in held), before),
    )
    for what, measured, estimated in parts:
        if measured != estimated:
            yield f"{what}: {measured} bytes of the device, {estimated} estimated"
    there = host_memory(parallel, optimizer)
    on_host = parallel.compiled.plan.offloads("parameters")
    host = sum(one.nbytes for one in there if one.ndim or not on_host)  # counts of steps are no memory that is told
    if not report.host + report.disk or host != report.host + report.disk:
        yield f"{host} bytes of the host, {report.host} estimated"


def test_training_is_the_same_and_is_what_was_estimated(two: Ranks):
    assert two.run(_train, timeout=120) == [[], []]


ESTIMATED: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt", "dp=2", {"offload": {"optimizer": 0.5}, "zero": 1}),
    ("gpt", "dp=2", {"offload": "parameters", "zero": 2, "microbatches": 3}),
    ("gpt", "dp=2", {"offload": {"parameters": "disk"}, "offload_dir": tempfile.gettempdir(), "zero": 3}),
    ("gpt", "dp=2", {"offload": "optimizer", "offload_dir": tempfile.gettempdir(), "recompute": "full"}),
    ("deep", "pp=2", {"microbatches": 4, "schedule": "interleaved-1f1b", "offload": ["parameters", "activations"]}),
    ("deep", "pp=2", {"microbatches": 4, "schedule": "dualpipev", "offload": "optimizer"}),
]


def _estimate(rank: int) -> list[str]:
    wrong = []
    for name, mesh, options in ESTIMATED:
        parallel, _, optimizer = trained(name, mesh, options)
        wrong += [f"{name} {mesh} {options}: {text}" for text in beside_estimate(rank, name, parallel, optimizer)]
    return wrong


def test_estimates_are_what_is_held_to_the_byte(two: Ranks):
    """Of the device before a step, in it and in the optimizer's, and of the host and the disk."""
    assert two.run(_estimate, timeout=120) == [[], []]


def _go_on(rank: int) -> list[str]:
    """What differs where states of a run without offload go on with parameters in the host's memory, and back; with
    gradients that are added up over two calls, and clipped."""
    _, loss_fn, batch = case.MADE["deep"]()

    def made(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = autopar.parallelize(case.MADE["deep"]()[0], "dp=2", loss_fn=loss_fn, device="cpu", zero=3, **options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        for _ in range(2):
            model.forward_backward(*batch)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        return norm.detach().clone()

    sides = [made(), made(offload="parameters"), made(), made(offload="parameters")]
    norms = [[step(*sides[0])], [step(*sides[1])], [], []]
    for source, target in ((0, 3), (1, 2)):  # onto the other kind
        sides[target][0].load_state_dict(sides[source][0].state_dict())
        sides[target][1].load_state_dict(copy.deepcopy(sides[source][1].state_dict()))  # else both step the same states
    for side, known in zip(sides, norms, strict=True):
        known.append(step(*side))
    want, *others = [(side[0].full_state_dict(), known[-1]) for side, known in zip(sides, norms, strict=True)]
    names = [f"side {i}: {name}" for i, (state, _) in enumerate(others, 1) for name in want[0]
             if not torch.equal(state[name], want[0][name])]  # fmt: skip
    with torch.no_grad():
        outputs = [model(batch[0]) for model, _ in sides]
    names += [f"output of {i}" for i, one in enumerate(outputs) if not torch.equal(one, outputs[0])]
    return names + [f"norm of {i}" for i, (_, norm) in enumerate(others, 1) if not torch.equal(norm, want[1])]


def test_states_go_on_in_the_host_s_memory_and_back(two: Ranks):
    assert two.run(_go_on, timeout=120) == [[], []]


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


def test_a_mesh_that_is_planned_as_ranks_run():
    model, loss_fn, _ = case.deep()
    with pytest.raises(MeshError) as caught:
        autopar.parallelize(model, "auto", loss_fn=loss_fn, device="cpu", **ON)
    assert str(caught.value) == (
        "mesh 'auto' decides offload itself: leave out offload='activations', or write a mesh. (`autopar plan TARGET "
        "--gpus N --fix ...` plans around what is decided.)"
    )
