"""Sizes whose program must not be made from those of others: they are captured."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lengths_case import (
    MOST,
    TOKENS,
    WIDTH,
    Mix,
    Net,
    attend,
    batch,
    captured,
    causal_by_ones,
    is_made,
    loss_of,
    plain,
    ways,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autopar.capture import Earlier
from autopar.errors import CaptureError


def branched(net: Net, h: Tensor) -> Tensor:
    return h.tanh() if h.shape[1] > 24 else attend(net, h)


def by_another_number(net: Net, h: Tensor) -> Tensor:
    return h * (0.5 if h.shape[1] > 24 else 0.25)


def by_another_size(net: Net, h: Tensor) -> Tensor:
    length = h.shape[1]
    return h * h.sum(1, keepdim=True) / (length if length <= 24 else length + 2)


def detached(net: Net, h: Tensor) -> Tensor:
    return h * (h.detach() if h.shape[1] > 24 else h)


def without_gradient(net: Net, h: Tensor) -> Tensor:
    with torch.set_grad_enabled(h.shape[1] <= 24):
        gate = h.sigmoid()
    return h * gate


def hooked(net: Net, h: Tensor) -> Tensor:
    h = h * 2
    if h.shape[1] > 24:
        h.register_hook(lambda grad: grad * 3)
    return h.tanh()


def padded(net: Net, h: Tensor) -> Tensor:
    h = F.pad(h, (0, 0, 0, -h.shape[1] % 8))
    return attend(net, h).mean(1)


def to_eights(net: Net, h: Tensor) -> Tensor:
    whole = math.ceil(h.shape[1] / 8) * 8
    return (torch.cat([h, h.new_zeros(len(h), MOST, WIDTH)], 1)[:, :whole]).mean(1)


@pytest.mark.parametrize("mix", [branched, detached, without_gradient], ids=lambda mix: mix.__name__)
def test_another_graph_above_a_size_is_captured_there(mix: Mix) -> None:
    """And made again from three of those."""
    assert ways(mix, (16, 12, 20, 22, 33, 28, 41, 48)) == "cccmcccm"


@pytest.mark.parametrize("mix", [by_another_number, by_another_size], ids=lambda mix: mix.__name__)
def test_another_number_above_a_size_is_captured_there(mix: Mix) -> None:
    """From then on it is known to change."""
    assert ways(mix, (16, 12, 20, 22, 33, 28, 41, 48)) == "cccmcmmm"


def test_a_hook_above_a_size_is_captured_there() -> None:
    assert ways(hooked, (16, 12, 20, 22, 33, 28, 41, 48, 18)) == "ccc" + "c" * 6, "its code names hooks"


@pytest.mark.parametrize("mix", [padded, to_eights], ids=lambda mix: mix.__name__)
def test_a_rounding_is_captured(mix: Mix) -> None:
    """At three multiples of 8 nothing is rounded."""
    assert ways(mix, (16, 24, 32, 40, 20, 28))[:5] == "cccmc"


def looped(net: Net, h: Tensor) -> Tensor:
    state = torch.zeros_like(h[:, 0])
    for row in h.unbind(1):
        state = torch.tanh(net.cell(state) + row)
    return state


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 2.0 if x.shape[1] <= 24 else 3.0
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor


def checkpointed(net: Net, h: Tensor) -> Tensor:
    result: Tensor = checkpoint(attend, net, h, use_reentrant=False)
    return result


def always_hooked(net: Net, h: Tensor) -> Tensor:
    h = h * 2
    h.register_hook(lambda grad: grad * 3)
    return h.tanh()


@pytest.mark.parametrize("mix", [looped, checkpointed, always_hooked], ids=lambda mix: mix.__name__)
def test_always_captured(mix: Mix) -> None:
    assert ways(mix, (8, 6, 10, 12, 14)) == "ccccc"


def test_a_custom_autograd_function_is_always_captured() -> None:
    """Its backward pass, of which the forward pass tells nothing, is one more branch on the size."""
    model, earlier = Net(lambda net, h: Doubled.apply(h)).double(), Earlier()
    for length in (16, 12, 20, 22, 33):
        assert not is_made(model, batch(length), earlier)


def test_a_size_of_one_is_captured() -> None:
    assert ways(causal_by_ones, (16, 12, 20, 1, 2, 18)) == "ccccmm"


def test_numbers_of_python_are_those_of_now() -> None:
    """A number that was the same at three sizes, and then is not: from then on it is known to change."""
    model, earlier = Net(lambda net, h: h * net.near).double(), Earlier()
    found = [is_made(model, batch(length), earlier) for length in (16, 12, 20, 22)]
    model.near = 3.0
    found += [is_made(model, batch(length), earlier) for length in (18, 22, 16)]
    assert found == [False, False, False, True, False, True, True]


def test_sizes_that_were_alike_and_then_are_not() -> None:
    """Two sequences of one length at three calls, and of two lengths at the fourth."""

    def loss(net: Net, x: Tensor, z: Tensor) -> Tensor:
        return (net.tokens(x).sum(1) * net.tokens(z).sum(1)).mean() + net.tokens(z).mean()

    model, earlier = Net(plain).double(), Earlier()
    pairs = [(16, 16), (12, 12), (20, 20), (18, 18), (18, 14), (10, 12), (12, 22), (21, 25)]
    found = [is_made(model, (batch(one)[0], batch(other)[0]), earlier, loss) for one, other in pairs]
    assert found[:5] == [False, False, False, True, False]


def test_a_draw_above_a_size_is_an_input_there() -> None:
    model, earlier = Net(lambda net, h: h * (random.random() if h.shape[1] > 24 else 0.5)).double(), Earlier()
    assert [is_made(model, batch(length), earlier) for length in (16, 12, 20, 22)] == [False, False, False, True]
    made = captured(model, loss_of, batch(33), earlier)
    assert made.host is not None and any("Python's random module" in note for note in made.program.notes)


COUNTS = {"calls": 0}


def counted(net: Net, h: Tensor) -> Tensor:
    factor = 0.5
    if h.shape[1] > 24:
        COUNTS["calls"] += 1
        factor = 0.5 if COUNTS["calls"] % 2 else 0.25
    return h * factor


def test_what_a_run_leaves_for_the_next_one_above_a_size_is_refused() -> None:
    """The first run above it is as those below."""
    COUNTS["calls"] = 0
    model, earlier = Net(counted).double(), Earlier()
    assert [is_made(model, batch(length), earlier) for length in (16, 12, 20, 22)] == [False, False, False, True]
    with pytest.raises(CaptureError, match="another one each time"):
        captured(model, loss_of, batch(33), earlier)


FACTOR = 0.5


def factor() -> float:
    return FACTOR


def by_another_function(net: Net, h: Tensor) -> Tensor:
    return h * (factor() if h.shape[1] > 24 else 0.5)


def test_another_function_is_run_in_full() -> None:
    """What it reads is guarded from then on."""
    assert ways(by_another_function, (16, 12, 20, 22, 33, 28, 18)) == "cccmcmm"


def by_a_clock(net: Net, h: Tensor) -> Tensor:
    return h * (math.sqrt(h.shape[1]) if h.shape[1] <= 24 else next(TICKS) / 7)


TICKS = itertools.count(100)  # nobody sees what it holds


def test_a_clock_above_a_size_is_refused() -> None:
    """Where a number was one that changes with the size."""
    model, earlier = Net(by_a_clock).double(), Earlier()
    assert [is_made(model, batch(length), earlier) for length in (16, 12, 20, 22)] == [False, False, False, True]
    with pytest.raises(CaptureError, match="another one each time"):
        captured(model, loss_of, batch(33), earlier)


def padding_by_size(net: Net, h: Tensor) -> Tensor:
    index = torch.arange(h.shape[1]) % TOKENS
    return h + F.embedding(index, net.tokens.weight, padding_idx=2 if h.shape[1] <= 24 else 3)


def test_a_number_of_the_backward_pass_alone_is_seen() -> None:
    assert ways(padding_by_size, (16, 12, 20, 22, 33, 28)) == "cccmcm"
