"""ZeRO on local Gloo processes: the user's loop, its optimizers and checkpoints, with parts of parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import Ranks, ranks_of
from side_by_side import assert_same_state, case, plain_loss, train_both
from torch import nn
from torch.distributed.tensor import DTensor

import autopar

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    with ranks_of(2) as two, ranks_of(3) as three, ranks_of(4) as four:
        yield {2: two, 3: three, 4: four}


def _train(rank: int, name: str, mesh: str, options: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By parameter: the elements that this rank holds, of how many."""
    model = train_both(name, mesh, **options)
    return {n: (p.to_local().numel(), p.numel()) for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("short_gpt", "dp=2", {"zero": 1}),
        ("short_gpt", "dp=3", {"zero": 2}),
        ("short_gpt", "dp=3", {"zero": 3, "accumulate": 2}),
        ("nanogpt", "dp=2,tp=2", {"zero": 3}),
        ("short_gpt", "dp=2,fsdp=2", {}),
        ("short_gpt", "cp=2", {"zero": 2}),
        pytest.param("short_gpt", "dp=2,cp=2", {"zero": 1}, marks=pytest.mark.slow),
        ("short_gpt", "dp=2,cp=2", {"zero": 3, "microbatches": 2}),
        pytest.param("short_gpt", "cp=2,fsdp=2", {}, marks=pytest.mark.slow),
        ("short_gpt", "cp=2,pp=2", {"zero": 3, "microbatches": 2}),
        pytest.param("short_gpt", "dp=3", {"zero": 3, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param("short_gpt", "dp=2,pp=2", {"zero": 3, "microbatches": 2}, marks=pytest.mark.slow),
        ("short_gpt", "dp=2,pp=2", {"zero": 1, "microbatches": 2, "schedule": "zb-h1"}),
        ("frozen", "dp=3", {"zero": 2}),
        ("unused", "dp=3", {"zero": 3}),
        ("conv", "dp=3", {"zero": 3}),
    ],
    ids=str,
)
def test_training_equals_the_plain_loop(ranks: dict[int, Ranks], name: str, mesh: str, options: dict[str, Any]):
    """Loss, gradients, clipping by the global norm, AdamW's steps, weights."""
    size = autopar.Mesh(tuple((a, int(n)) for a, n in (part.split("=") for part in mesh.split(",")))).size
    held = ranks[size].run(_train, name, mesh, {"clip": 1e-3, **options})
    every = [sum(part for part, _ in rank.values()) for rank in held]
    total = sum(whole for _, whole in held[0].values())
    assert max(every) < 0.6 * total, (every, total)


def _uneven(rank: int) -> None:
    """Parameter groups, a smaller last batch, evaluation before training, whole and distributed checkpoints."""
    plain, loss_fn, args, _ = case("short_gpt")
    model = autopar.parallelize(copy.deepcopy(plain), "dp=3", loss_fn=loss_fn, zero=3)
    torch.testing.assert_close(model(args[0]), plain(args[0]).detach(), rtol=1e-10, atol=1e-12)
    pair = (model, plain)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        flat = [p for p in module.parameters() if p.ndim < 2]
        return [{"params": flat, "weight_decay": 0.0}, {"params": [p for p in module.parameters() if p.ndim > 1]}]

    optimizers = [torch.optim.AdamW(groups(m), lr=1e-2, weight_decay=0.3) for m in pair]
    for rows in (6, 4, 6):
        batch = tuple(tensor[:rows] for tensor in args)
        loss = model.forward_backward(*batch)
        want = plain_loss(plain, loss_fn, batch, {})
        want.backward()
        torch.testing.assert_close(loss, want.detach(), rtol=1e-10, atol=0)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_same_state(model, plain, "weight")


def test_groups_and_batches(ranks: dict[int, Ranks]):
    ranks[3].run(_uneven)


def _checkpoint(rank: int, folder: str) -> None:
    plain, loss_fn, args, _ = case("short_gpt")
    made = {zero: autopar.parallelize(copy.deepcopy(plain), "dp=3", loss_fn=loss_fn, zero=zero) for zero in (0, 3)}
    for model in made.values():
        model.prepare(*args)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    first = next(iter(made[3].parameters()))
    assert isinstance(first, DTensor) and "Shard" in str(first.placements)
    dcp.save({"model": made[3].state_dict()}, checkpoint_id=folder)
    for zero in (0, 3):  # into another layout, and into the same
        model = autopar.parallelize(copy.deepcopy(plain), "dp=3", loss_fn=loss_fn, zero=zero)
        model.prepare(*args)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        for name, value in model.full_state_dict().items():
            torch.testing.assert_close(value, 2 * plain.state_dict()[name])
    model.load_state_dict(plain.state_dict())  # a plain checkpoint
    assert_same_state(model, plain, "loaded weight")


def test_checkpoints_do_not_know_of_zero(ranks: dict[int, Ranks], tmp_path: Path):
    ranks[3].run(_checkpoint, str(tmp_path / "saved"))


def _optimizer(rank: int, name: str, options: dict[str, Any]) -> None:
    train_both("mlp", "dp=3", lambda p: getattr(torch.optim, name)(p, lr=1e-2, **options), zero=3, clip=None)


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {}), ("AdamW", {"foreach": True}), ("AdamW", {"fused": True}), ("RMSprop", {}), ("Adafactor", {})],
)
def test_optimizers(ranks: dict[int, Ranks], name: str, options: dict[str, Any]):
    """Adafactor's factors are those of the whole matrix."""
    ranks[3].run(_optimizer, name, options)


def _evaluated_first(rank: int, mesh: str, options: dict[str, Any]) -> None:
    """Outputs before any step: what is added to them last is gathered after the micro-batches."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    x = torch.randn(12, 4, 12, dtype=torch.float64)
    model = autopar.parallelize(
        copy.deepcopy(plain), mesh, loss_fn=lambda m, x: m(x).pow(2).mean(), microbatches=2, **options
    )
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model.forward_backward(x).detach(), plain(x).pow(2).mean().detach(), rtol=1e-10, atol=0)


@pytest.mark.parametrize(("mesh", "options"), [("fsdp=2", {}), ("dp=2,pp=2", {"zero": 3})], ids=str)
def test_outputs_before_any_step(ranks: dict[int, Ranks], mesh: str, options: dict[str, Any]) -> None:
    ranks[4 if "," in mesh else 2].run(_evaluated_first, mesh, options)
