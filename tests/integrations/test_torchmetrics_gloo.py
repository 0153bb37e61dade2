"""Metrics of torchmetrics on a mesh with data and tensor parallel axes, beside those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import data, loss_fn, net
from processes import Ranks
from torch.distributed.device_mesh import init_device_mesh

import autopar

pytest.importorskip("torchmetrics", reason="metrics over ranks need it: pip install torchmetrics")
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

ROWS = ((0, 3, 6), (6, 12, 12), (12, 17, 22))  # of each batch: from, where the second rank's part begins, to


def metrics(**options: Any) -> MetricCollection:
    """Ratios, a sum that shows what is counted twice, and one that keeps all samples in a list."""
    return MetricCollection({
        "accuracy": MulticlassAccuracy(4, **options), "loss": MeanMetric(**options), "seen": SumMetric(**options),
        "auroc": MulticlassAUROC(4, **options),
    })  # fmt: skip


def _counted(found: MetricCollection, guess: torch.Tensor, y: torch.Tensor) -> None:
    found["accuracy"].update(guess, y)
    found["auroc"].update(guess.softmax(-1), y)
    found["loss"].update(torch.nn.functional.cross_entropy(guess, y, reduction="none"))
    found["seen"].update(float(len(y)))


def _values(found: MetricCollection) -> dict[str, float]:
    return {name: value.item() for name, value in found.compute().items()}


def _on_a_mesh(rank: int) -> list[Any]:
    """Whole batches, then parts of unlike sizes, of which one is empty."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = autopar.parallelize(net(), mesh, loss_fn=loss_fn).eval()
    local = autopar.parallelize(net(), mesh, loss_fn=loss_fn, batch="local").eval()
    of_whole, of_parts = metrics(sync_on_compute=False), metrics(process_group=mesh["dp"].get_group())
    x, y = data().tensors
    for begin, middle, end in ROWS:
        _counted(of_whole, whole(x[begin:end]), y[begin:end])
        mine = slice(begin, middle) if mesh["dp"].get_local_rank() == 0 else slice(middle, end)
        guess = local(x[mine])
        assert len(guess) == len(y[mine])
        if len(guess):
            _counted(of_parts, guess, y[mine])
    return [_values(of_whole), _values(of_parts)]


@pytest.mark.gloo
def test_metrics_are_those_of_one_device(four: Ranks) -> None:
    plain, (x, y), model = metrics(), data().tensors, net().eval()
    for begin, _, end in ROWS:
        _counted(plain, model(x[begin:end]), y[begin:end])
    wanted = _values(plain)
    assert wanted["seen"] == 22
    for found in four.run(_on_a_mesh):
        for one in found:
            assert one == pytest.approx(wanted, rel=1e-6)
