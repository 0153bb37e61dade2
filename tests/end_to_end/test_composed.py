"""Drawn models under drawn losses: a part of `python -m benchmarks.combinations --composed`."""

from __future__ import annotations

import random

import pytest
import torch

import autopar
from benchmarks import composed

MESHES = ("dp=2,tp=2", "dp=2,cp=2", "fsdp=3", "pp=2,dp=2")


@pytest.mark.parametrize("seed", range(8))
def test_every_draw_is_the_step_of_one_device(seed: int) -> None:
    dice = random.Random(seed)
    name, mesh = composed.drawn(dice), MESHES[seed % len(MESHES)]
    torch.manual_seed(seed)
    model, loss, batch = composed.made(name)
    report = autopar.verify(
        model.double(), mesh, loss_fn=loss, batch=batch, microbatches=2, schedule="gpipe", zero=dice.choice((0, 2, 3))
    )
    assert report.ok, f"{name} {mesh}: {report}"


def test_names_are_told_apart() -> None:
    assert composed.is_composed("mlp+places tied views") and composed.is_composed("sums+mlp mean")
    assert not composed.is_composed("segformer (segmentation)") and not composed.is_composed("gru both ways")
