"""Writes and changes of form in place, of views, inputs and lists of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import verify
from autopar.errors import CaptureError


class Net(nn.Module):
    def __init__(self, use: Any) -> None:
        super().__init__()
        self.inner, self.other, self.use = nn.Linear(8, 8), nn.Linear(8, 8), use
        self.register_buffer("table", torch.arange(24.0, dtype=torch.float64).reshape(3, 8) / 9)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.use(self, self.inner(x) * 1, x)
        return (out * torch.arange(1, out.numel() + 1).reshape(out.shape)).sin().mean()


def list_of_views(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """In a trace torch counts no write to a list, and a view of it had the gradient of before."""
    row = y[1]
    torch._foreach_mul_([row, y[2]], 0.9)
    torch._foreach_addcmul_([row], [y[0] * 1], [y[3] * 1])
    torch._foreach_tanh_([row])
    return row


def list_at_a_place(m: Any, y: Tensor, x: Tensor) -> Tensor:
    row = y[x[0].argmax() % 4]
    torch._foreach_mul_([row], 0.9)
    return row + y[x[0].argmax() % 4]


def views_without_gradients(m: Any, y: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        row = y[0]
        row.mul_(2)
        torch.mul(row, 2, out=row)
        y[1:].clamp_(max=0.5).add_(0.1)
        y[x[0].argmax() % 4].mul_(2).add_(1)
    return y


def place_seen_without_gradients(m: Any, y: Tensor, x: Tensor) -> Tensor:
    row, first = y[x[0].argmax() % 4], y.narrow(0, x[1].argmax() % 3, 2)
    y.mul_(m.other.bias)
    with torch.no_grad():
        scale = row.abs().sum() + first.mean()
        row.mul_(2)
    return torch.cat([row[None], first]) / scale


def write_beside_a_view(m: Any, y: Tensor, x: Tensor) -> Tensor:
    row, first = y[x[0].argmax() % 4], y[0]
    with torch.no_grad():
        row *= 0.5
    return first.view(-1)[2:] * 2


def form_of_the_batch(m: Any, y: Tensor, x: Tensor) -> Tensor:
    x.unsqueeze_(1)
    x.squeeze_(1)
    x.t_()
    return m.other(x.t()) * x.shape[0]


def form_of_what_is_detached(m: Any, y: Tensor, x: Tensor) -> Tensor:
    flat, turned = m.table.detach(), x.data
    flat.unsqueeze_(0)
    turned.t_()
    turned.mul_(2)
    flat.mul_(0.9)
    return m.other(x) * m.table.sum() * turned.shape[0] * m.table.ndim


def form_of_a_weight(m: Any, y: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.other.weight.t_()
    return m.other(y)


def forms_of_activations(m: Any, y: Tensor, x: Tensor) -> Tensor:
    y.unsqueeze_(0)
    z = F.gelu(y).squeeze_(0)
    z.transpose_(0, 1)
    return z[:, 0] * y.sum()


def weight_behind_its_use(m: Any, y: Tensor, x: Tensor) -> Tensor:
    """No gradient goes to the batch, so that none asks for the weight."""
    with torch.no_grad():
        m.inner.weight.mul_(0.99)
    return y


@pytest.mark.parametrize("use", [
    list_of_views, list_at_a_place, views_without_gradients, place_seen_without_gradients, write_beside_a_view,
    form_of_the_batch, form_of_what_is_detached, form_of_a_weight, forms_of_activations, weight_behind_its_use,
])  # fmt: skip
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_they_are_as_on_one_device(mesh: str, use: Any) -> None:
    torch.manual_seed(0)
    report = verify(Net(use).double(), mesh, batch=torch.randn(4, 8, dtype=torch.float64), steps=3)
    assert report.ok, str(report)


def form_of_a_buffer(m: Any, y: Tensor, x: Tensor) -> Tensor:
    m.table.t_()
    return y * m.table.sum()


def form_of_a_place(m: Any, y: Tensor, x: Tensor) -> Tensor:
    row = y[x[0].argmax() % 4]
    row.unsqueeze_(0)
    row.mul_(2)
    return y


def strides_of_a_place(m: Any, y: Tensor, x: Tensor) -> Tensor:
    return y.t()[x[0].argmax() % 4].as_strided((2, 2), (1, 2))


@pytest.mark.parametrize(
    ("use", "line", "text"),
    [(form_of_a_buffer, "m.table.t_()", r"a buffer 'table' of another form \(\[3, 8\] .* before .* \[8, 3\] .* after"),
     (form_of_a_place, "row.", r"a change of form, in place, of a view at a place .* x\[i\]\.unsqueeze\(0\)"),
     (strides_of_a_place, "as_strided", r"as_strided of a view at a place that a tensor holds")],
)  # fmt: skip
def test_what_no_program_can_follow_is_refused(use: Any, line: str, text: str) -> None:
    with pytest.raises(CaptureError, match=text) as caught:
        verify(Net(use).double(), "dp=1", batch=torch.randn(4, 8, dtype=torch.float64))
    assert line in str(caught.value)
