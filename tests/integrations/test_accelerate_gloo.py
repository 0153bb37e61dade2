"""Loops of Accelerate, and plain ones, on a mesh, beside the same on one device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import accelerated, as_torchrun_does, data, loss_fn, net
from processes import Ranks
from torch.utils.data import DataLoader, DistributedSampler

import autopar
from autopar.errors import AutoparError, BatchError

accelerate = pytest.importorskip("accelerate")
from autopar.integrations.accelerate import Accelerator  # noqa: E402

MESHES: dict[str, dict[str, Any]] = {"dp=2": {"zero": 3}, "pp=2": {"microbatches": 1}}


def _alone() -> Any:
    return accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)


def _on_meshes(rank: int, folder: str) -> dict[str, Any]:
    as_torchrun_does(rank, 2)
    logging.disable(logging.WARNING)
    found = {}
    for mesh, options in MESHES.items():
        make = lambda: Accelerator(  # noqa: E731
            mesh=mesh, loss_fn=loss_fn, options=options, gradient_accumulation_steps=2  # noqa: B023
        )  # fmt: skip
        here = Path(folder) / mesh
        found[mesh] = accelerated(make(), here)
    found["pp=2 again"] = accelerated(make(), here / "again", Path(folder) / "dp=2" / "state-1")  # of another mesh
    found["from one device"] = accelerated(make(), Path(folder) / "more", Path(folder) / "plain" / "state-1")
    return found


@pytest.mark.gloo
def test_a_loop_of_accelerate_is_that_of_one_device(two: Ranks, tmp_path: Path) -> None:
    plain = accelerated(_alone(), tmp_path / "plain")
    for found in two.run(_on_meshes, str(tmp_path), timeout=180):
        for name, one in found.items():
            for key, values in one.items():
                wanted = plain[key][-len(values) :]
                assert len(values) == len(plain[key]) // (2 if name not in MESHES else 1)
                assert values == pytest.approx(wanted, rel=1e-9), (name, key)
    for part in ("dp=2", "pp=2", "pp=2/again", "more"):
        ours, theirs = (torch.load(tmp_path / side / "weights.pt") for side in (part, "plain"))
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)
    # one device goes on from what a mesh wrote
    again = accelerated(_alone(), tmp_path / "alone", tmp_path / "pp=2" / "state-1")
    assert again["losses"] == pytest.approx(plain["losses"][-4:], rel=1e-9)


def _prepared(rank: int, is_alone: bool) -> dict[str, list[float]]:
    """The loop of `autopar.prepare`'s docstring: shuffled by torch and numpy; ranks begin with other seeds."""
    found = {}
    for mesh in ("dp=2", "tp=2"):
        model: Any = net()
        torch.manual_seed(0 if is_alone or rank == 0 else 99 + rank)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader: Any = DataLoader(data(), batch_size=6, shuffle=True)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        if not is_alone:
            model, optimizer, loader, scheduler = autopar.prepare(
                model, optimizer, loader, scheduler, mesh=mesh, loss_fn=loss_fn
            )
        losses = []
        for _ in range(2):
            for x, y in loader:
                loss = loss_fn(model, x, y) if is_alone else model.training_loss(x, y)
                (loss / 2).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        model.eval()
        losses.append(model(data().tensors[0]).square().mean().item())
        assert len(loader) == 4 and loader.batch_size == 6
        found[mesh] = losses
    return found


@pytest.mark.gloo
def test_a_prepared_loop_is_that_of_one_device(two: Ranks) -> None:
    plain = _prepared(0, True)
    for found in two.run(_prepared, False):
        for mesh, losses in found.items():
            assert losses == pytest.approx(plain[mesh], rel=1e-9), mesh


def test_a_generator_of_the_loader_is_shared_too() -> None:
    given = torch.Generator()
    loader: Any = DataLoader(data(), batch_size=6, shuffle=True, generator=given)
    _, prepared = autopar.prepare(net(), loader, mesh="dp=1", loss_fn=loss_fn)
    assert [len(x) for x, _ in prepared] == [6, 6, 6, 4] and prepared.dataset is loader.dataset
    _, local = autopar.prepare(net(), loader, mesh="dp=1", loss_fn=loss_fn, batch="local")
    assert local is loader


def test_prepare_says_what_does_not_fit() -> None:
    model: Any = net()
    other: Any = torch.optim.SGD(net().parameters(), lr=0.1)
    sampled: Any = DataLoader(data(), batch_size=4, sampler=DistributedSampler(data(), 2, 0))
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((model, other), AutoparError, (
            "prepare(): the SGD of argument 1 has 9 parameters, none of which is of the Sequential: make it of "
            "model.parameters()."
        )),
        ((other, model), AutoparError, (
            "prepare(model, ...) takes the model first, then optimizer, loader, scheduler in any order; the first "
            "argument is of type SGD."
        )),
        ((model, sampled), BatchError, (
            "prepare(): the loader of argument 1 has a DistributedSampler, which gives each rank other rows, but the "
            "batch is the whole one on every rank. Leave the sampler out and give the loader the batch size of all "
            'ranks together, or say batch="local" (docs/local_batches.md).'
        )),
        ((model, net()), AutoparError, (
            "prepare() makes one model parallel, and argument 1 is a second one (Sequential): call prepare for each "
            "model that is trained, with its own loss_fn. One that is only called in the loss needs nothing "
            "(docs/several_models.md)."
        )),
    ]  # fmt: skip
    for given, kind, text in cases:
        with pytest.raises(kind) as caught:
            autopar.prepare(*given, mesh="dp=1", loss_fn=loss_fn)
        assert str(caught.value) == text
    assert type(model[0].weight) is torch.nn.Parameter  # nothing was changed


def test_an_accelerator_says_what_does_not_go() -> None:
    with pytest.raises(AutoparError) as caught:
        Accelerator(mesh="dp=1", mixed_precision="fp8")
    assert str(caught.value) == "mixed_precision='fp8': autopar has 'no', 'bf16' and 'fp16'."
    with pytest.raises(AutoparError) as caught:
        Accelerator(mesh="dp=1", fsdp_plugin=object())
    assert str(caught.value) == (
        'Accelerator(fsdp_plugin=...) is another way to be parallel: leave it out, and say zero=3, or an axis "fsdp" '
        "to autopar."
    )
    accelerator = Accelerator(mesh="dp=1", loss_fn=loss_fn, cpu=True)
    accelerator.prepare(net())
    with pytest.raises(AutoparError) as caught:
        accelerator.prepare(net())
    assert str(caught.value).startswith("Accelerator.prepare() was given a second model to train (Sequential): make")
    accelerator.free_memory()
    assert (
        type(accelerator.prepare(net())[0].weight) is not torch.nn.Parameter
    )  # after which there is a first one again
