"""What a run of the model leaves in Python: on torch's own layers, and for the other programs of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import autopar
from autopar.errors import AutoparError, CaptureError

COUNTED = {"calls": 1}


class Net(nn.Module):
    """Its outputs are multiplied by what `given` gives, which may keep what it likes."""

    def __init__(self, given: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.given = nn.Linear(4, 8), nn.Linear(8, 3), given
        self.mean: Any = torch.ones(())
        self.calls, self.held, self.log, self.table = 1, {"mean": torch.ones(())}, [torch.ones(())], None
        self.head.calls = 1  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()
        factor = self.given(self, h)
        return self.head(h) if factor is None else self.head(h) * factor


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).double()


def trained(model: Any, evaluates: Callable[[Any], list[Tensor]], steps: int = 3) -> list[Tensor]:
    """The losses, weights and evaluations of a loop."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
    for step in range(steps):
        optimizer.zero_grad()
        if isinstance(model, autopar.ParallelModule):
            found.append(model.forward_backward(batch(6, step)).detach())
        else:
            found.append(loss := loss_fn(model, batch(6, step)))
            loss.backward()
        optimizer.step()
        found += [*(p.detach().clone() for p in model.parameters()), *evaluates(model)]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


def evaluated(model: Any, rows: int = 4) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        found = model(batch(rows))
    model.train()
    return [found]


def of_another_size(model: Any) -> list[Tensor]:
    with torch.no_grad():
        return [model(batch(4))]


def parallel(given: Callable[[Net, Tensor], Any]) -> Any:
    return autopar.parallelize(Net(given).double(), "dp=1", loss_fn=loss_fn)


def assert_as_plain(given: Callable[[Net, Tensor], Any], is_first: bool = False) -> None:
    found = []
    for model in (Net(given).double(), parallel(given)):
        before = evaluated(model) if is_first else []
        found.append([*before, *trained(model, lambda m: [*evaluated(m), *evaluated(m, 6)])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


# -- on torch's own layers --------------------------------------------------------------------------------------------


def _keeps(net: Net, h: Tensor) -> None:
    net.head.seen = h.detach()  # type: ignore[assignment]


def _counts(net: Net, h: Tensor) -> None:
    net.head.calls += 1  # type: ignore[operator, assignment]


def test_a_layer_keeps_what_it_saw() -> None:
    assert_as_plain(_keeps)
    assert_as_plain(_counts)


def test_a_hook_keeps_activations_on_its_layer() -> None:
    found = []
    for model in (Net(lambda *_: None).double(), parallel(lambda *_: None)):
        model.layer.register_forward_hook(lambda layer, _, output: setattr(layer, "seen", output))
        found.append(trained(model, evaluated))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def _once(net: Net, h: Tensor) -> Any:
    was, net.head.was = hasattr(net.head, "was"), True  # type: ignore[assignment]
    return 2.0 if was else 1.0


def _later(net: Net, h: Tensor) -> Any:
    _counts(net, h)
    return 2.0 if net.head.calls > 3 else 1.0  # type: ignore[operator]


def _decays(net: Net, h: Tensor) -> Any:
    net.head.calls *= 0.5  # type: ignore[operator, assignment]
    return net.head.calls


@pytest.mark.parametrize("given", [_once, _later, _decays])
def test_what_a_layer_counts_may_not_decide(given: Callable[[Net, Tensor], Any]) -> None:
    model = parallel(given)
    with pytest.raises(CaptureError, match=r"'head\.(was|calls)'.*test_left_values\.py"):
        model.forward_backward(batch(6))
    assert not hasattr(model.head, "was") and model.head.calls == 1


def test_a_tensor_that_is_bound_anew_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="autopar"):
        parallel(lambda net, h: setattr(net, "mean", h.detach().mean())).forward_backward(batch(6))
    assert "'mean' is changed at test_left_values.py:" in caplog.text


# -- for other programs -----------------------------------------------------------------------------------------------


def _tensor(net: Net, h: Tensor) -> Any:
    if net.training:
        net.mean = h.detach().mean()
    return None if net.training else net.mean


def _was_none(net: Net, h: Tensor) -> Any:
    if net.training:
        net.table = h.detach().mean()  # type: ignore[assignment]
    return None if net.training or net.table is None else net.table


def _number(net: Net, h: Tensor) -> Any:
    net.calls += net.training
    return None if net.training else net.calls


def _in_a_dict(net: Net, h: Tensor) -> Any:
    if net.training:
        net.held["mean"] = h.detach().mean()
    return None if net.training else net.held["mean"]


def _in_a_list(net: Net, h: Tensor) -> Any:
    if net.training:
        net.log.append(h.detach().mean())
    return None if net.training else torch.stack(net.log).mean()


def _on_a_layer(net: Net, h: Tensor) -> Any:
    if net.training:
        net.head.calls += 1  # type: ignore[operator, assignment]
    return None if net.training else net.head.calls


def _in_a_global(net: Net, h: Tensor) -> Any:
    if net.training:
        COUNTED["calls"] += 1
    return None if net.training else COUNTED["calls"]


def _by_size(net: Net, h: Tensor) -> Any:
    if h.shape[0] == 6:
        net.mean = h.detach().mean()
        return None
    return net.mean


OTHERS = [_tensor, _was_none, _number, _in_a_dict, _in_a_list, _on_a_layer, _in_a_global]


@pytest.mark.parametrize("given", [*OTHERS, _by_size], ids=lambda given: given.__name__)
def test_another_program_may_not_hang_on_it(given: Callable[[Net, Tensor], Any]) -> None:
    model = parallel(given)
    evaluate = of_another_size if given is _by_size else evaluated
    with pytest.raises(CaptureError, match=r"leaves in Python, at .*test_left_values\.py") as found:
        trained(model, evaluate)
    assert "register_buffer" in str(found.value) and "'" in str(found.value)


@pytest.mark.parametrize("given", OTHERS, ids=lambda given: given.__name__)
def test_nor_one_that_was_made_before(given: Callable[[Net, Tensor], Any]) -> None:
    model = parallel(given)
    evaluated(model)  # as on one device: nothing was left yet
    model.forward_backward(batch(6))
    with pytest.raises(CaptureError, match="leaves in Python"):
        evaluated(model)


def _writes_first(net: Net, h: Tensor) -> Any:
    net.mean = h.mean()
    return net.mean


def _tables(net: Net, h: Tensor) -> Any:
    if net.table is None or net.table.shape[0] < h.shape[0]:
        net.table = torch.arange(h.shape[0], dtype=h.dtype, device=h.device)  # type: ignore[assignment]
        net.calls = h.shape[0]
    return net.table[: h.shape[0], None]  # type: ignore[index]


def _logs(net: Net, h: Tensor) -> Any:
    net.log.append(h.detach().mean())
    net.calls += 1
    net.held["shape"] = tuple(h.shape)  # type: ignore[assignment]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("given", [_writes_first, _tables, _logs], ids=lambda given: given.__name__)
def test_what_hangs_on_nothing_that_is_left_is_taken(given: Callable[[Net, Tensor], Any], is_first: bool) -> None:
    assert_as_plain(given, is_first)


def test_a_program_of_an_earlier_run_tells_what_it_leaves(tmp_path: Path) -> None:
    for _ in range(2):
        model = autopar.parallelize(Net(_tensor).double(), "dp=1", loss_fn=loss_fn, cache=tmp_path / "programs")
        evaluated(model)
        model.forward_backward(batch(6))
        with pytest.raises(CaptureError, match=r"(?s)leaves in Python.*'mean'"):
            evaluated(model)
    assert [running.compiled.is_read for running in model.programs] == [True]


# -- parameters under another name ------------------------------------------------------------------------------------


def test_a_parameter_under_another_name_is_told() -> None:
    net = Net(lambda *_: None).double()
    prune.l1_unstructured(net.head, "weight", 0.5)
    model = autopar.parallelize(net, "dp=1", loss_fn=loss_fn)
    model.forward_backward(batch(6))
    prune.remove(net.head, "weight")
    with pytest.raises(AutoparError, match=r"'head\.weight_orig' was removed after autopar\.parallelize"):
        model.forward_backward(batch(6))
