"""autopar.EMA beside torch's AveragedModel on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import Ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar.errors import AutoparError

pytestmark = pytest.mark.gloo
DECAY, STEPS = 0.7, 4


class Net(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 3)
        self.norm = nn.BatchNorm1d(3) if norm else nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return out


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3]).square().mean()


def net(norm: bool) -> Net:
    torch.manual_seed(0)
    return Net(norm).double()


def batch(step: int) -> Tensor:
    return torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def trained(model: Any, average: Any, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        if isinstance(model, autopar.ParallelModule):
            model.forward_backward(batch(step))
        else:
            loss_fn(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average()


def wanted(norm: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The averages, and the weights, of one device."""
    plain = net(norm)
    theirs = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    trained(plain, lambda: theirs.update_parameters(plain), range(STEPS))
    return dict(theirs.module.named_parameters()), dict(plain.named_parameters())


def same(model: Any, values: dict[str, Tensor]) -> None:
    found = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    for name, value in values.items() if found else ():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-9, atol=1e-11)


def _averages(rank: int, mesh: str, options: dict[str, Any], folder: str) -> None:
    norm = "pp" not in mesh
    averages, weights = wanted(norm)
    model = autopar.parallelize(net(norm), mesh, loss_fn=loss_fn, **options)
    ema = autopar.EMA(model, DECAY)
    trained(model, ema.update, range(STEPS))
    assert ema.updates == STEPS
    with ema.applied():
        same(model, averages)
        with pytest.raises(AutoparError, match=r"EMA\.update\(\) within EMA\.applied\(\)"):
            ema.update()
    same(model, weights)
    dcp.save({"ema": ema.state_dict()}, checkpoint_id=folder)
    again = autopar.EMA(model, DECAY)
    again.update()  # what is loaded takes the place of these
    state = {"ema": again.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["ema"])
    assert again.updates == STEPS
    with again.applied():
        same(model, averages)


@pytest.mark.parametrize(("mesh", "options"), [
    ("dp=2,tp=2", {}), ("fsdp=4", {"zero": 3}), ("pp=2,dp=2", {"microbatches": 2, "stages": ["up", "down, norm"]}),
])  # fmt: skip
def test_averages_are_those_of_one_device(four: Ranks, mesh: str, options: dict[str, Any], tmp_path: Path) -> None:
    four.run(_averages, mesh, options, str(tmp_path))


def test_a_plain_module_and_its_buffers() -> None:
    averages, _ = wanted(True)
    model = net(True)
    ema, theirs = autopar.EMA(model, DECAY, buffers=True), net(True)
    other = AveragedModel(theirs, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True)
    trained(model, ema.update, range(STEPS))
    trained(theirs, lambda: other.update_parameters(theirs), range(STEPS))
    with ema.applied():
        same(model, averages)
        torch.testing.assert_close(model.norm.running_mean, other.module.norm.running_mean)


def test_what_is_refused() -> None:
    with pytest.raises(AutoparError, match=r"^EMA\(decay=1\.0\): write a number from 0"):
        autopar.EMA(net(True), 1.0)
    ema = autopar.EMA(net(True))
    with pytest.raises(AutoparError, match=r"^EMA\.state_dict\(\) before the first update"):
        ema.state_dict()
    ema.update()
    state = ema.state_dict()
    missing = {**state, "averages": {name: one for name, one in state["averages"].items() if name != "up.bias"}}
    with pytest.raises(AutoparError, match=r"missing \['up\.bias'\], unknown \[\]\.$"):
        ema.load_state_dict(missing)
    state["averages"]["up.bias"] = torch.zeros(3)
    with pytest.raises(AutoparError, match=r"'up\.bias' has shape \[3\], and the model's is \[10\]\.$"):
        ema.load_state_dict(state)
