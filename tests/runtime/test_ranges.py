"""What torch.profiler shows of a step: modules, collectives and passes by name, where somebody asked for it."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from processes import Ranks
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.errors import AutoparError


def _profiled(model: Any, batch: Any) -> tuple[list[tuple[str, float, float]], torch.Tensor]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        loss = model.forward_backward(*batch)
    return [(one.name, one.time_range.start, one.time_range.end) for one in found.events()], loss


def _shown(rank: int, mesh: str, options: dict[str, Any]) -> dict[str, Any]:
    model, loss_fn, batch = models.short_gpt()
    parallel = autopar.parallelize(model, mesh, loss_fn=loss_fn, **options)
    off, loss = _profiled(parallel, batch)
    source = parallel.programs[0].runner.source
    parallel.record("torch.profiler")
    on, named_loss = _profiled(parallel, batch)
    parallel.record(None)
    again, _ = _profiled(parallel, batch)
    names = {name for name, _, _ in on}
    ends = {name: (start, end) for name, start, end in on}
    moved = [name for name in names if " over " in name]
    modules = {"model", *dict(parallel.original.named_modules())}
    outer = [(start, end) for name, start, end in on if name.removesuffix(" backward") in modules]
    start, end = ends[moved[0]]
    return {
        "modules": {name for name in names if name.startswith("blocks.0")},
        "moved": {name.partition(" %")[0] for name in moved},
        "passes": {name.rpartition("by ")[2] for name in names if "by " in name},
        "inside": any(first <= start and end <= last for first, last in outer),
        "off": [name for name, _, _ in off + again if name.startswith("blocks") or " over " in name],
        "same": torch.equal(loss, named_loss) and source == parallel.programs[0].runner.source,
    }


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "options", "moved"),
    [
        ("tp=2", {}, "all_reduce over tp"),
        ("dp=2", {"microbatches": 2, "zero": 1}, "all_gather over dp"),
        ("pp=2", {"microbatches": 2}, None),
    ],
)  # fmt: skip
def test_modules_collectives_and_passes_have_names(
    two: Ranks, mesh: str, options: dict[str, Any], moved: str | None
) -> None:
    for found in two.run(_shown, mesh, options):
        assert found["off"] == [] and found["same"], "nothing is opened where nobody asked"
        assert {"blocks.0.mlp.up", "blocks.0.mlp.up backward"} <= found["modules"] or moved is None, found["modules"]
        assert found["inside"] and found["passes"], found
        assert moved is None or moved in {name.replace("_start", "") for name in found["moved"]}, found["moved"]


def test_another_word_is_refused() -> None:
    model = autopar.parallelize(torch.nn.Linear(2, 2), "dp=1", loss_fn=lambda m, x: m(x).sum())
    with pytest.raises(AutoparError) as refused:
        model.record("profiler")  # type: ignore[arg-type]
    assert str(refused.value) == "record('profiler'): give a Recorder, 'torch.profiler' or None."
