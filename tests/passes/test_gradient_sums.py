"""Every sum of gradients is in `reduce_dtype`, with ZeRO and without, and `verify` says so if one is not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from test_precision import BF16, F32, gpt, llama

import autopar
from autopar.compiled import Compiled
from autopar.ir.measure import local_type
from autopar.ir.program import CAST, operand_nodes, record
from autopar.verification.sums import sums_of_gradients, wrong_sums

ASKED = [
    ({"precision": "bf16"}, F32),
    ({"precision": "fp16"}, F32),
    ({"precision": "bf16", "reduce_dtype": BF16}, BF16),
    ({"reduce_dtype": BF16}, BF16),
]


def compiled(mesh: str, case: Any = gpt, **options: Any) -> Compiled:
    model, loss_fn, batch = case()
    return autopar.compile(model, mesh, loss_fn=loss_fn, batch=batch, **options)


def dtypes(found: Compiled) -> set[torch.dtype]:
    return {record(operand_nodes(node)[0]).type.dtype for node in sums_of_gradients(found.program)}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("options", "dtype"), ASKED)
def test_gradients_are_summed_in_reduce_dtype(options: dict[str, Any], dtype: torch.dtype, stage: int) -> None:
    """All of them, by the bytes: a sum that is not found is no sum in the right dtype."""
    found = compiled("dp=2", zero=stage, **options)
    rows = [row for row in found.collectives if row.phase == "backward" and row.shape and row.op != "all_gather"]
    assert {row.dtype for row in rows} == dtypes(found) == {dtype}
    parameters = sum(p.numel() for p in gpt()[0].parameters())
    assert sum(row.bytes for row in rows) == parameters * dtype.itemsize, "each gradient once, in a bucket"
    sums = [local_type(operand_nodes(node)[0], found.mesh) for node in sums_of_gradients(found.program)]
    assert sum(one.bytes_ for one in sums) == parameters * dtype.itemsize


@pytest.mark.parametrize("case", [gpt, llama])
@pytest.mark.parametrize(("mesh", "axis"), [("dp=2,tp=2", "dp"), ("pp=2,fsdp=2", "fsdp")])
@pytest.mark.parametrize(("options", "dtype"), ASKED[::2])
def test_on_more_axes_and_over_micro_batches(
    options: dict[str, Any], dtype: torch.dtype, mesh: str, axis: str, case: Any
) -> None:
    found = compiled(mesh, case, zero=3, microbatches=2, **options)
    assert {node.args[1] for node in sums_of_gradients(found.program)} == {"mb", axis}
    assert dtypes(found) == {dtype}
    assert wrong_sums(found) == ()


def test_verify_sees_a_sum_in_the_wrong_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are within a rounding of bf16: only the programs tell."""

    def before_the_cast(self: Any, node: Any) -> bool:
        is_cast = node.target is CAST and len(self.leaving.get(node, ())) == 1
        return is_cast and self._is_partial(node.all_input_nodes[0])

    zero = importlib.import_module("autopar.passes.zero")  # the package has the function under this name
    monkeypatch.setattr(zero._Zero, "_is_late", before_the_cast)
    model, loss_fn, batch = gpt()
    found = autopar.verify(model, "dp=2", loss_fn=loss_fn, batch=batch, precision="bf16", zero=3, steps=1)
    assert all(row.ok for row in found.rows)
    assert not found.ok
    assert "sums gradients over 'dp' in bf16, but reduce_dtype is f32" in found.sums[0]
    assert f"WRONG: {found.sums[0]}" in str(found)


def test_verify_has_nothing_to_say_of_right_sums() -> None:
    model, loss_fn, batch = gpt()
    found = autopar.verify(model, "dp=2", loss_fn=loss_fn, batch=batch, precision="bf16", zero=3, steps=1)
    assert found.ok
    assert found.sums == ()
