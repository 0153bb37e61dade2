"""What torch.profiler shows of a step: modules, collectives and passes by name, where somebody asked for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import models
import pytest
import torch
from processes import Ranks
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.errors import AutoparError
from autopar.ir.text.text import parse_program
from autopar.runtime.executor.ranges import Ranges, range_names


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


STEP = """LOCAL program on tp=2
%x: f32[4] [-] = batch "0"
%neg: f32[4] [-] = aten.neg.default(%x)   # up  gpt.py:3
%exp: f32[4] [-] = aten.exp.default(%neg)
%cos: f32[4] [-] = aten.cos.default(%exp)   # up  gpt.py:3  backward  by precision
%part: f32[4] [-] partial(tp) = autopar.keep_first.default(%cos, "tp")   # by zero
%all_reduce: f32[4] [-] = autopar.all_reduce.default(%part, "tp", "sum")   # up  gpt.py:3  by reshard
%all_reduce_start: f32[4] [-] = autopar.all_reduce_start.default(%part, "tp", "sum")   # by overlap
%wait: f32[4] [-] = autopar.wait.default(%all_reduce_start)   # backward  by overlap
return value "y" = %wait
"""


def test_names_of_ranges() -> None:
    program = parse_program(STEP)
    assert {node.name: range_names(node) for node in program.calls()} == {
        "neg": ("up",), "exp": ("model",), "cos": ("up backward", "by precision"),
        "part": ("model", "keep_first over tp %part by zero"),
        "all_reduce": ("up", "all_reduce over tp %all_reduce by reshard"),
        "all_reduce_start": ("model", "all_reduce_start over tp %all_reduce_start by overlap"),
        "wait": ("model backward", "wait %wait by overlap"),
    }  # fmt: skip
    bare = program.graph.call_function(torch.neg, (program.placeholders[0],))
    assert range_names(bare) == ()


def test_ranges_that_are_open_stay_open() -> None:
    """A range is entered once for calls in a row that share it, and closed once."""
    ranges = Ranges()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for names in (("a",), ("a", "b"), ("a", "c"), ("d",), ("a",)):
            ranges.enter(*names)
        ranges.leave()
        ranges.leave()
    shown = Counter(one.name for one in found.events() if one.name in "abcd")
    assert shown == {"a": 2, "b": 1, "c": 1, "d": 1}
