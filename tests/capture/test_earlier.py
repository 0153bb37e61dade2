"""The program of a further size, made from those of three others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lengths_case import (
    LENGTHS,
    WIDTH,
    Mix,
    Net,
    attend,
    batch,
    causal_by_ones,
    is_made,
    plain,
    ways,
)
from torch import Tensor, nn

from autopar.capture import Earlier, capture
from autopar.capture.step_kind import StepKind
from autopar.ir.text.text import print_program


def causal_by_places(net: Net, h: Tensor) -> Tensor:
    places = torch.arange(h.shape[1])
    return attend(net, h, places[None, :] > places[:, None])


def causal_by_torch(net: Net, h: Tensor) -> Tensor:
    q, k, v = net.qkv(h).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
    return h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def places(net: Net, h: Tensor) -> Tensor:
    return attend(net, h + net.places[: h.shape[1]])


def places_by_index(net: Net, h: Tensor) -> Tensor:
    return h + net.places[torch.arange(h.shape[1])] + net.places[list(range(h.shape[1]))]


def last(net: Net, h: Tensor) -> Tensor:
    return attend(net, h)[:, -1]


def last_by_number(net: Net, h: Tensor) -> Tensor:
    return attend(net, h)[:, h.shape[1] - 1]


def mean(net: Net, h: Tensor) -> Tensor:
    return attend(net, h).mean(1)


def half(net: Net, h: Tensor) -> Tensor:
    return h + h[:, : h.shape[1] // 2].mean(1, keepdim=True)


def rolled(net: Net, h: Tensor) -> Tensor:
    return h * h.roll(h.shape[1] // 3, 1)


def joined(net: Net, h: Tensor) -> Tensor:
    length = h.shape[1]
    wide = torch.cat([h[:, : length // 3], h, h[:, length // 2 :] * 2], 1)
    return h + wide.mean(1, keepdim=True)


def scaled(net: Net, h: Tensor) -> Tensor:
    return h * h.sum(1, keepdim=True) / math.sqrt(h.shape[1])


def squared(net: Net, h: Tensor) -> Tensor:
    return h * (h @ h.transpose(1, 2)).sum((1, 2))[:, None, None] / (h.shape[1] * h.shape[1])


def dropped(net: Net, h: Tensor) -> Tensor:
    return F.dropout(attend(net, F.dropout(h, 0.25, net.training)), 0.5, net.training)


def normed(net: Net, h: Tensor) -> Tensor:
    normal: Tensor = net.norm(h.transpose(1, 2))
    return normal.transpose(1, 2)


def convolved(net: Net, h: Tensor) -> Tensor:
    result: Tensor = F.gelu(net.conv(h.transpose(1, 2)))
    return result.transpose(1, 2)


def of_a_constant(net: Net, h: Tensor) -> Tensor:
    return h * torch.tensor([1.0 / h.shape[1], 0.5], dtype=h.dtype).sum()


def in_place(net: Net, h: Tensor) -> Tensor:
    h = h.clone()
    h[:, h.shape[1] // 2 :] *= 2
    return h.tanh_()


MADE = (
    plain, causal_by_ones, causal_by_places, causal_by_torch, places, places_by_index, last, last_by_number, mean,
    half, rolled, scaled, squared, dropped, normed, convolved, of_a_constant, in_place,
)  # fmt: skip


@pytest.mark.parametrize("mix", MADE, ids=lambda mix: mix.__name__)
def test_made_from_three_others(mix: Mix) -> None:
    assert ways(mix) == "cccmmm"


def test_two_sizes_that_change() -> None:
    """Images, whose rows and columns change, and their product in a count."""

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(net(x)), 2)
        return (h.flatten(2).mean(-1) ** 2).sum()

    torch.manual_seed(4)
    model, earlier = nn.Conv2d(3, 4, 3, padding=1).double(), Earlier()
    sizes = [(8, 12), (12, 16), (16, 10), (10, 8), (18, 20), (9, 11), (8, 24)]
    found = [is_made(model, (torch.randn(4, 3, *size).double(),), earlier, loss) for size in sizes]
    assert found[:5] == [False, False, False, True, True]


def test_rows_and_length_change() -> None:
    """The last batch of an epoch: with other rows, and the sizes of before after it."""
    model, earlier = Net(causal_by_ones).double(), Earlier()
    sizes = [(16, 8), (12, 8), (20, 8), (18, 8), (14, 6), (22, 8), (10, 4)]
    found = [is_made(model, batch(length, rows), earlier) for length, rows in sizes]
    assert found == [False, False, False, True, False, True, False]


def test_what_is_returned_beside_the_loss_is_of_now() -> None:
    def loss(net: Net, x: Tensor, y: Tensor) -> Any:
        logits = net(x)
        aux = {"length": x.shape[1], "logits": logits, "half": logits[:, : x.shape[1] // 2]}
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100), aux

    model, earlier = Net(attend).double(), Earlier()
    assert [is_made(model, batch(length), earlier, loss) for length in (16, 11, 20, 7, 18)] == [False] * 3 + [True] * 2


def test_without_gradients() -> None:
    model, earlier = Net(causal_by_ones).double().eval(), Earlier()
    for position, length in enumerate(LENGTHS):
        x, _ = batch(length)
        found, whole = (
            capture(model, None, (x,), {}, kind=StepKind.OUTPUT, lift=torch.float64, earlier=each)
            for each in (earlier, None)
        )
        assert print_program(found.program) == print_program(whole.program)
        assert earlier.made == max(0, position - 2)


def test_what_is_joined_of_thirds_is_right() -> None:
    """Its backward pass has sums of sizes that no tensor has."""
    ways(joined, (9, 12, 18, 24, 10, 11, 13, 14))


def test_thirds_at_multiples_of_three_are_no_line() -> None:
    """At 6, 12 and 18 a third of the length is on a line with it, and at 8 it is not."""
    assert ways(rolled, (6, 12, 18, 8, 14)) == "cccmm"
