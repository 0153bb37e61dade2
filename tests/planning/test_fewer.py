"""Further sizes are captured of a model with fewer layers, where that is the same step."""

from __future__ import annotations

import pytest
import torch
from models import Llama, token_loss
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.ir.options import StepOptions
from autopar.machines import named
from autopar.planning.jobs import layers_of_call
from autopar.planning.shallow.captures import KEPT, LEAST_ROWS, Captures
from autopar.planning.shallow.depth import shallow
from autopar.planning.shallow.fewer import is_same, with_fewer

LAYERS = 12


def captures(model: nn.Module, loss_fn: object, *batch: Tensor) -> Captures:
    made = layers_of_call(model, loss_fn, batch, {}, StepOptions(), named("h100-80g"))  # type: ignore[arg-type]
    return made.micros.captures


def llama() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Llama(LAYERS, 64, 8, 4, 48, 96, 16), torch.empty(2, 16, dtype=torch.int64)


def test_it_is_the_step_of_the_whole_model() -> None:
    model, ids = llama()
    found, before = captures(model, token_loss, ids, ids), [name for name, _ in model.named_parameters()]
    whole = shallow(found.capture(16).program, KEPT)
    assert whole is not None and is_same(found.shallow(16).program, whole.program)
    assert found._source is not found.capture, "it was captured of the whole model"
    assert len(found.captured(16).program.inputs) < len(found.whole.program.inputs)
    assert found.shallow(LEAST_ROWS).layers == found.shallow(16).layers == whole.layers == LAYERS
    assert [name for name, _ in model.named_parameters()] == before


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counts":
            for i in range(LAYERS):
                x = self.layers[i](x)
            return x
        for layer in self.layers:
            x = layer(x)
            x = x * 2 if self.kind == "rows" and x.shape[0] > 4 and layer is self.layers[2] else x
        return x / len(self.layers) if self.kind == "divides" else x


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize(("kind", "is_smaller"), [("plain", True), ("counts", False), ("divides", False)])
def test_a_model_that_knows_its_depth_is_captured_whole(kind: str, is_smaller: bool) -> None:
    found = captures(Stack(kind), square, torch.empty(4, 8, device="meta"))
    assert (found._source is not found.capture) == is_smaller
    assert found.shallow(LEAST_ROWS).layers == found.shallow(8).layers == LAYERS - 1, (
        "the first one has no gradient of its input"
    )
    assert is_same(found.shallow(LEAST_ROWS).program, shallow(found.whole.program, KEPT).program)  # type: ignore[union-attr]


def test_no_model_where_it_would_not_pay() -> None:
    model, ids = llama()
    whole = shallow(captures(model, token_loss, ids, ids).whole.program, 8)
    assert whole is not None and with_fewer(model, whole) is None


def test_layers_that_are_equal_at_few_rows_alone_are_refused() -> None:
    found = captures(Stack("rows"), square, torch.empty(4, 8, device="meta"))
    assert found.shallow(4).layers == LAYERS - 1
    with pytest.raises(PlanError, match=r"'layers' are equal in a step of 2 rows and not in one of 8"):
        found.shallow(8)
