"""Groups of calls whose dtype follows from no operand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import VerificationError
from autopar.ir.check import verify_fused
from autopar.ir.ops.fused import fused_of


class Mask(nn.Module):
    """A bool and a number add up to torch's default dtype, which is float64 where a program is verified."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        kept = torch.logical_or(y > 0.1, y < -0.2)
        return y * torch.add(0.3333, kept, alpha=0.6667).type_as(y)


def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def test_a_bool_and_a_number_in_float64() -> None:
    x = torch.randn(6, 4)
    found = autopar.compile(Mask(), "dp=2", loss_fn=loss_fn, batch=(x,), compile="triton")
    inside = [call.target for node in found.program.calls() if (group := fused_of(node)) for call in group.calls]
    assert torch.ops.aten.logical_or.default in inside and torch.ops.aten.add.Tensor in inside
    result = autopar.verify(Mask(), "dp=2", loss_fn=loss_fn, batch=(x,), compile="triton")
    assert result.ok, str(result)


@pytest.mark.parametrize("says", [True, False])
def test_another_dtype_than_recorded_is_seen(monkeypatch: pytest.MonkeyPatch, says: bool) -> None:
    """Where the call itself says the dtype (of a bool, cast to float64), or its operands do."""
    real = verify_fused._computed

    def wrong(call: torch.fx.Node, mesh: autopar.Mesh) -> verify_fused.Made:
        to = torch.float32 if ("dtype" in call.kwargs) is says else torch.float64
        return tuple((shape, to if dtype == torch.float64 else dtype) for shape, dtype in real(call, mesh))

    def widened(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return ((y > 0).to(torch.float64) * y).mean()

    x = torch.randn(6, 4)
    autopar.compile(nn.Linear(4, 4), "dp=2", loss_fn=widened, batch=(x,), compile="triton")
    monkeypatch.setattr(verify_fused, "_computed", wrong)
    with pytest.raises(VerificationError, match=r"gives torch\.float32.* recorded as torch\.float64"):
        autopar.compile(nn.Linear(4, 4), "dp=2", loss_fn=widened, batch=(x,), compile="triton")
