"""Parameters of stages go into checkpoints and out of them, from mesh to mesh."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import Ranks
from test_stage_parameters import assert_same, give_gradients, made, places, plain
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import autopar

pytestmark = pytest.mark.gloo


def _trained(
    mesh: str, steps: int, moved: bool = True
) -> tuple[Any, torch.optim.Optimizer, Any, torch.optim.Optimizer]:
    model, single = made(mesh, moved)
    pair = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, single)]
    for step in range(steps):
        _step(model, single, pair, step)
    return model, pair[0], single, pair[1]


def _step(model: Any, single: Any, pair: Any, step: int) -> None:
    give_gradients(model, single, step)
    for optimizer in pair:
        optimizer.step()
        optimizer.zero_grad()


def _save(rank: int, mesh: str, folder: str) -> None:
    model, optimizer, *_ = _trained(mesh, 2)
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder
    )


def _load(rank: int, mesh: str, folder: str, moved: bool) -> None:
    model, optimizer, *_ = _trained(mesh, 0, moved)
    _, _, single, theirs = _trained(mesh, 2)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if not moved:
        model._store.relayout(*places(mesh))
    assert_same(model, single, "loaded")
    _step(model, single, (optimizer, theirs), 7)
    assert_same(model, single, "after a step")


@pytest.mark.parametrize("moved", [True, False])
@pytest.mark.parametrize("meshes", [("pp=2,tp=2", "tp=2,pp=2"), ("pp=4", "pp=2,dp=2"), ("pp=2,dp=2", "dp=2,tp=2")])
def test_a_sharded_checkpoint_goes_from_mesh_to_mesh(four: Ranks, tmp_path: Path, meshes: Any, moved: bool) -> None:
    four.run(_save, meshes[0], str(tmp_path))
    four.run(_load, meshes[1], str(tmp_path), moved)


def _by_hand(rank: int) -> None:
    """torch.save on every rank."""
    model, optimizer, single, theirs = _trained("pp=2,tp=2", 2)
    kept = io.BytesIO()
    torch.save({"model": dict(model.named_parameters()), "optimizer": optimizer.state_dict()}, kept)
    _step(model, single, (optimizer, theirs), 3)
    kept.seek(0)
    again, fresh, twin, other = _trained("pp=2,tp=2", 2)
    _step(again, twin, (fresh, other), 9)
    loaded = torch.load(kept, weights_only=False)
    again.load_state_dict(loaded["model"])
    fresh.load_state_dict(loaded["optimizer"])
    _step(again, plain(), (fresh,), 3)
    assert_same(again, single, "by hand")
    again.load_state_dict(single.state_dict())  # whole tensors
    assert_same(again, single, "whole")
    before, *_ = _trained("pp=2,tp=2", 0, moved=False)
    before.load_state_dict(loaded["model"])  # into parameters that have no owner yet
    before.load_state_dict(again.state_dict())
    assert_same(before, single, "before")


def test_a_checkpoint_by_hand(four: Ranks) -> None:
    four.run(_by_hand)


def _full_state_dict(rank: int, mesh: str) -> None:
    """torch's own way to whole tensors and back (states of a parameter without dims come back as plain tensors)."""
    model, optimizer, single, theirs = _trained(mesh, 2)
    gather = StateDictOptions(full_state_dict=True)
    weights, states = (
        get_model_state_dict(model, options=gather),
        get_optimizer_state_dict(model, optimizer, options=gather),
    )
    for name, value in single.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=1e-13)
    again, fresh, *_ = _trained(mesh, 1)
    set_model_state_dict(again, weights, options=gather)
    set_optimizer_state_dict(again, fresh, states, options=gather)
    for m in (again, single):
        m.get_parameter("scale").requires_grad_(False)
    _step(again, single, (fresh, theirs), 3)
    assert_same(again, single, "whole")


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "pp=4"])  # a stage alone is a mesh of one rank
def test_whole_state_dicts_of_torch(four: Ranks, mesh: str) -> None:
    four.run(_full_state_dict, mesh)


def _whole_states_again(rank: int) -> None:
    """What torch loads are DTensors of its own; the next whole state dict has the states of all stages all the same."""
    gather, loss = StateDictOptions(full_state_dict=True), lambda m, x, y: nn.functional.mse_loss(m(x), y)
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    model = autopar.parallelize(copy.deepcopy(single), "pp=2", loss_fn=loss, microbatches=2)
    optimizer, theirs = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, single))
    x, y = torch.randn(4, 4).double(), torch.randn(4, 2).double()

    def step() -> None:
        model.forward_backward(x, y)
        loss(single, x, y).backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()

    step()
    states = get_optimizer_state_dict(model, optimizer, options=gather)
    kept = io.BytesIO()
    torch.save(optimizer.state_dict(), kept)
    kept.seek(0)
    for load in (
        lambda: set_optimizer_state_dict(model, optimizer, copy.deepcopy(states), options=gather),  # noqa: B023
        lambda: optimizer.load_state_dict(torch.load(kept, weights_only=False)),
    ):
        load()
        again = get_optimizer_state_dict(model, optimizer, options=gather)["state"]
        for name, known in states["state"].items():
            for key, value in known.items():
                torch.testing.assert_close(again[name][key], value, rtol=0, atol=0, msg=f"{name} {key}")
        for p, q in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(optimizer.state[p]["exp_avg"].full_tensor(), theirs.state[q]["exp_avg"])
        step()
        states = get_optimizer_state_dict(model, optimizer, options=gather)
        kept.seek(0)
        torch.save(optimizer.state_dict(), kept)
        kept.seek(0)
    for name, value in single.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), value.detach(), rtol=1e-11, atol=1e-13)


def test_whole_states_are_whole_after_a_load(two: Ranks) -> None:
    two.run(_whole_states_again)


def _received(rank: int) -> tuple[int, int]:
    """Bytes that a rank receives for a state dict, and the bytes of what is split in it."""
    torch.manual_seed(0)
    model = autopar.parallelize(
        nn.Linear(8, 12), "dp=2,tp=2", loss_fn=lambda m, x: m(x).sum(), shard={"weight": "[tp,-]"}
    )
    model.prepare(torch.ones(4, 8))
    received, gather = 0, dist.gather

    def counted(tensor: Any, out: Any = None, **options: Any) -> Any:
        nonlocal received
        received += sum(each.nbytes for each in out or ())
        return gather(tensor, out, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "gather", counted)
        whole = model.full_state_dict()
    if rank == 0:
        torch.testing.assert_close(whole["weight"], model.weight.full_tensor().detach())
    else:
        model.weight.full_tensor()
    return received, 12 * 8 * 4


def test_a_whole_value_is_received_once(four: Ranks) -> None:
    """Red before: a part came from each of the ranks that hold the same one."""
    (mine, whole), *others = four.run(_received)
    assert whole <= mine <= whole + 12 * 4  # the bias may be split, too
    assert [received for received, _ in others] == [0, 0, 0]
