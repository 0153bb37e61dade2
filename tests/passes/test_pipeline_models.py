"""Models that are no chain of layers, as pipelines: skips, encoders with decoders, shared layers, parts of losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models_special import ZOO
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.verification.verify import verify
from benchmarks.coverage import plain

MODELS = {**ZOO, **plain.MODELS}


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches", "schedule"),
    [
        ("unet", "pp=3", 2, "1f1b"),
        ("transformer", "pp=2", 3, "zb-h1"),
        ("two_losses", "pp=2,dp=3", 2, "1f1b"),
        ("custom_function", "pp=2", 3, "zb-v"),
        ("lora", "pp=3", 2, "zb-h2"),
        ("dlrm", "pp=2", 2, "1f1b"),
        ("frozen", "pp=2,tp=2", 3, "zb-h1"),
        ("unused", "pp=2", 4, "1f1b"),
        ("hf_gpt2", "pp=3", 4, "interleaved-1f1b"),
        ("llama", "pp=2,dp=3", 2, "zb-v"),
        ("gpt", "pp=2,tp=2", 6, "dualpipev"),
        ("gpt", "pp=2", 2, "0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1I1,1W1"),  # some backwards whole, some in halves
    ],
)
def test_models(name: str, mesh: str, microbatches: int, schedule: str):
    torch.manual_seed(0)
    model, loss_fn, batch = MODELS[name]()
    report = verify(model, mesh, loss_fn=loss_fn, batch=batch, microbatches=microbatches, schedule=schedule)
    assert report.ok and report.max_error < 1e-10, report


class Odd(nn.Module):
    """What a cut may come upon: a layer used on several stages, integers and booleans that cross stages, a value used
    much later, a penalty on parameters of all stages, a buffer that is read and one that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.shared = nn.Linear(8, 8)
        self.own = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x)
        first, chosen = h, h.argmax(-1)  # integers made of activations
        positive = h > 0
        for layer in self.own:
            h = torch.tanh(layer(self.shared(h)) * self.scale + self.shift)
        self.steps += 1
        late = torch.where(positive, h, first)
        return late, F.one_hot(chosen, 8).to(h) * h


def penalised(model: Odd, x: Tensor, y: Tensor) -> Tensor:
    late, picked = model(x)
    counts = (y >= 0).sum()
    errors = ((late - picked).square().sum(-1) * (y >= 0)).sum() / counts
    decay = sum(p.square().sum() for p in model.parameters())
    return errors + late.mean() + 1e-2 * decay


@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule"), [("pp=4", 3, "1f1b"), ("pp=2,dp=2", 2, "zb-v"), ("pp=3", 1, "zb-h1")]
)
def test_what_a_cut_may_come_upon(mesh: str, microbatches: int, schedule: str):
    torch.manual_seed(0)
    x = torch.randint(0, 10, (12, 5))
    y = torch.randint(-1, 2, (12, 5))
    y[:3] = -1
    report = verify(Odd(), mesh, loss_fn=penalised, batch=(x, y), microbatches=microbatches, schedule=schedule)
    assert report.ok, report


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_checkpointed_regions(stages: int):
    """Also where a cut goes through one."""

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    torch.manual_seed(0)
    report = verify(Recomputed(), f"pp={stages}", loss_fn=loss_fn, batch=torch.randn(6, 8), microbatches=3)
    assert report.ok, report


def test_layers_used_by_several_stages():
    """A shared layer lies on the first stage that uses it; its weight goes to the others once a step."""

    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = torch.tanh(self.layer(x))
            return self.head(x)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum()

    torch.manual_seed(0)
    batch = torch.randn(8, 8)
    report = verify(Looped(), "pp=3", loss_fn=loss_fn, batch=batch, microbatches=4, schedule="zb-h1")
    assert report.ok, report
