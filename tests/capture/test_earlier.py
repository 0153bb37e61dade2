"""The program of a further size: made from those of three others, or captured where that might be wrong.

Each program is compared with what a capture of its own gives, and computed on a virtual mesh beside the plain module.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.capture import Captured, Earlier, capture
from autopar.compiler.compile import lower
from autopar.errors import CaptureError
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.ir.text import print_program
from autopar.verification.verify import verify_compiled

TOKENS, WIDTH, MOST, ROWS = 12, 8, 64, 4
LENGTHS = (16, 11, 20, 7, 18, 33)
Mix = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """An embedding, a mixture of its rows that hangs on their number, and logits."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.mix = mix
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(MOST, WIDTH))
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, TOKENS)
        self.norm, self.conv = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.cell = nn.Linear(WIDTH, WIDTH)
        self.near, self.far = 2.0, 2.0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mix(self, self.tokens(x)))
        return logits


def loss_of(net: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = net(x)
    if logits.ndim == 2:  # of a whole sequence
        return F.cross_entropy(logits, y[:, 0], ignore_index=-100)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100)


def batch(length: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x, y = (torch.randint(TOKENS, (rows, length), generator=generator) for _ in range(2))
    return x, y.masked_fill((y < 3) & (torch.arange(length) > 0), -100)


def captured(model: nn.Module, loss: Any, given: Any, earlier: Earlier | None) -> Captured:
    return capture(model, loss, given, {}, lift=torch.float64, earlier=earlier)


def is_made(model: nn.Module, given: tuple[Tensor, ...], earlier: Earlier, loss: Any = loss_of) -> bool:
    """Whether a program is made from others; in any case it must be the right one."""
    before = earlier.made
    found, whole = (captured(model, loss, given, each) for each in (earlier, None))
    assert print_program(found.program) == print_program(whole.program)
    assert [record(node) for node in found.program.nodes] == [record(node) for node in whole.program.nodes]
    assert (found.result_form, found.frozen) == (whole.result_form, whole.frozen)
    assert repr(found.result_leaves) == repr(whole.result_leaves)
    assert found.constants.keys() == whole.constants.keys()
    for name, tensor in whole.constants.items():
        assert torch.equal(found.constants[name], tensor)
    assert found.ran.names() >= whole.ran.names()
    assert {root.name for root in found.ran.globals()} == {root.name for root in whole.ran.globals()}
    compiled = lower(found, parse_mesh("dp=2,tp=2"), StepOptions(), Fixed(uneven=True))
    report = verify_compiled(model, found, compiled, loss_fn=loss, batch=given, steps=1, optimizer=None, seed=3)
    assert report.ok and report.max_error < 1e-10, f"\n{report}"
    return earlier.made > before


def ways(mix: Mix, lengths: Sequence[int] = LENGTHS, train: bool = True) -> str:
    """For each length m if the program is made from others, c if it is captured."""
    model, earlier = Net(mix).double().train(train), Earlier()
    return "".join("cm"[is_made(model, batch(length), earlier)] for length in lengths)


# -- made from others ------------------------------------------------------------------------------------------------


def plain(net: Net, h: Tensor) -> Tensor:
    return h


def attend(net: Net, h: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = net.qkv(h).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    scores = scores if mask is None else scores.masked_fill(mask, -1e4)
    return h + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def causal_by_ones(net: Net, h: Tensor) -> Tensor:
    return attend(net, h, torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1))


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


# -- captured --------------------------------------------------------------------------------------------------------


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


def test_what_is_joined_of_thirds_is_right() -> None:
    """Its backward pass has sums of sizes that no tensor has."""
    ways(joined, (9, 12, 18, 24, 10, 11, 13, 14))


def test_thirds_at_multiples_of_three_are_no_line() -> None:
    """At 6, 12 and 18 a third of the length is on a line with it, and at 8 it is not."""
    assert ways(rolled, (6, 12, 18, 8, 14)) == "cccmm"


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


def test_a_draw_above_a_size_is_refused() -> None:
    model, earlier = Net(lambda net, h: h * (random.random() if h.shape[1] > 24 else 0.5)).double(), Earlier()
    assert [is_made(model, batch(length), earlier) for length in (16, 12, 20, 22)] == [False, False, False, True]
    with pytest.raises(CaptureError, match="draws numbers"):
        captured(model, loss_of, batch(33), earlier)


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


def test_without_gradients() -> None:
    model, earlier = Net(causal_by_ones).double().eval(), Earlier()
    for position, length in enumerate(LENGTHS):
        x, _ = batch(length)
        found, whole = (
            capture(model, None, (x,), {}, train=False, lift=torch.float64, earlier=each) for each in (earlier, None)
        )
        assert print_program(found.program) == print_program(whole.program)
        assert earlier.made == max(0, position - 2)
