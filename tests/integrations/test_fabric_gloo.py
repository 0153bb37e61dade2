"""A loop of Lightning's Fabric on a mesh, beside itself on one device."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import as_torchrun_does, data, loss_fn, net
from processes import Ranks
from torch.utils.data import DataLoader

import autopar
from autopar.errors import AutoparError

pytest.importorskip("lightning", reason="Fabric's tests need Lightning: pip install lightning")
import lightning.fabric as lf
from fabrics import fabricated

from autopar.integrations.fabric import Fabric, FabricStrategy

MESHES: dict[str, dict[str, Any]] = {"dp=2": {"zero": 3}, "tp=2": {}, "pp=2": {"microbatches": 1}}


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`seed_everything` leaves variables behind."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def _on_meshes(rank: int, folder: str) -> dict[str, Any]:
    as_torchrun_does(rank, 2)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    found = {}
    for mesh, options in MESHES.items():
        make = lambda: Fabric(mesh=mesh, loss_fn=loss_fn, options=options, accelerator="cpu")  # noqa: B023, E731
        found[mesh] = fabricated(make(), Path(folder) / mesh)
    found["pp=2 again"] = fabricated(make(), Path(folder) / "again", Path(folder) / "dp=2" / "0.ckpt")
    found["from one device"] = fabricated(make(), Path(folder) / "more", Path(folder) / "plain" / "0.ckpt")
    return found


def _alone() -> Any:
    return lf.Fabric(accelerator="cpu", devices=1)


def _close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.gloo
def test_a_loop_of_fabric_is_that_of_one_device(two: Ranks, tmp_path: Path) -> None:
    plain = fabricated(_alone(), tmp_path / "plain")
    for found in two.run(_on_meshes, str(tmp_path), timeout=180):
        for name, one in found.items():
            for key, values in one.items():
                wanted = plain[key][-len(values) :]
                assert len(values) == len(plain[key]) // (1 if name in MESHES or key == "ranks" else 2), (name, key)
                assert values == pytest.approx(wanted, rel=1e-9) if key != "ranks" else values == wanted, (name, key)
    theirs = torch.load(tmp_path / "plain" / "1.ckpt")
    for part in (*MESHES, "again", "more"):
        ours = torch.load(tmp_path / part / "1.ckpt")
        assert ours["epochs"] == theirs["epochs"]
        for key in ("model", "optimizer", "scheduler"):
            _close(ours[key], theirs[key])
    # one device goes on from what a mesh wrote
    state = torch.load(tmp_path / "pp=2" / "0.ckpt")
    del state["autopar"]
    torch.save(state, tmp_path / "state")
    assert fabricated(_alone(), tmp_path / "alone", tmp_path / "state")["losses"] == pytest.approx(
        plain["losses"][-4:], rel=1e-9
    )


def test_workers_of_a_loader_draw_as_those_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    as_torchrun_does(1, 2)
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    fabric = Fabric(mesh="dp=2", loss_fn=loss_fn, accelerator="cpu")
    assert (fabric.global_rank, fabric.world_size) == (1, 1)
    loader: Any = fabric.setup_dataloaders(DataLoader(data(), batch_size=6, num_workers=1))
    assert loader.worker_init_fn.keywords == {"rank": 0}


def test_fabric_says_what_does_not_go() -> None:
    with pytest.raises(AutoparError) as caught:
        Fabric(mesh="dp=1", loss_fn=loss_fn, strategy="ddp")
    assert str(caught.value) == (
        "Fabric(strategy=...) is another way to say which ranks there are: leave it out. They are those of torchrun, "
        'and mesh="dp=1" says what they do.'
    )
    with pytest.raises(AutoparError) as caught:
        Fabric(mesh="dp=1", loss_fn=loss_fn, accelerator="cpu", precision="bf16-mixed").setup(net())
    assert str(caught.value) == (
        'Fabric(precision="bf16-mixed") is said to autopar: leave it out, and give Fabric(..., '
        'options={"precision": "bf16"}), or "fp16".'
    )
    fabric = lf.Fabric(accelerator="cpu", strategy=FabricStrategy(), devices=1)
    with pytest.raises(AutoparError) as caught:
        fabric.setup(net())
    assert str(caught.value) == (
        "fabric.setup() was given a plain Sequential with FabricStrategy: make it parallel first "
        "(autopar.parallelize), or take the Fabric of autopar.integrations.fabric, which does."
    )
    model = fabric.setup(autopar.parallelize(net(), "dp=1", loss_fn=loss_fn))  # its own Fabric takes a parallel one
    assert model.module.training_loss and callable(model.training_loss)
