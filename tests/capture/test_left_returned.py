"""What a run leaves in Python, and a step or an evaluation only returns: nothing is computed with it, and it counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Net(nn.Module):
    """It returns its output, and beside it what `given` gives."""

    def __init__(self, given: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.given = nn.Linear(4, 3), given
        self.mean: Any = torch.zeros(3)
        self.last: Any = None
        self.calls, self.kept, self.table = 0, dict[str, Any](), None

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return h, self.given(self, h)


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[0].square().mean()  # type: ignore[no-any-return]


def loss_and_rest(model: nn.Module, x: Tensor) -> Any:
    h, rest = model(x)
    return h.square().mean(), rest


def batch(seed: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).double()


def parallel(given: Callable[[Net, Tensor], Any], loss: Callable[..., Any] = loss_fn) -> Any:
    return autopar.parallelize(Net(given).double(), "dp=1", loss_fn=loss)


def evaluated(model: Any) -> Any:
    model.eval()
    with torch.no_grad():
        found = model(batch(1))[1]
    model.train()
    return found


def _mean(net: Net, h: Tensor) -> Any:
    if net.training:
        net.mean = h.detach().mean(0)
    return net.mean


def _last(net: Net, h: Tensor) -> Any:
    if net.training:
        net.last = h.detach()
    return None if net.training else net.last


def _shape(net: Net, h: Tensor) -> Any:
    if net.training:
        net.last = tuple(h.shape)
    return None if net.training else net.last


def _count(net: Net, h: Tensor) -> Any:
    net.calls += net.training
    return None if net.training else {"calls": net.calls}


def _text(net: Net, h: Tensor) -> Any:
    net.calls += net.training
    return None if net.training else f"epoch {net.calls}"


def _in_a_dict(net: Net, h: Tensor) -> Any:
    if net.training:
        net.kept["h"] = h.detach()
    return None if net.training else dict(net.kept)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("given", [_mean, _last, _shape, _count, _text, _in_a_dict], ids=lambda given: given.__name__)
def test_an_evaluation_may_not_return_what_training_left(given: Callable[..., Any], is_first: bool) -> None:
    model = parallel(given)
    if is_first:
        evaluated(model)  # as on one device: nothing was left yet
    model.forward_backward(batch())
    with pytest.raises(CaptureError, match=r"the model returns what another step of it .* leaves in Python, at .*\.py"):
        evaluated(model)


def _calls(net: Net, h: Tensor) -> Any:
    net.calls += 1
    return net.calls


def _before(net: Net, h: Tensor) -> Any:
    was, net.last = net.last, h.detach().mean()
    return was


@pytest.mark.parametrize("given", [_calls, _before], ids=lambda given: given.__name__)
def test_a_step_may_not_return_what_the_one_before_left(given: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError, match=r"a second step would not be the same .*test_left_returned\.py:\d+\n"):
        parallel(given, loss_and_rest).forward_backward(batch())
    with pytest.raises(CaptureError, match=r"a second step would not be the same .*test_left_returned\.py:\d+\n"):
        evaluated(parallel(given))


def test_a_clock_may_not_be_returned() -> None:
    with pytest.raises(CaptureError, match=r"returns a number that is another one each time it runs"):
        evaluated(parallel(lambda net, h: time.perf_counter()))


def _own(net: Net, h: Tensor) -> Any:
    net.last = h.detach()
    return net.last.mean(0)


def _tables(net: Net, h: Tensor) -> Any:
    if net.table is None:
        net.table = torch.arange(3, dtype=h.dtype, device=h.device)  # type: ignore[assignment]
    return net.table


def _facts(net: Net, h: Tensor) -> Any:
    net.calls += 1
    return {"rows": h.shape[0], "training": net.training, "mean": net.mean}


@pytest.mark.parametrize("given", [_own, _tables, _facts], ids=lambda given: given.__name__)
def test_what_each_run_returns_of_itself_is_taken(given: Callable[..., Any]) -> None:
    plain, model = Net(given).double(), parallel(given, loss_and_rest)
    for step in range(2):
        loss, rest = loss_and_rest(plain, batch(step))
        torch.testing.assert_close(model.forward_backward(batch(step)), loss, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(model.last_aux, rest if isinstance(rest, dict) else rest.detach())
        torch.testing.assert_close(evaluated(model), evaluated(plain))
