"""What a step returns, and whose memory that is: what is written there, or left by the next step, is seen there."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError


class Net(nn.Module):
    """It returns its output, and beside it what `given` gives of the batch and the output."""

    def __init__(self, given: Callable[[Net, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.given = nn.Linear(4, 4), given
        self.register_buffer("count", torch.arange(4.0))
        self.register_buffer("table", torch.zeros(8, 4))
        self.register_buffer("center", torch.zeros(4))
        self.plain = torch.arange(4.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        h = self.layer(x)
        return h, self.given(self, x, h)


def loss_fn(model: nn.Module, x: Tensor) -> Any:
    h, rest = model(x)
    return h.square().mean(), rest


def batch(seed: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).double()


def counted(net: Net, x: Tensor, h: Tensor) -> Any:
    net.count += 1
    return net.count


def a_row(net: Net, x: Tensor, h: Tensor) -> Any:
    net.table[0] = x.detach().mean(0)
    return net.table[0]


def columns(net: Net, x: Tensor, h: Tensor) -> Any:
    net.table[:, 1:3] += 1
    return net.table.t()[1:3, ::2]


def bound_anew(net: Net, x: Tensor, h: Tensor) -> Any:
    net.center = 0.5 * net.center + x.detach().mean(0)
    return net.center


def an_attribute(net: Net, x: Tensor, h: Tensor) -> Any:
    return net.plain[1:]


def the_batch(net: Net, x: Tensor, h: Tensor) -> Any:
    return x


def of_the_batch(net: Net, x: Tensor, h: Tensor) -> Any:
    return x.t()[1:]


def each_other(net: Net, x: Tensor, h: Tensor) -> Any:
    a = (h.detach() * 2).tanh()
    return [a[0], a, a.t(), a.view(2, -1)[:, 1:], a.expand(2, 8, 4)]


def made(net: Net, x: Tensor, h: Tensor) -> Any:
    return [torch.arange(4.0), net.count.clone(), net.count * 1, x[[0, 1]], x + 0]


GIVEN = [counted, a_row, columns, an_attribute, the_batch, of_the_batch, each_other, made]


def _first(rest: Any) -> Tensor:
    return rest[0] if isinstance(rest, list) else rest


def _used(model: Any, writes: bool) -> list[Tensor]:
    """Steps and evaluations, what they return kept to the end, and written if `writes`: all of it, the batches and the
    state of the model."""
    found, batches = list[Any](), [batch(seed) for seed in range(4)]
    for step, x in enumerate(batches):
        if step % 2:
            with torch.no_grad():
                rest = model(x)[1]
        elif isinstance(model, autopar.ParallelModule):
            model.forward_backward(x)
            rest = model.last_aux
        else:
            loss, rest = loss_fn(model, x)
            loss.backward()
        if writes:
            _first(rest).mul_(3)
        found += rest if isinstance(rest, list) else [rest]
    return [*found, *batches, *model.buffers(), model.plain]


def _compare(rank: int, mesh: str, names: list[str]) -> None:
    for given in (each for each in GIVEN if each.__name__ in names):
        plain = Net(given).double()
        model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=loss_fn)
        for writes in (False, True):
            for at, (one, other) in enumerate(zip(_used(plain, writes), _used(model, writes), strict=True)):
                assert torch.allclose(other, one, atol=1e-12, rtol=1e-12), (given.__name__, writes, at)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: given.__name__)
def test_memory_is_that_of_one_device(given: Callable[..., Any]) -> None:
    _compare(0, "dp=1", [given.__name__])


@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_and_on_more_ranks(two: Ranks, mesh: str) -> None:
    two.run(_compare, mesh, [given.__name__ for given in GIVEN])


def test_what_is_returned_itself_is_itself() -> None:
    model: Any = autopar.parallelize(Net(lambda net, x, h: (x, net.count, x.detach())).double(), "dp=1")
    x = batch(0)
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            h, (same, count, detached) = model(x)
        assert same is x and count is model.count and detached is not x
        assert not same.requires_grad and not count.requires_grad
        assert h.requires_grad == (context is torch.enable_grad)


def test_a_buffer_that_is_bound_anew_stays_that_of_its_step() -> None:
    plain = Net(bound_anew).double()
    model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn)
    for one, other in zip(_used(plain, False), _used(model, False), strict=True):
        torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-12)


def test_a_program_of_an_earlier_run_knows_it(tmp_path: Path) -> None:
    for _ in range(2):
        plain = Net(columns).double()
        model = autopar.parallelize(copy.deepcopy(plain), "dp=1", loss_fn=loss_fn, cache=tmp_path / "programs")
        for one, other in zip(_used(plain, True), _used(model, True), strict=True):
            torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-12)
    assert [running.compiled.is_read for running in model.programs] == [True, False]  # no pair of tensors is kept


def _parts(rank: int) -> None:
    """Each rank passes rows of its own: its tensor of the batch is returned itself, and so are buffers."""
    plain = Net(lambda net, x, h: (x, net.table[:2], x.t())).double()
    model: Any = autopar.parallelize(copy.deepcopy(plain), "dp=2", batch="local", batch_dims=(0,))
    x = batch(0).chunk(2)[rank].clone()
    with torch.no_grad():
        _, (same, rows, turned) = model(x)
        whole = model(x, whole=True)[1][0]
        same += 1
        rows += 1
    assert same is x and whole is not x
    torch.testing.assert_close(x, batch(0).chunk(2)[rank] + 1)
    torch.testing.assert_close(whole, batch(0))
    torch.testing.assert_close(model.table[:2], plain.table[:2] + 1)
    torch.testing.assert_close(turned, batch(0).chunk(2)[rank].t())  # a copy, which docs/evaluation.md tells


@pytest.mark.gloo
def test_a_rank_with_rows_of_its_own_has_its_own_tensor(two: Ranks) -> None:
    two.run(_parts)


def test_a_parameter_is_copied_and_told(caplog: pytest.LogCaptureFixture) -> None:
    model = autopar.parallelize(Net(lambda net, x, h: net.layer.weight[0]).double(), "dp=1", loss_fn=loss_fn)
    with caplog.at_level(logging.WARNING, logger="autopar"), torch.no_grad():
        model(batch(0))
    assert "returns memory of parameter 'layer.weight'" in caplog.text


@pytest.mark.parametrize("use", [list, lambda rest: rest(), next, lambda rest: rest[0]])
def test_what_no_step_carries_says_so_however_it_is_used(use: Callable[[Any], Any]) -> None:
    model: Any = autopar.parallelize(Net(lambda net, x, h: (each for each in (h, x))).double(), "dp=1")
    with torch.no_grad():
        _, rest = model(batch(0))
    with pytest.raises(CaptureError, match="is a generator, which no compiled step carries"):
        use(rest)
