"""Who shares the memory of a parameter from before `parallelize`, and does not follow it, is told."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Ranks
from test_identity import X, loss_fn, net, parallel
from torch import nn
from torch.nn.utils import parametrizations

import autopar
from autopar.errors import AutoparError


class Named(nn.Parameter):
    def hello(self) -> int:
        return 3


def _flat(model: nn.Sequential) -> Any:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view_as(p)
    return flat


def _flat_gradients(model: nn.Sequential) -> Any:
    """As libraries have it that add gradients up in one buffer."""
    flat = torch.zeros(10, dtype=torch.float64)
    model[0].bias.grad = flat[:6]
    return flat


OF_ALL = "'0.weight', '0.bias', '1.weight' and 1 more"
HELD: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    ".data": (lambda model: [p.data for p in model.parameters()], OF_ALL),
    ".detach()": (lambda model: model[1].weight.detach(), "'1.weight'"),
    "a view": (lambda model: model[1].weight[0], "'1.weight'"),
    "a flat buffer": (_flat, OF_ALL),
    "a state dict": (lambda model: model.state_dict(), OF_ALL),
    "a buffer of gradients": (_flat_gradients, "'0.bias.grad'"),
    "numpy": (lambda model: model[0].bias.detach().numpy(), "'0.bias'"),
}


@pytest.mark.parametrize("name", HELD)
def test_who_shares_the_memory_of_a_parameter_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    hold, names = HELD[name]
    model = net()
    held = hold(model)
    with caplog.at_level(logging.WARNING, "autopar"):
        parallel(model)
    assert caplog.messages == [
        f"other tensors share the memory of {names} (.data, .detach(), a view, a flat buffer, a state_dict()): they "
        f"were made before autopar.parallelize, and keep the values of then. Hold parameters themselves, or take them "
        f"after it."
    ]
    del held


def _cached(model: nn.Sequential) -> None:
    model[0].cache = model[1].weight.detach()  # type: ignore[assignment]


def _cached_buffer(model: nn.Sequential) -> None:
    model[0].register_buffer("cache", model[1].weight.data)


def verified(model: nn.Sequential) -> None:
    autopar.verify(model, "dp=2", loss_fn=loss_fn, batch=X)


def test_what_the_model_keeps_of_a_parameter_is_refused() -> None:
    """It would follow where each rank has the whole parameter alone. verify refused none of it before."""
    cases = (_cached, "'0.cache', which the model keeps,"), (_cached_buffer, "the buffer '0.cache'")
    for (cache, what), use in itertools.product(cases, (parallel, verified)):
        model = net()
        cache(model)
        with pytest.raises(AutoparError) as caught:
            use(model)
        assert str(caught.value) == (
            f"{what} lies in the memory of the parameter '1.weight': of a parallel one it would keep the values of "
            f"before the first step. Read the parameter itself in forward (1.weight.detach()); or, if the values of "
            f"now are meant, keep a copy: .detach().clone()."
        )


def test_a_class_of_parameters_that_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    model[1].bias = Named(model[1].bias.detach())
    parallel(model)
    assert caplog.messages == [
        "'1.bias': what is parallel is no Named any more. It keeps its attributes, but not the methods of that class."
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_nothing_is_told_of_usual_models(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), nn.utils.spectral_norm(nn.Linear(6, 6)), nn.utils.weight_norm(nn.Linear(6, 6)),
        parametrizations.spectral_norm(nn.Linear(6, 6)), parametrizations.weight_norm(nn.Linear(6, 6)),
        nn.BatchNorm1d(6), nn.MultiheadAttention(6, 2), nn.LSTM(6, 6),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    loss = nn.Sequential(model[0], model[1])(torch.ones(2, 6)).sum()
    loss.backward()
    parallel(model)
    assert caplog.messages == [] and len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


class Kept(logging.Handler):
    """What a rank says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _before_the_first_step(rank: int) -> list[list[str]]:
    kept, said = Kept(), []
    logging.getLogger("autopar").addHandler(kept)
    for mesh in ("fsdp=2", "auto"):
        for hold in (lambda p: p.detach(), lambda p: p.data, lambda p: p[0], lambda p: p.full_tensor()):
            kept.lines.clear()
            model = net()
            made = autopar.parallelize(model, mesh, loss_fn=loss_fn)
            held = hold(model[1].weight)
            made.forward_backward(X)
            said.append([line for line in kept.lines if "share" in line])
            del held
    logging.getLogger("autopar").removeHandler(kept)
    return said


@pytest.mark.gloo
def test_what_was_taken_before_the_first_step_is_told(two: Ranks) -> None:
    text = (
        "other tensors share the memory of '1.weight' (.data, .detach(), a view): they were made before the layout of "
        "parameters was decided, and keep the values of then. Hold parameters themselves, or take them after the first "
        "step, or after prepare()."
    )
    said, others = two.run(_before_the_first_step)
    assert said[:4] == [[text], [text], [text], []] and said[7] == [] and not any(others)
