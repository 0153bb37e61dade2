"""Two layers of experts, in ways to write them, with what else a plan has: beside one device, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from verified import Once

from autopar.compiled import Compiled
from autopar.errors import CoupledError
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.verification.verify import verify
from benchmarks.mixtures import AT_ONCE, COUPLED, ROOMS, SORTED, model_of
from benchmarks.spellings import expert_spellings as ways
from benchmarks.spellings import expert_variants as variants
from benchmarks.spellings.expert_spellings import tokens

Way = Callable[..., Tensor]
CASES: list[tuple[Way, str, dict[str, Any]]] = [
    (ways.mixtral, "ep=2,tp=2", {"sequence_parallel": True}),  # once an assertion: rows at their experts were split
    (ways.written, "pp=2,ep=2", {"microbatches": 2, "schedule": "zb-v"}),  # once sent between stages
    (ways.slices, "pp=2,cp=2", {"microbatches": 2, "schedule": "gpipe", "experts": "cp"}),
    (ways.moe_infer, "dp=2,ep=2", {"zero": 3, "recompute": "full"}),
    (variants.unique, "pp=2,ep=2", {"microbatches": 2, "schedule": "1f1b", "zero": 1}),  # once coupled
    (variants.unique_list, "ep=2", {"microbatches": 2, "offload": "activations"}),
    (variants.pairs, "pp=2,ep=2", {"microbatches": 2, "schedule": "interleaved-1f1b", "compile": "triton"}),
    (variants.tec, "dp=2,ep=2", {"zero": 2, "recompute": "full"}),
    (variants.tec, "pp=2,ep=2", {"microbatches": 1, "chunked_loss": True}),
    (variants.bmm, "ep=2,tp=2", {"offload": "parameters"}),
    (ways.where_, "ep=2,tp=2", {"microbatches": 2, "offload": "parameters"}),  # once a sum came before it was an input
    (variants.switch_room, "cp=2", {"experts": "cp", "zero": 1}),
    (variants.expert_choice, "ep=4", {"zero": 3, "chunked_loss": True}),
    (variants.soft, "dp=2,ep=2", {"zero": 1, "recompute": "selective"}),
]


@functools.cache
def once(way: Way) -> Once:
    return Once.of(model_of(way), None, tokens())


@pytest.mark.parametrize(("way", "mesh", "options"), CASES, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_step_is_that_of_one_device(way: Way, mesh: str, options: dict[str, Any]) -> None:
    """And the experts of all layers are divided. Red for slices, written and moe_infer while what cuts rows in a second
    layer was taken for another branch."""
    _, compiled = once(way).right(mesh, fixed=Fixed(machine=AT_ONCE), **options)
    assert_divided(compiled, options.get("experts", "ep"))


def assert_divided(compiled: Compiled, axis: str) -> None:
    layouts = {entry.name: str(record(node).layout) for node, entry in compiled.program.parameters()}
    names = [name for name in layouts if name.rpartition("mixed.")[2][2:].startswith(("experts.", "up", "down"))]
    assert len(names) >= 4 and all(axis in layouts[name] for name in names), layouts


BESIDE = [way for way in (*SORTED, *ROOMS, ways.counted, variants.makemoe) if way not in {case[0] for case in CASES}]


@pytest.mark.parametrize("way", BESIDE, ids=lambda way: way.__name__)
def test_experts_of_all_layers_are_divided(way: Way) -> None:
    """Of those that no step above has."""
    assert_divided(once(way).compiled("ep=2"), "ep")


@pytest.mark.parametrize("way", COUPLED, ids=lambda way: way.__name__)
def test_a_capacity_of_the_whole_batch_goes_with_no_micro_batches(way: Way) -> None:
    """Under no schedule: what a layer does with its rows waits for all of them, and so does the layer behind it."""
    with pytest.raises(CoupledError) as error:
        once(way).compiled("pp=2,ep=2", microbatches=2, schedule="gpipe")
    assert "a mixture whose experts have a capacity" in str(error.value) and "Use microbatches=1" in str(error.value)


def test_rows_and_sums_in_short_floats() -> None:
    for way in (variants.unique, variants.tec):
        report = verify(model_of(way), "dp=2,ep=2", batch=tokens(), precision="bf16", dtype=torch.float32)
        assert report.ok, report
