"""The gradients of a layer, whichever of its weights are frozen, and whether its input has a gradient."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

CHANNELS = 6
Make = Callable[[], nn.Module]


class Norm(nn.Module):
    """A function of torch with a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.rand(*shape) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class First(nn.Module):
    """The first of what a layer gives, of the same rows by another order of dims."""

    def __init__(self, layer: nn.Module, is_attention: bool = False) -> None:
        super().__init__()
        self.layer, self.is_attention = layer, is_attention

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return self.layer(*[x] * (3 if self.is_attention else 1))[0].transpose(1, 2)


LAYERS: dict[str, Make] = {
    "convolution": lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1),
    "groups": lambda: nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1, groups=2),
    "transposed": lambda: nn.ConvTranspose1d(CHANNELS, CHANNELS, 3, padding=1),
    "layer norm": lambda: nn.LayerNorm(5),
    "layer norm, no bias": lambda: nn.LayerNorm(5, bias=False),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
    "instance norm": lambda: nn.InstanceNorm1d(CHANNELS, affine=True),
    "instance norm, tracked": lambda: nn.InstanceNorm1d(CHANNELS, affine=True, track_running_stats=True),
    "batch norm": lambda: nn.BatchNorm1d(CHANNELS),
    "batch norm, evaluation": lambda: nn.BatchNorm1d(CHANNELS).eval(),
    "rms norm": lambda: Norm(lambda x, weight: F.rms_norm(x, (5,), weight), 5),
    "prelu": lambda: nn.PReLU(CHANNELS),
    "linear": lambda: nn.Linear(5, 5),
    "rnn": lambda: First(nn.RNN(CHANNELS, CHANNELS, batch_first=True)),
    "attention": lambda: First(nn.MultiheadAttention(CHANNELS, 2, batch_first=True), True),
}


class Model(nn.Module):
    def __init__(self, make: Make, has_grad: bool, frozen: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Conv1d(CHANNELS, CHANNELS, 1) if has_grad else nn.Identity()
        self.layer, self.after = make(), nn.Linear(5 * CHANNELS, 3)
        for name, parameter in self.layer.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x)).flatten(1))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.mark.parametrize("name", LAYERS)
def test_every_combination(name: str) -> None:
    names = [each for each, _ in LAYERS[name]().named_parameters()]
    subsets = list(chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)))
    x, y = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, CHANNELS, 5), (4, 3)))
    for frozen in subsets if len(names) < 3 else [(), names[:1], names[1:]]:
        for has_grad in (True, False):
            model = Model(LAYERS[name], has_grad, tuple(frozen)).double()
            report = autopar.verify(model, "dp=2,tp=2", loss_fn=loss, batch=(x, y))
            assert report.ok, (frozen, has_grad, report)
