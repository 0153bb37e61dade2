"""Recurrent nets of several layers that drop values between them: torch draws inside of its own op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verified import verified

from autopar.capture import capture
from autopar.ir.ops import op


class Net(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.net = kind(6, 8, batch_first=True, **options)
        self.head = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        out, states = self.net(x)
        last = states[0] if isinstance(states, tuple) else states
        return self.head(out).square().mean() + last.square().mean()


def made(kind: type[nn.RNNBase], **options: Any) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    net, x = Net(kind, **options), torch.randn(12, 5, 6)
    net(x)
    return net, x


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {"num_layers": 2}),
        (nn.LSTM, {"num_layers": 3, "bidirectional": True, "bias": False}),
        (nn.LSTM, {"num_layers": 2, "proj_size": 4}),
        (nn.GRU, {"num_layers": 3}),
        (nn.RNN, {"num_layers": 2, "bidirectional": True, "nonlinearity": "relu"}),
    ],
)
def test_the_numbers_are_those_of_one_device(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    net, x = made(kind, dropout=0.4, **options)
    for _, compiled in verified(net, ["dp=2,tp=2", "dp=3"], None, (x,)):
        drops = [node for node in compiled.program.calls() if node.target is op("dropout")]
        assert len(drops) >= options["num_layers"] - 1, "values are dropped between layers, and not after the last"


def test_nothing_is_dropped_in_evaluation_or_with_one_layer() -> None:
    for options, train in (({"num_layers": 2, "dropout": 0.4}, False), ({"num_layers": 2}, True)):
        net, x = made(nn.LSTM, **options)
        program = capture(net.train(train), None, (x,), {}).program
        assert not [node for node in program.calls() if node.target is op("dropout")]


def test_layer_by_layer_is_what_torch_computes() -> None:
    """With a rate so small that nothing is dropped, beside torch's own op with none."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        net, x = made(kind, num_layers=3, bidirectional=True, dropout=1e-12)
        ((report, _),) = verified(net, ["dp=2"], None, (x,))
        net.net.dropout = 0.0
        assert abs(report.loss - float(net(x.double()))) < 1e-9 if hasattr(report, "loss") else report.ok
