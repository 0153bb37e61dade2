"""Packed sequences: recurrent layers over sequences of their own lengths, split by samples as padded ones are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import autopar
from autopar.errors import CaptureError

Body = Callable[[Any, Tensor, Tensor], Tensor]
LENGTHS = torch.tensor([3, 2, 1, 3, 1, 2, 3, 2])
pack = partial(pack_padded_sequence, batch_first=True, enforce_sorted=False)
pad = partial(pad_packed_sequence, batch_first=True)


class Model(nn.Module):
    def __init__(self, layer: nn.Module, body: Body) -> None:
        super().__init__()
        self.layer, self.body = layer, body
        self.out = nn.LazyLinear(3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.body(self, x, lengths)


def loss(model: nn.Module, x: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x, lengths), y)


def last(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    states = self.layer(pack(x, lengths))[1]
    return self.out(states[-1] if isinstance(states, Tensor) else torch.cat([states[0][-1], states[1][0]], -1))


def padded(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    rows, count = pad(self.layer(pack(x, lengths.cpu()))[0])
    return self.out(rows.sum(1) / count[:, None].to(rows))


def filled(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    return self.out(pad(self.layer(pack(x, lengths))[0], padding_value=-1.0, total_length=x.shape[1])[0].sum(1))


def longer(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    return self.out(pad(self.layer(pack(x, lengths))[0], total_length=5)[0].amax(1))


def time_major(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    rows, _ = self.layer(pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False))
    return self.out(pad_packed_sequence(rows)[0].sum(0))


def by_hand(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    """Sorted and put back by the model."""
    lengths, order = lengths.sort(descending=True)
    rows, _ = self.layer(pack_padded_sequence(x[order], lengths, batch_first=True))
    return self.out(pad(rows)[0].sum(1)[order.argsort()])


def begun(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    """With a state of its own for each sequence."""
    state = torch.arange(len(x), dtype=x.dtype)[None, :, None].expand(1, -1, 4)
    return self.out(pad(self.layer(pack(x, lengths), (state, state * 2))[0])[0].sum(1))


def row_by_row(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    rows, _ = self.layer(pack(x, lengths))
    return pad(PackedSequence(self.out(torch.tanh(rows.data)), *rows[1:]))[0].sum(1)


def listed(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    return self.out(pad(self.layer(pack(x, LENGTHS.tolist()))[0])[0].sum(1))


def sequences(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_sequence([row[:length] for row, length in zip(x, LENGTHS.tolist(), strict=True)], False)
    return self.out(pad(self.layer(packed)[0])[0].sum(1))


def beside(self: Model, x: Tensor, lengths: Tensor) -> Tensor:
    """Rows beside others of the same lengths, of batches that were padded further: captions and their targets."""
    further, rows = pack(F.pad(x, (0, 0, 0, 2)), lengths), self.layer(pack(x, lengths))[0]
    behind = pack(F.pad(x * 3, (0, 0, 0, 1)), lengths)
    each = F.mse_loss(self.out(rows.data), further.data[:, :3]) + F.l1_loss(self.out(rows.data), behind.data[:, 3:])
    return self.out(pad(rows)[0].sum(1)) * each


LAYERS: dict[str, Callable[..., nn.Module]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
CASES: dict[str, tuple[Body, str, dict[str, Any]]] = {
    **{f"last state of {kind}": (last, kind, {}) for kind in LAYERS},
    **{
        f"two layers and ways of {kind}": (padded, kind, {"num_layers": 2, "bidirectional": True, "dropout": 0.5})
        for kind in LAYERS
    },
    "state of two ways": (last, "gru", {"bidirectional": True}),
    "relu, no bias": (filled, "rnn", {"nonlinearity": "relu", "bias": False}),
    "projected": (padded, "lstm", {"proj_size": 2}),
    "longer": (longer, "gru", {}),
    "time-major": (time_major, "lstm", {"batch_first": False}),
    "sorted by hand": (by_hand, "gru", {}),
    "begun": (begun, "lstm", {}),
    "row by row": (row_by_row, "gru", {}),
    "listed": (listed, "lstm", {}),
    "sequences": (sequences, "gru", {}),
    "beside others": (beside, "lstm", {}),
}


def make(name: str) -> nn.Module:
    body, kind, options = CASES[name]
    torch.manual_seed(1)
    model = Model(LAYERS[kind](6, 4, **{"batch_first": True, **options}), body)
    model(*batch(torch.float32)[:2])  # so that its last layer knows its width
    return model


def batch(dtype: torch.dtype, lengths: Tensor = LENGTHS) -> Any:
    random = torch.Generator().manual_seed(0)
    return (
        torch.randn(8, 3, 6, generator=random).to(dtype),
        lengths,
        torch.randn(8, 3, generator=random).to(dtype),
    )


@pytest.mark.parametrize("name", CASES)
def test_layers_of_packed_sequences(name: str) -> None:
    options = {} if name == "sequences" else {"microbatches": 2}
    report = autopar.verify(make(name).double(), "dp=2,tp=2", loss_fn=loss, batch=batch(torch.float64), **options)
    assert report.ok, report


@pytest.mark.parametrize("kind", LAYERS)
def test_samples_are_split(kind: str) -> None:
    """No sort, nothing gathered of the rows; and so in stages, and in float32."""
    name, given = f"last state of {kind}", batch(torch.float32)
    step = autopar.compile(make(name), "dp=2", loss_fn=loss, batch=given)
    assert not any("sort" in str(node.target) for node in step.program.graph.nodes)
    assert not any("replicated" in note for note in step.notes)
    assert autopar.verify(make(name), "pp=2", loss_fn=loss, batch=given, microbatches=2, dtype=torch.float32).ok


def test_the_longest_sequence() -> None:
    """A result as long as the longest sequence: as long as the padded batch, or said."""
    shorter = batch(torch.float64, LENGTHS.clamp(max=2))
    with pytest.raises(CaptureError) as refused:
        autopar.compile(make("projected").double(), "dp=2", loss_fn=loss, batch=shorter)
    text = str(refused.value)
    assert f"at {__file__}:{padded.__code__.co_firstlineno + 1}" in text
    assert (
        "This line has pad_packed_sequence, whose result is as long as the longest sequence, and none is as long as "
        "the padded batch. Say how long it is: pad_packed_sequence(packed, total_length=x.shape[1]); or pad batches to "
        "the longest sequence. Or specialize=True takes the value"
    ) in " ".join(text.split())
    assert autopar.verify(make("relu, no bias").double(), "dp=2", loss_fn=loss, batch=shorter).ok
    assert autopar.verify(make("projected").double(), "dp=2", loss_fn=loss, batch=shorter, specialize=True).ok


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            lambda self, x, lengths: last(self, x, lengths) / len(pack(x, lengths).data),
            "the model computes with how many rows a mask selects (24 first, then 1)",
        ),
    ],
)
def test_how_many_rows_there_are_is_data(body: Body, said: str) -> None:
    model = Model(nn.GRU(6, 4, batch_first=True), body)
    model(*batch(torch.float32)[:2])
    with pytest.raises(CaptureError) as refused:
        autopar.compile(model.double(), "dp=2", loss_fn=loss, batch=batch(torch.float64))
    assert said in " ".join(str(refused.value).split())
