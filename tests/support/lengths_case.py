"""A small model at several lengths: each program is compared with a capture of its own, and with the plain module."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import Captured, Earlier, capture
from autopar.compiler.compile import lower
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.ir.text.text import print_program
from autopar.verification.verify import verify_compiled

TOKENS, WIDTH, MOST, ROWS = 12, 8, 64, 4
LENGTHS = (16, 11, 20, 7, 18, 33)  # of which the last three are made from the others
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


def plain(net: Net, h: Tensor) -> Tensor:
    return h


def attend(net: Net, h: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = net.qkv(h).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH)
    scores = scores if mask is None else scores.masked_fill(mask, -1e4)
    return h + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def causal_by_ones(net: Net, h: Tensor) -> Tensor:
    return attend(net, h, torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1))
