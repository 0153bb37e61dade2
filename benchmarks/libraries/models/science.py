"""Operators, spikes, metrics, differential equations, Gaussian processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.libraries.case import ROWS, Case, Table, convolutions, image, sequence
from benchmarks.libraries.models.vision_more import _own


def _operator(name: str) -> Case:
    from neuralop import models

    if name == "FNO":
        return Case(
            models.FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2), (image(16, 1),)
        )
    if name == "TFNO":
        model = models.TFNO(
            n_modes=(4, 4),
            in_channels=1,
            out_channels=1,
            hidden_channels=8,
            n_layers=2,
            factorization="tucker",
            rank=0.5,
        )
        return Case(model, (image(16, 1),))
    model = models.UNO(
        in_channels=1,
        out_channels=1,
        hidden_channels=8,
        n_layers=3,
        uno_out_channels=[8, 8, 8],
        uno_n_modes=[[4, 4]] * 3,
        uno_scalings=[[1.0, 1.0]] * 3,
    )
    return Case(model, (image(16, 1),))


def _spiking() -> Case:
    import snntorch as snn

    class Spiking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.leaky, self.out = nn.Linear(32, 16), snn.Leaky(beta=0.9), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            memory, found = self.leaky.init_leaky(), []
            for step in range(x.shape[1]):
                spikes, memory = self.leaky(self.first(x[:, step]), memory)
                found.append(self.out(spikes))
            return torch.stack(found, 1)

    return Case(Spiking(), (sequence(4),))


METRICS = (
    "ContrastiveLoss",
    "TripletMarginLoss",
    "NTXentLoss",
    "SupConLoss",
    "MultiSimilarityLoss",
    "CircleLoss",
    "ArcFaceLoss",
    "CosFaceLoss",
    "ProxyAnchorLoss",
    "NormalizedSoftmaxLoss",
)


def _metric(name: str) -> Case:
    from pytorch_metric_learning import losses

    options = {"num_classes": 4, "embedding_size": 16} if name in METRICS[6:] else {}

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.loss = nn.Linear(32, 16), getattr(losses, name)(**options)

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return self.loss(self.inner(x), labels)

    return Case(Embedded(), (torch.randn(ROWS, 32), torch.arange(ROWS) % 4), _own)


def _ode(method: str) -> Case:
    from torchdiffeq import odeint

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

        def forward(self, time: Tensor, y: Tensor) -> Any:
            return self.inner(y)

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = Field()

        def forward(self, y: Tensor) -> Any:
            return odeint(self.field, y, torch.linspace(0.0, 1.0, 4), method=method)

    return Case(Ode(), (torch.randn(ROWS, 4),))


def _gp() -> Case:
    import gpytorch

    class Approximate(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.randn(6, 2)
            strategy = gpytorch.variational.VariationalStrategy(
                self, points, gpytorch.variational.CholeskyVariationalDistribution(6)
            )
            super().__init__(strategy)
            self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    return Case(Approximate(), (torch.randn(ROWS, 2),), _mean)


def _mean(model: nn.Module, x: Tensor) -> Any:
    return model(x).mean.square().mean()


def _kan() -> Case:
    from kan import KAN

    return Case(KAN(width=[4, 5, 1], grid=3, k=3, auto_save=False, symbolic_enabled=False), (torch.randn(ROWS, 4),))


def _positions(name: str) -> Case:
    import positional_encodings.torch_encodings as encodings

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.places = nn.Linear(32, 32), getattr(encodings, name)(32)

        def forward(self, x: Tensor) -> Any:
            y = self.inner(x)
            return y + self.places(y)

    shape = (ROWS, 8, 32) if "1D" in name else (ROWS, 4, 4, 32)
    return Case(Placed(), (torch.randn(shape),))


def _wavelet() -> Case:
    from pytorch_wavelets import DWTForward

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.waves = convolutions(nn.Conv2d, 3), DWTForward(J=2, wave="db1", mode="zero")

        def forward(self, x: Tensor) -> Any:
            return self.waves(self.before(x))

    return Case(Waves(), (image(16),))


def _sru() -> Case:
    from sru import SRU

    return Case(SRU(16, 16, num_layers=1), (torch.randn(6, ROWS, 16),))


TABLE: Table = {
    "neuraloperator": {name: partial(_operator, name) for name in ("FNO", "TFNO")},
    "snntorch": {"leaky": _spiking},
    "pytorch-metric-learning": {name: partial(_metric, name) for name in METRICS},
    "torchdiffeq": {method: partial(_ode, method) for method in ("euler", "rk4", "dopri5")},
    "gpytorch": {"variational": _gp},
    "pykan": {"kan": _kan},
    "positional-encodings": {
        name: partial(_positions, name) for name in ("PositionalEncoding1D", "PositionalEncoding2D")
    },
    "pytorch-wavelets": {"dwt": _wavelet},
    "sru": {"sru": _sru},
}
