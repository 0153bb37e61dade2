"""`explain` speaks of the search that ran: what it says of every value is what the program has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from custom_op_kernels import scale
from experts import experts_case
from gpt import GPT, GPTConfig
from models import mlp, square_loss
from torch import Tensor, nn
from train_gpt import loss_fn

import autopar
from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.compile import lower
from autopar.custom_ops.registry import CUSTOM_OPS
from autopar.errors import ValueNameError
from autopar.ir.layout import Layout
from autopar.ir.mesh import parse_mesh
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.passes.rules.states import states_of
from autopar.passes.search.explain import CHOSEN, SIZE, Decision, _Question
from autopar.report.explanation import _Finder

SAMPLES = 6


class Scaled(nn.Module):
    """An op of the user's own between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.w = nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(scale(self.up(x), self.w))
        return out


@pytest.fixture
def with_own_op() -> Iterator[None]:
    known = dict(CUSTOM_OPS.rules)
    autopar.register_rule("own_tests::scale", "... h, h -> ... h", linear=["x", "w"])
    yield
    CUSTOM_OPS.rules.clear()
    CUSTOM_OPS.rules.update(known)


def gpt(mesh: str, rows: int = 8, **options: Any) -> Compiled:
    model = GPT(GPTConfig(vocabulary=64, context=8, layers=1, heads=2, width=16))
    x = torch.zeros(rows, 8, dtype=torch.long)
    return autopar.compile(model, mesh, loss_fn=loss_fn, batch=(x, x), **options)


def of_mlp(mesh: str, **options: Any) -> Compiled:
    model, loss, batch = mlp()
    return autopar.compile(model, mesh, loss_fn=loss, batch=batch, **options)


def experts(way: str) -> Compiled:
    model, batch = experts_case(way)
    return autopar.compile(model, "dp=2,tp=2", loss_fn=square_loss, batch=batch)


def own() -> Compiled:
    return autopar.compile(
        Scaled(), "dp=2,tp=2", loss_fn=square_loss, batch=(torch.randn(4, 3, 8), torch.randn(4, 3, 8))
    )


def uneven() -> Compiled:
    model, loss, (x, y) = mlp()
    captured = capture(model, loss, (x[:5], y[:5]), {})
    return Compiled.of(lower(captured, parse_mesh("dp=2,tp=2"), fixed=Fixed(uneven=True)))


CASES: dict[str, Callable[[], Compiled]] = {
    "mlp": lambda: of_mlp("dp=2,tp=2"),
    "gpt in bf16": lambda: gpt("dp=2,tp=2", precision="bf16", reduce_dtype=torch.bfloat16),
    "sequence parallel": lambda: gpt("dp=2,tp=2", sequence_parallel=True),
    "micro-batches": lambda: of_mlp("dp=2,tp=2", microbatches=2),
    "uneven batch": uneven,
    "a pinned layout": lambda: of_mlp("dp=2,tp=2", shard={"0.weight": "[-,tp]"}),
    "experts": lambda: experts("sort"),
    "experts whose order shows": lambda: experts("running"),
    "an op of the user's own": own,
}


def chosen_of(decision: Decision) -> Layout:
    (layout,) = [one.layout for one in decision.alternatives if one.verdict == CHOSEN]
    return layout


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("with_own_op")
def test_what_is_explained_is_what_the_program_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every captured value has its node or an error of ours; some of them are asked for the states of their axes."""
    monkeypatch.setattr(_Question, "_states", lambda self: [self.chosen])  # no prices of others: they take long
    compiled = CASES[name]()
    sharded, finder = dict(compiled.history)["propagate"], _Finder(compiled)
    axes = [axis for axis, size in sharded.mesh.axes if size > 1]
    values = [node.name for node in compiled.history[0][1].graph.nodes if node.op != "output"]
    found = {}
    for value in values:
        try:
            found[value] = finder.node(value)
        except ValueNameError as error:
            assert "was left out by" in str(error) and value not in finder.layouts
    assert all(node.name == value for value, node in found.items() if value in finder.layouts)
    tensors = [value for value, node in found.items() if record(node).is_tensor]
    for value in [*tensors[:: len(tensors) // SAMPLES], tensors[-1]]:
        decisions = compiled.explain(f"%{value}").decisions
        layout = record(finder.layouts[found[value].name]).layout
        states = states_of(layout, sharded.mesh)
        assert [one.axis for one in decisions] == axes
        for one in decisions:
            assert states_of(chosen_of(one), sharded.mesh).get(one.axis) == states.get(one.axis), (value, str(layout))


def test_a_batch_that_an_axis_cannot_divide() -> None:
    decision = CASES["uneven batch"]().explain("0.weight").decisions[0]
    assert (decision.axis, decision.state, decision.by) == ("dp", "replicated", SIZE)
    assert decision.because == "'dp' cannot divide this batch: every rank computes all of it"


def test_what_a_pass_left_out() -> None:
    with pytest.raises(ValueNameError, match="%sort was left out by unsort: no program computes it"):
        CASES["experts"]().explain("%sort")
    weight = CASES["experts"]().explain("up")
    assert "f32[4,12,12] of [4,12,24]" in weight.head
