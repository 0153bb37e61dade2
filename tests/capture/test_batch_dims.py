"""Which dim of each tensor counts samples, as users say it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_cases import ENCODER, LSTM, Local
from torch import Tensor

import autopar
from autopar.capture.inputs.batch_dims import dims_of, parameter_names, spelled
from autopar.capture.inputs.containers import take_call_apart
from autopar.errors import BatchError, PlanError
from autopar.ir.program import record
from autopar.machines import named
from autopar.planning.jobs import layers_of
from autopar.report.inspection import batch_text

X, V, S = torch.ones(4, 6), torch.ones(4), torch.tensor(1.0)


class Box:
    def __init__(self) -> None:
        self.x, self.y, self.name = X, V, "a name"


def _function(model: object, a: object, b: object = None, *, c: object = None) -> None: ...


@pytest.mark.parametrize(
    ("said", "args", "kwargs", "dims"),
    [
        (0, (X, V, S), {}, (0, 0, None)),
        (-1, (X, V), {}, (1, 0)),
        ((1, None), (X, V), {}, (1, None)),
        ([1, 0], (X,), {"b": V}, (1, 0)),
        ({"a": 1, "b": None}, (X,), {"b": V}, (1, None)),
        ({"a": 1, "c": 0}, (X,), {"c": V}, (1, 0)),
        (({"x": 1, "y": 0},), ({"x": X, "y": V},), {}, (1, 0)),
        (({"x": 1},), ({"x": X, "n": 3, "s": S},), {}, (1, None, None)),
        ((0, (1, 0)), (X, [X.clone(), V]), {}, (0, 1, 0)),
        ((0, 1), (X, [X.clone(), X.clone()]), {}, (0, 1, 1)),
        (({"x": 1, "y": 0},), (Box(),), {}, (1, 0, None)),
        ((None,), (X,), {}, (None,)),
        ({"a": 1, "b": 0, "c": 0}, (X,), {}, (1,)),  # left out of this call
        ((1, 0, 0), (X,), {}, (1,)),
    ],
)  # fmt: skip
def test_what_is_said_of_arguments_is_of_their_tensors(
    said: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[int | None, ...]
) -> None:
    parts = take_call_apart(args, kwargs)
    assert dims_of(said, parts, parameter_names(_function, behind=1)) == dims


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ((2, 0), "batch_dims[0] is dim 2, and argument 0 [4, 6] has 2 dims."),
        ((0, 0, 0), "it has 3 entries, and the call 2 arguments."),
        ({"a": 0, "bb": 0}, "the call has no argument 'bb'. Do you mean 'b'?"),
        ({"a": 0}, "nothing is said of argument 1 [4]."),
        ((0, (0,)), "batch_dims[1] is (0,), and argument 1 [4] is one tensor."),
        (1, "batch_dims=1 is dim 1, and argument 1 [4] has 1 dims."),
    ],
)
def test_what_does_not_fit_is_said_with_what_may_be_meant(said: Any, fault: str) -> None:
    with pytest.raises(BatchError) as error:
        dims_of(said, take_call_apart((X, V), {}), ("a", "b"))
    lines = str(error.value).split("\n")
    assert lines[0] == f"batch_dims={said!r} does not fit the arguments:" and f"  {fault}" in lines
    assert lines[-1] == "By the shapes it may be batch_dims=(0, 0)."


@pytest.mark.parametrize("value", [True, "x", (0, "x"), {"a": 1.0}])
def test_what_is_no_dim_is_refused(value: Any) -> None:
    with pytest.raises(BatchError, match="write a dim, or a tuple or dict of dims by argument"):
        autopar.StepOptions(batch_dims=value)


def test_dims_are_spelled_as_they_are_written() -> None:
    assert (
        spelled(take_call_apart((X, {"x": X.clone(), "y": V}), {}), (0, 1, None))
        == "batch_dims=(0, {'x': 1, 'y': None})"
    )
    assert spelled(take_call_apart((X,), {}), (0,)) == "batch_dims=(0,)"
    assert spelled(take_call_apart((), {"x": X, "y": V}), (0, None)) == "batch_dims={'x': 0, 'y': None}"


@pytest.mark.parametrize("case", [LSTM, ENCODER])
def test_dp_splits_the_dim_that_was_said(case: Local) -> None:
    assert case.loss is not None
    options: Any = {"loss_fn": lambda *call: case.loss(*call)[0], "batch": case.batch, "batch_dims": case.said}
    compiled = autopar.compile(case.make().double(), "dp=2", **options)
    layouts = [str(record(node).layout) for node, entry in compiled.program.entries if entry.kind == "batch"]
    assert all(layout.startswith("[-,dp") for layout in layouts)
    moved = {row.op for row in compiled.collectives if row.phase == "forward"}
    assert moved <= {"all_reduce"}  # of sums
    shown = batch_text(compiled).split("\n")
    assert [line.split("  ")[-1].strip() for line in shown] == ["dim 1 counts samples"] * 2


def test_dp_verifies_with_the_dim_that_was_said() -> None:
    options: Any = {"loss_fn": LSTM.loss, "batch": LSTM.batch, "batch_dims": LSTM.said, "microbatches": 2}
    assert autopar.verify(LSTM.make().double(), "dp=2", **options).ok


def test_a_plan_takes_no_dims() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).sum()

    job = autopar.Job(model=torch.nn.Linear(6, 4), loss_fn=loss, batch=(X,), batch_dims=1)
    with pytest.raises(PlanError) as error:
        layers_of(job, named("cpu"))
    assert str(error.value) == (
        "batch_dims=1: a plan tries other numbers of samples, which it takes for dim 0 of the batch's tensors. Leave "
        "batch_dims out, or write a mesh in place of a plan."
    )
