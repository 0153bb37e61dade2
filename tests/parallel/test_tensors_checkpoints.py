"""Tensors that users hold go into checkpoints and out of them, from mesh to mesh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import Ranks, ranks_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from autopar.torch_compat import local_of

pytestmark = pytest.mark.gloo


class Fused(nn.Module):
    """A fused qkv, which tp splits as [3:tp,-], and vectors that tp and dp both split."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.up, self.out = nn.Linear(12, 36), nn.Linear(12, 24), nn.Linear(24, 12)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (6, 2)) for t in (q, k, v))
        x = x + ((q * k).sum(-1, keepdim=True) * v).flatten(-2)
        return self.out(torch.relu(self.up(x)))


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def _batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, 12, generator=random, dtype=torch.float64) for _ in range(2))
    return x, y


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def _made(mesh: str, name: str, zero: int, early: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    """A model and an optimizer; `early`: whose states exist before the parameters have their layouts."""
    model = autopar.parallelize(Fused(), mesh, loss_fn=_loss, zero=zero)
    optimizer = OPTIMIZERS[name](model.parameters()) if early else None
    model.prepare(*_batch())
    return model, optimizer or OPTIMIZERS[name](model.parameters())


def _plain(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    plain = Fused()
    optimizer = OPTIMIZERS[name](plain.parameters())
    _steps(plain, optimizer, steps)
    return plain, optimizer


def _steps(model: Any, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        if not isinstance(model, autopar.ParallelModule):
            _loss(model, *_batch()).backward()
        else:
            model.forward_backward(*_batch())
        optimizer.step()
        optimizer.zero_grad()


def _same(model: Any, plain: nn.Module, what: str) -> None:
    for name, p in model.named_parameters():
        wanted = plain.get_parameter(name).detach()
        torch.testing.assert_close(p.full_tensor().detach(), wanted, rtol=1e-10, atol=1e-12, msg=f"{what} {name}")


def _same_states(model: Any, optimizer: Any, plain: nn.Module, theirs: Any) -> None:
    for name, p in model.named_parameters():
        for key, value in theirs.state[plain.get_parameter(name)].items():
            got = optimizer.state[p][key]
            got = got.full_tensor() if isinstance(got, DTensor) else got
            torch.testing.assert_close(got, value, rtol=1e-10, atol=1e-12, msg=f"{name} {key}")


def _save(rank: int, mesh: str, name: str, zero: int, early: bool, folder: str) -> list[str]:
    model, optimizer = _made(mesh, name, zero, early)
    _steps(model, optimizer, 2)
    plain, theirs = _plain(name, 2)
    _same(model, plain, "trained")
    _same_states(model, optimizer, plain, theirs)
    for key, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), model.get_parameter(key).full_tensor())
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    return [str(p.placements) for p in model.parameters()]


def _load(rank: int, mesh: str, name: str, zero: int, folder: str) -> None:
    model, optimizer = _made(mesh, name, zero)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    plain, theirs = _plain(name, 2)
    _same(model, plain, "loaded")
    _same_states(model, optimizer, plain, theirs)
    _steps(model, optimizer, 1)
    _steps(plain, theirs, 1)
    _same(model, plain, "went on")
    assert all(local_of(p).numel() <= p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "zero", "early", "to"),
    [
        ("AdamW", 1, False, ("tp=4", 0)),
        ("Adagrad", 3, True, ("dp=2,pp=2", 1)),
        ("SGD", 2, True, ("dp=4", 3)),
    ],
)
def test_states_go_from_mesh_to_mesh(
    four: Ranks, tmp_path: Path, name: str, zero: int, early: bool, to: tuple[str, int]
) -> None:
    placements = four.run(_save, "dp=2,tp=2", name, zero, early, str(tmp_path))[0]
    assert any("_StridedShard" in text for text in placements), placements
    four.run(_load, to[0], name, to[1], str(tmp_path))
    four.run(_load, "dp=2,tp=2", name, zero, str(tmp_path))
    plain = Fused()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    for key, value in _plain(name, 2)[0].state_dict().items():
        torch.testing.assert_close(state["model"][key], value, rtol=1e-10, atol=1e-12)


def _whole(rank: int) -> None:
    """torch's functions for whole state dicts: out of ours into a plain module, and back, also from rank 0 alone."""
    model, optimizer = _made("dp=2,tp=2", "AdamW", 1)
    _steps(model, optimizer, 2)
    plain, theirs = _plain("AdamW", 2)
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    states = get_optimizer_state_dict(model, optimizer, options=options)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
    twin, other = _plain("AdamW", 0)
    set_model_state_dict(twin, weights, options=options)
    set_optimizer_state_dict(twin, other, copy.deepcopy(states), options=options)  # which it keeps
    _steps(twin, other, 1)
    _steps(plain, theirs, 1)
    _same_plain(twin, plain)
    for extra in ({}, {"broadcast_from_rank0": True}, {"cpu_offload": True}):
        again, fresh = _made("dp=4" if "broadcast_from_rank0" in extra else "dp=2,tp=2", "AdamW", 3)
        options = StateDictOptions(full_state_dict=True, **extra)
        given = (weights, states) if rank == 0 or "broadcast_from_rank0" not in extra else ({}, {})
        set_model_state_dict(again, copy.deepcopy(given[0]), options=options)
        set_optimizer_state_dict(again, fresh, copy.deepcopy(given[1]), options=options)
        _steps(again, fresh, 1)
        _same(again, plain, str(extra))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(AutoparError, match="a fused weight, of which a rank holds several blocks"):
        set_model_state_dict(model, weights if rank == 0 else {}, options=options)


def _same_plain(a: nn.Module, b: nn.Module) -> None:
    for name, value in a.state_dict().items():
        torch.testing.assert_close(value, b.state_dict()[name], rtol=1e-10, atol=1e-12)


def test_whole_state_dicts_of_torch(four: Ranks) -> None:
    four.run(_whole)


def test_unequal_axes(tmp_path: Path) -> None:
    with ranks_of(6) as six:
        placements = six.run(_save, "dp=2,tp=3", "Adagrad", 1, True, str(tmp_path))[0]
        assert any("sf=3" in text for text in placements), placements
        six.run(_load, "dp=3,tp=2", "Adagrad", 3, str(tmp_path))
