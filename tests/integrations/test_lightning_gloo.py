"""Lightning's Trainer with autopar's strategy, beside itself on one device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import as_torchrun_does
from processes import Ranks

from autopar.errors import AutoparError

pytest.importorskip("lightning", reason="the strategy's tests need Lightning: pip install lightning")
import lightning as L
from lit import Classifier, fitted

from autopar.integrations.lightning import AutoparStrategy

MESHES: dict[str, dict[str, Any]] = {"dp=2": {"zero": 1}, "tp=2": {}, "pp=2": {"microbatches": 1}}


def _on_meshes(rank: int, folder: str) -> dict[str, Any]:
    as_torchrun_does(rank, 2)
    logging.disable(logging.WARNING)
    found = {}
    for mesh, options in MESHES.items():
        found[mesh] = fitted(Path(folder) / mesh, strategy=AutoparStrategy(mesh, options))
    plain = Path(folder) / "plain" / "epoch=0.ckpt"
    found["resumed"] = fitted(Path(folder) / "more", plain, strategy=AutoparStrategy("tp=2"))
    return found


def _close(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            _close(found[name], wanted[name])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            _close(one, other)
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-8)
    else:
        assert found == wanted


@pytest.mark.gloo
def test_a_trainer_of_lightning_is_that_of_one_device(two: Ranks, tmp_path: Path) -> None:
    plain = fitted(tmp_path / "plain")
    resumed = fitted(tmp_path / "plain more", tmp_path / "plain" / "epoch=0.ckpt")
    for found in two.run(_on_meshes, str(tmp_path), timeout=180):
        for name, one in found.items():
            _close(one, resumed if name == "resumed" else plain)
    theirs = torch.load(tmp_path / "plain" / "epoch=1.ckpt", weights_only=False)
    for mesh in MESHES:
        ours = torch.load(tmp_path / mesh / "epoch=1.ckpt", weights_only=False)
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
            _close(ours[key], theirs[key])
    # one device goes on from what a mesh wrote
    _close(fitted(tmp_path / "again", tmp_path / "pp=2" / "epoch=0.ckpt"), resumed)


def test_a_strategy_says_what_does_not_go(tmp_path: Path) -> None:
    def said(module: Any, **kwargs: Any) -> str:
        trainer = L.Trainer(
            strategy=AutoparStrategy("dp=1"), accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
            enable_checkpointing=False, max_epochs=1, default_root_dir=tmp_path, **kwargs,
        )  # fmt: skip
        with pytest.raises(AutoparError) as caught:
            trainer.fit(module, [])
        return str(caught.value)

    by_hand = Classifier()
    by_hand.automatic_optimization = False
    assert said(by_hand) == (
        "Classifier optimises by hand (automatic_optimization = False), where a step has several losses. Make its "
        "networks parallel themselves (autopar.parallelize, with the loss of each) and call training_loss, without "
        "this strategy."
    )
    assert said(Classifier(), precision="bf16-mixed") == (
        'Trainer(precision="bf16-mixed") is said to autopar: leave it out, and give AutoparStrategy(..., '
        'options={"precision": "bf16"}), or "fp16".'
    )
