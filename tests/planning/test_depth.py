"""A step with fewer of its equal layers is that of a less deep model."""

from __future__ import annotations

import pytest
import torch
from models import Llama, token_loss
from torch import Tensor, nn

from autopar.compiler.compile import capture_step
from autopar.ir.check.check_levels import verify
from autopar.ir.options import StepOptions
from autopar.ir.program import Level, Program, record
from autopar.planning.shallow.depth import crossing, shallow


def captured(model: nn.Module, loss_fn: object, *batch: Tensor) -> Program:
    return capture_step(model, loss_fn, batch, {}, StepOptions()).program  # type: ignore[arg-type]


def llama(layers: int) -> Program:
    with torch.device("meta"):
        ids = torch.empty(2, 16, dtype=torch.int64)
        return captured(Llama(layers, 64, 8, 4, 48, 96, 16), token_loss, ids, ids)


def lines(program: Program) -> list[tuple[str, object]]:
    return [(str(node.target), record(node).types) for node in program.calls()]


@pytest.mark.parametrize("kept", [2, 3])
def test_it_is_the_step_of_a_model_with_fewer_layers(kept: int) -> None:
    whole = llama(8)
    found = shallow(whole, kept)
    assert found is not None and found.layers == 8, "with the first, which reads embeddings, and the last"
    verify(found.program, Level.CAPTURED)
    less = llama(kept)
    assert lines(found.program) == lines(less)
    assert len(found.program.inputs) == len(less.inputs) and len(found.program.outputs) == len(less.outputs)


def test_what_one_layer_hands_to_the_next() -> None:
    found = shallow(llama(8), 2)
    assert found is not None
    (sent,) = crossing(found.program, found.border)
    assert record(sent).type.shape == (2, 16, 64)


def test_a_stack_that_is_not_deep_enough() -> None:
    assert shallow(llama(2), 2) is None
    assert shallow(llama(3), 2) is not None


class Stack(nn.Module):
    def __init__(self, widths: list[int], all_states: bool = False, far: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in widths
        )
        self.all_states, self.far = all_states, far

    def forward(self, x: Tensor) -> Tensor:
        states = [x, x]
        for layer in self.layers:
            states.append(layer(states[-1]) + (layer(states[-2]) if self.far else 0))
        return torch.stack(states).sum(0) if self.all_states else states[-1]


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_layers_that_differ_are_not_taken_for_equal() -> None:
    assert shallow(captured(Stack([16, 24] * 4), square, torch.empty(4, 8)), 2) is None
    found = shallow(captured(Stack([16] * 3 + [24] * 6), square, torch.empty(4, 8)), 2)
    assert found is not None and found.layers == 5, "with the one that reads a layer of another width"


def test_a_value_that_something_else_reads_is_in_the_way() -> None:
    assert shallow(captured(Stack([16] * 8, all_states=True), square, torch.empty(4, 8)), 2) is None


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8)) for _ in range(10)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_that_drop_out_are_equal() -> None:
    """Each has random draws of its own."""
    found = shallow(captured(Dropping(), square, torch.empty(4, 8)), 3)
    assert found is not None and found.layers >= 5
    keys = [node.args[2] for node in found.program.calls() if str(node.target) == "autopar.dropout.default"]
    assert len(keys) == 2 * len({*keys}), "forward and backward of a layer draw the same, no two layers do"
