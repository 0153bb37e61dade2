"""Values of parameters alone and of the batch alone, in pipelines, micro-batches and ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import share
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from verified import verified

from autopar.api import compile
from autopar.errors import VerificationError
from autopar.ir.check.check_levels import verify_pipeline
from autopar.ir.program import record, set_record

WIDTH = 12
Penalty = Callable[[nn.Module], Tensor]


class Net(nn.Module):
    def __init__(self, penalty: Penalty) -> None:
        super().__init__()
        self.up, self.down, self.penalty = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), penalty

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean() + 0.1 * self.penalty(self)


class Adapted(nn.Module):
    """AdaLoRA: low-rank factors, in several layers, which a penalty keeps orthogonal."""

    def __init__(self, penalised: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4, WIDTH))
        self.penalised = penalised

    def forward(self, x: Tensor) -> Tensor:
        gram = self.a.T @ self.a
        weight = self.a @ gram @ self.b
        for layer in self.layers:
            x = torch.tanh(layer(x) + x @ weight)
        loss = x.square().mean()
        return loss + 0.1 * (gram - torch.eye(4)).square().sum() if self.penalised else loss


class OfTheBatch(nn.Module):
    """A product of the inputs alone, as e3nn's, which every layer reads; and its sum over the batch, if counted."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.counted = counted

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.unsqueeze(-1) @ x.unsqueeze(-2)
        scale = pairs.abs().sum() if self.counted else 1.0
        for layer in self.layers:
            x = torch.tanh((pairs @ layer(x).unsqueeze(-1)).squeeze(-1) / scale)
        return x.square().mean()


class Normed(nn.Module):
    """A weight that is made of parameters at each step, and for spectral_norm buffers too."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


class Flow(nn.Module):
    """normflows: weights of triangular factors, whose determinant each sample has a part of: its gradient, and that of
    the product, read the same gathered parameter when all micro-batches are done, one by way of the other."""

    def __init__(self, of_twice: bool) -> None:
        super().__init__()
        self.lower, self.upper = (nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in range(2))
        self.diagonal, self.down, self.of_twice = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH), of_twice

    @property
    def size(self) -> Tensor:
        return F.softplus(self.diagonal) + 1e-3

    def forward(self, x: Tensor) -> Tensor:
        lower, upper = self.lower.tril(-1) + torch.eye(WIDTH), self.upper.triu(1) + torch.diag(self.size)
        y = F.linear(F.linear(x, upper), lower)
        y = y + F.linear(x, (upper @ lower).exp()) if self.of_twice else y
        return (self.down(y.tanh()).square().sum(1) - self.size.log().sum() * y.new_ones(len(y))).mean()


def orthogonal(model: nn.Module) -> Tensor:
    weight = model.up.weight
    return (weight @ weight.T - torch.eye(WIDTH)).norm()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decay": lambda: Net(lambda model: sum(p.square().sum() for p in model.parameters())),
    "norms": lambda: Net(lambda model: sum(p.norm() for p in model.parameters())),
    "lasso": lambda: Net(lambda model: sum(p.abs().sum() for p in model.parameters())),
    "orthogonal": lambda: Net(orthogonal),
    "largest": lambda: Net(lambda model: model.up.weight.abs().max()),
    "adalora": lambda: Adapted(True),
    "low rank": lambda: Adapted(False),
    "of the batch": lambda: OfTheBatch(False),
    "of the batch, counted": lambda: OfTheBatch(True),
    "weight_norm": lambda: Normed(parametrizations.weight_norm),
    "spectral_norm": lambda: Normed(parametrizations.spectral_norm),
    "flow": lambda: Flow(False),
    "flow, in a product": lambda: Flow(True),
}  # fmt: skip

STEPS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "ZeRO-3": (("dp=2,tp=2", "dp=3", "dp=2,tp=3"), {"zero": 3}),
    "ZeRO-3 and micro-batches": (("dp=2,tp=2", "dp=2"), {"zero": 3, "microbatches": 3}),
    "all at once": (("dp=2,tp=2",), {"zero": 3, "microbatches": 3, "recompute": "full"}),
    "stages": (("pp=2,dp=2", "pp=2,tp=3"), {"microbatches": 3}),
    "more stages": (("pp=3",), {"microbatches": 2, "schedule": "zb-h1"}),
    "stages with ZeRO-3": (("pp=2,dp=2",), {"microbatches": 3, "zero": 3}),
}


@pytest.mark.parametrize(("name", "steps"), list(share(3, MODELS, STEPS)))
def test_the_numbers_are_those_of_one_device(name: str, steps: str) -> None:
    torch.manual_seed(0)
    meshes, options = STEPS[steps]
    verified(MODELS[name](), meshes, None, (torch.randn(WIDTH, WIDTH),), **options)


def test_a_penalty_is_gathered_once_more_and_late() -> None:
    """Not kept through all micro-batches: the epilogue gathers each weight anew, the product of it is made there."""
    found = compile(MODELS["orthogonal"](), "dp=2", batch=torch.randn(WIDTH, WIDTH), zero=3, microbatches=3)
    assert found.pipeline is not None
    late, early = _calls(found, "E"), [*_calls(found, "P"), *_calls(found, "F"), *_calls(found, "B")]
    assert [node for node in late if "all_gather" in node.name]
    calls = [node for node in found.program.calls() if record(node).flops]
    penalty = [node.name for node in calls if record(node).source == _line(orthogonal)]
    assert set(penalty) & {node.name for node in late} and not set(penalty) & {node.name for node in early}


def _line(function: Callable[..., Any]) -> str:
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + 2}"


def _calls(found: Any, kind: str) -> list[Any]:
    return [node for key, graph in found.pipeline.graphs.items() if key[1] == kind for node in graph.calls()]


def test_a_product_of_stages_is_still_computed_once() -> None:
    """Test the tester: the graph of a stage that stands in twice is noticed."""
    found = compile(MODELS["low rank"](), "pp=2", batch=torch.randn(WIDTH, WIDTH), microbatches=3)
    assert found.pipeline is not None
    graphs = dict(found.pipeline.graphs)
    graphs[2, "F"] = graphs[1, "F"]
    with pytest.raises(VerificationError, match=r"is computed in graphs \(1, 'F'\) and \(2, 'F'\)"):
        verify_pipeline(found.pipeline.with_(graphs=graphs), found.program)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ((0, "F"), "products that no graph of the pipeline computes: "), ((1, "F"), "products that no graph"),
        ((0, "E"), r"leaves on ranks \[1?\] of the pipeline, not on \[0"),
        ((1, "E"), r"leaves on ranks \[0\] of the pipeline, not on \[0, 1"),
    ],
)  # fmt: skip
def test_a_graph_that_is_lost_is_noticed(key: tuple[int, str], message: str) -> None:
    found = compile(MODELS["low rank"](), "pp=2", batch=torch.randn(WIDTH, WIDTH), microbatches=3)
    assert found.pipeline is not None
    graphs = {one: graph for one, graph in found.pipeline.graphs.items() if one != key}
    with pytest.raises(VerificationError, match=message):
        verify_pipeline(found.pipeline.with_(graphs=graphs), found.program)


def test_graphs_of_a_pipeline_keep_what_programs_do() -> None:
    found = compile(MODELS["low rank"](), "pp=2", batch=torch.randn(WIDTH, WIDTH), microbatches=3)
    assert found.pipeline is not None
    node = next(iter(found.pipeline.graphs[1, "F"].calls()))
    set_record(node, record(node).with_(layouts=()))
    with pytest.raises(VerificationError, match="1 results, but 0 layouts"):
        verify_pipeline(found.pipeline, found.program)
