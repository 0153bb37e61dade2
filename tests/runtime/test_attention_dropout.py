"""Attention with dropout: the mask of `dropout`, on every mesh, and no scores of the whole in memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.runtime.attention.attention_dropout import dropped_attention, dropped_attention_backward
from autopar.runtime.kernels.dropout import dropout

D = torch.float64
SEED = torch.tensor([5, 9])


class Layer(nn.Module):
    """Grouped heads: 4 of queries, 2 of keys and values."""

    def __init__(self, width: int, causal: bool, p: float = 0.3) -> None:
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(width, size) for size in (width, width, width))
        self.causal, self.p, self.head = causal, p, width // 4

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, self.head)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (4, self.head)).transpose(1, 2).chunk(2, 1)
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize("hk", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [100, 3])
def test_it_is_dropout_of_the_probabilities(hk: int, causal: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in blocks of a few queries."""
    monkeypatch.setattr("autopar.runtime.attention.attention_plain._BLOCK_BYTES_CPU", rows * 2 * 4 * 7 * 8)
    q, k, v = (torch.randn(2, heads, 7, 8, dtype=D, requires_grad=True) for heads in (4, hk, hk))
    mask, shape = torch.randn(7, 7, dtype=D), [2, 4, 7, 7]
    scores = q @ k.repeat_interleave(4 // hk, 1).mT * 0.4 + mask
    seen = torch.ones(7, 7, dtype=torch.bool).tril() if causal else torch.ones(7, 7, dtype=torch.bool)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    kept = dropout(torch.ones_like(weights), SEED, 3, 0.3, shape, shape, [0] * 4)
    want = (weights * kept) @ v.repeat_interleave(4 // hk, 1)
    grad = torch.randn_like(want)
    want_grads = torch.autograd.grad(want, (q, k, v), grad)
    rest = SEED, causal, 0.4, 3, 0.3, shape, shape, [0] * 4
    with torch.no_grad():
        out, lse = dropped_attention(q, k, v, mask, *rest)
        grads = dropped_attention_backward(grad, q, k, v, mask, out, lse, *rest)
    torch.testing.assert_close((out, *grads), (want.detach(), *want_grads), rtol=1e-12, atol=1e-12)
    assert 0.1 < kept.eq(0).float().mean() < 0.5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [("dp=2,tp=2", {}), ("dp=2", {"microbatches": 2}), ("tp=2", {"recompute": "full"}), ("dp=2", {"zero": 3})],
)
def test_a_mesh_draws_the_mask_of_one_device(mesh: str, options: dict[str, object], causal: bool) -> None:
    torch.manual_seed(1)
    model, batch = Layer(16, causal).double(), (torch.randn(4, 6, 16, dtype=D),)
    compiled = autopar.compile(model, mesh, loss_fn=square, batch=batch, **options)
    assert "autopar.dropped_attention.default" in compiled.text()
    assert "softmax" not in compiled.text(), "it is spelled out"
    report = autopar.verify(model, mesh, loss_fn=square, batch=batch, **options)
    assert report.ok, report


def test_layers_of_torch_are_one_op_too() -> None:
    torch.manual_seed(2)
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.2, batch_first=True).double()
    batch = (torch.randn(4, 6, 16, dtype=D),)
    assert "autopar.dropped_attention.default" in autopar.compile(model, "tp=2", loss_fn=square, batch=batch).text()
    report = autopar.verify(model, "dp=2,tp=2", loss_fn=square, batch=batch)
    assert report.ok, report


@pytest.mark.parametrize(("device", "length"), [("cuda", 4096), ("cpu", 1024)])
def test_a_layer_grows_with_the_sequence_and_not_with_its_square(device: str, length: int) -> None:
    def activations(length: int) -> int:
        with torch.device("meta"):
            model, x = Layer(256, True), torch.empty(1, length, 256)
        report = autopar.compile(model, "dp=1", loss_fn=square, batch=(x,)).memory(0, device=device)
        return report.peak - sum(report.states.values())

    assert activations(2 * length) <= 2.1 * activations(length)


class Padded(nn.Module):
    """Padding on the left by torch.finfo(dtype).min, as transformers writes it: the first rows see nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        least, places = torch.finfo(x.dtype).min, torch.arange(x.shape[1])
        hidden = ~seen[:, None, None] | (places[:, None] < places)
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, least)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)


@pytest.mark.parametrize("mesh", ["cp=2", "tp=2"])
def test_rows_that_finite_numbers_hide_are_those_of_torch(mesh: str) -> None:
    torch.manual_seed(0)
    x, seen = torch.randn(2, 8, 16), torch.ones(2, 8, dtype=torch.bool)
    seen[0, :3] = False
    report = autopar.verify(
        Padded(), mesh, loss_fn=lambda model, x, seen: model(x, seen).square().mean(), batch=(x, seen)
    )
    assert report.ok, str(report)
