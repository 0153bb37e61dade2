"""States split over dp and cp on local Gloo processes: what users take out is what torch says, and fits elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import Ranks
from side_by_side import assert_close, assert_same_state
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

import autopar

pytestmark = pytest.mark.gloo

WIDTHS = (12, 10, 7)


class Odd(nn.Module):
    """Rows of a sequence; dims that four ranks divide, that two do, and that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(WIDTHS, (*WIDTHS[1:], 8), strict=True))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return functional.pad(x * self.scale.sum(), (0, 1)).square().mean()


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return Odd().double()


def _batch(step: int) -> Tensor:
    return torch.randn(6, 4, WIDTHS[0], generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def _steps(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        x = _batch(step)
        loss = model.forward_backward(x) if isinstance(model, autopar.ParallelModule) else model(x)
        if not isinstance(model, autopar.ParallelModule):
            loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _made(mesh: str, zero: int) -> tuple[Any, torch.optim.Optimizer]:
    model = autopar.parallelize(_plain(), mesh, loss_fn=lambda module, x: module(x), zero=zero)
    model.prepare(_batch(0))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _placed(rank: int, mesh: str) -> dict[str, str]:
    """Every part, of a value or a gradient, is the one that torch makes of the whole by the placements that we say."""
    model, _ = _made(mesh, 3)
    plain = _plain()
    model.forward_backward(_batch(0))
    plain(_batch(0)).backward()
    found = {}
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        for mine, whole in ((parameter, other), (parameter.grad, other.grad)):
            assert isinstance(mine, DTensor) and isinstance(whole, Tensor)
            torchs = distribute_tensor(whole.detach(), mine.device_mesh, mine.placements)
            assert mine.to_local().shape == torchs.to_local().shape, (name, rank)
            torch.testing.assert_close(mine.to_local(), torchs.to_local(), rtol=1e-10, atol=1e-14)
            torch.testing.assert_close(mine.full_tensor(), whole.detach(), rtol=1e-10, atol=1e-14)
        found[name] = str(parameter.placements)
    return found


ONE, BOTH = "(Shard(dim={}), Replicate())", "(Shard(dim={0}), Shard(dim={0}))"


@pytest.mark.parametrize("mesh", ["dp=2,cp=2", "cp=2,fsdp=2"])
def test_parts_are_those_of_torch(four: Ranks, mesh: str) -> None:
    """A dim that two axes split is never padded at its end: torch would pad the pieces of each."""
    found = four.run(_placed, mesh)
    assert all(each == found[0] for each in found)
    assert found[0] == {
        "scale": ONE.format(0),  # 5
        "layers.0.weight": BOTH.format(1),  # [10, 12]
        "layers.0.bias": ONE.format(0),
        "layers.1.weight": ONE.format(1),  # [7, 10]
        "layers.1.bias": ONE.format(0),
        "layers.2.weight": BOTH.format(0),  # [8, 7]
        "layers.2.bias": BOTH.format(0),
    }


def _three_by_two(rank: int) -> dict[str, str]:
    return _placed(rank, "dp=3,cp=2")


def test_axes_of_unequal_sizes(six: Ranks) -> None:
    found = six.run(_three_by_two)[0]
    assert found["layers.0.weight"] == BOTH.format(1)  # 12 over six ranks
    assert found["layers.1.weight"] == ONE.format(1)  # [7, 10]: 10 in 4, 4, 2


def _state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _save(rank: int, mesh: str, zero: int, folder: str) -> list[float]:
    """Two steps, then a sharded checkpoint; what leaves whole is the plain model's."""
    model, optimizer = _made(mesh, zero)
    plain = _plain()
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    losses = _steps(model, optimizer, 0, 2)
    assert losses == pytest.approx(_steps(plain, its, 0, 2), rel=1e-10)
    assert_same_state(model, plain, "weight")
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        names = [name for name, _ in plain.named_parameters()]
        got = {f"{name} {key}": whole["state"][name][key] for name in names for key in ("exp_avg", "exp_avg_sq")}
        kept = {name: its.state[parameter] for name, parameter in plain.named_parameters()}
        assert_close(got, {f"{n} {key}": kept[n][key] for n in names for key in ("exp_avg", "exp_avg_sq")}, "state")
    dcp.save(_state(model, optimizer), checkpoint_id=folder)
    return losses


def _resume(rank: int, mesh: str, zero: int, folder: str) -> list[float]:
    model, optimizer = _made(mesh, zero)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return _steps(model, optimizer, 2, 4)


def test_checkpoints_go_from_mesh_to_mesh(four: Ranks, tmp_path: Path) -> None:
    """With clipping by the global norm, which counts every part once."""
    plain = _plain()
    straight = _steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 0, 4)
    saved = four.run(_save, "dp=2,cp=2", 3, str(tmp_path / "both"))
    for mesh, zero in (("dp=2,cp=2", 3), ("dp=2,cp=2", 0), ("cp=4", 2), ("cp=2,fsdp=2", 1), ("dp=2,tp=2", 3)):
        for before, after in zip(saved, four.run(_resume, mesh, zero, str(tmp_path / "both")), strict=True):
            assert [*before, *after] == pytest.approx(straight, rel=1e-10), (mesh, zero)
    four.run(_save, "cp=4", 1, str(tmp_path / "cp"))
    for after in four.run(_resume, "dp=2,cp=2", 3, str(tmp_path / "cp")):
        assert after == pytest.approx(straight[2:], rel=1e-10)
