"""A resumed run draws what the uninterrupted one would have drawn, on the same mesh or another."""

from __future__ import annotations

import logging
import logging.handlers
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import autopar
from autopar.errors import AutoparError
from autopar.parallel.session.random_state import RandomState

pytestmark = pytest.mark.gloo


class Noisy(nn.Module):
    """Dropout, a drop path and Gumbel noise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(torch.tanh(self.up(F.dropout(x, 0.1, self.training))), 0.3, self.training)
        h = h * x.new_empty(x.shape[0], 1).bernoulli_(0.7)
        return F.gumbel_softmax(self.down(h), tau=2.0)


def _made(mesh: str, seed: int = 11) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = autopar.parallelize(Noisy().double(), mesh, loss_fn=models.square_loss, seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _steps(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (16, 8))
        losses.append(float(model.forward_backward(x, y)))
        losses.append(float(model(x).detach().square().sum()))  # draws as well, and is no step
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _straight(rank: int, mesh: str) -> list[float]:
    return _steps(*_made(mesh), 0, 4)


def _save(rank: int, mesh: str, folder: str) -> list[float]:
    """Two steps, then a sharded checkpoint."""
    model, optimizer = _made(mesh)
    losses = _steps(model, optimizer, 0, 2)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "random": model.random_state,
    }
    dcp.save(state, checkpoint_id=f"{folder}/sharded")
    return losses


def _resume(rank: int, mesh: str, folder: str) -> list[float]:
    """A new module with another seed, in another process group."""
    model, optimizer = _made(mesh, seed=5)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "random": model.random_state,
    }
    dcp.load(state, checkpoint_id=f"{folder}/sharded")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert model.random_state == RandomState(11, 2, 2)
    return _steps(model, optimizer, 2, 4)


def test_two_steps_and_two_more_are_four(four: Ranks, tmp_path: Path) -> None:
    straight = _straight(0, "dp=1")
    dist.destroy_process_group()
    assert len(set(straight)) == 8
    for losses in four.run(_straight, "dp=2,tp=2"):
        assert losses == pytest.approx(straight, rel=1e-10)
    saved = four.run(_save, "dp=2,tp=2", str(tmp_path))
    for mesh in ("dp=2,tp=2", "tp=4"):
        for before, after in zip(saved, four.run(_resume, mesh, str(tmp_path)), strict=True):
            assert [*before, *after] == pytest.approx(straight, rel=1e-10), mesh
    alone = _resume(0, "dp=1", str(tmp_path))
    dist.destroy_process_group()
    assert alone == pytest.approx(straight[4:], rel=1e-10)


def _forget(rank: int) -> None:
    model, optimizer = _made("dp=2,tp=2")
    if rank != 2:
        model.random_state.load_state_dict({"seed": 11, "steps": 2, "forwards": 2})
    _steps(model, optimizer, 2, 3)


def test_a_rank_that_did_not_load_is_named(four: Ranks) -> None:
    for outcome in four.attempt(_forget):
        assert (
            outcome.error is not None
            and "rank 2 has 'random_state {'seed': 11, 'steps': 0, 'forwards': 0}'" in outcome.error
        )


def test_the_state_by_hand(tmp_path: Path) -> None:
    """torch.save instead of torch.distributed.checkpoint; the names of the weights stay the plain module's."""
    model, optimizer = _made("dp=1")
    _steps(model, optimizer, 0, 2)
    torch.save({"model": model.full_state_dict(), "random": model.random_state.state_dict()}, tmp_path / "a.pt")
    x, y = torch.randn(12, 16).double(), torch.randn(12, 8).double()
    want = float(model.forward_backward(x, y))
    dist.destroy_process_group()
    given = torch.load(tmp_path / "a.pt", weights_only=True)
    Noisy().load_state_dict(given["model"])
    again, _ = _made("dp=1", seed=0)
    again.load_state_dict(given["model"])
    other = float(again.forward_backward(x, y))
    again.random_state.load_state_dict(given["random"])
    assert float(again.forward_backward(x, y)) == pytest.approx(want, rel=1e-12) != other
    assert again.random_state == RandomState(11, 3, 2)
    dist.destroy_process_group()


def _one_file_of_all(rank: int, folder: str) -> None:
    """A script of one device that every rank runs: `torch.save` of `state_dict()`, read again."""
    model, optimizer = _made("tp=2")
    _steps(model, optimizer, 0, 1)
    for name in (f"own{rank}.pt", "last.pt"):
        if name != "last.pt" or rank == 1:  # who writes last, wins
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder) / name)
    dist.barrier()
    own = torch.load(Path(folder) / f"own{rank}.pt")
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    _steps(model, optimizer, 1, 2)
    model.load_state_dict(torch.load(Path(folder) / "last.pt")["model"])


def _told_of_parts(rank: int, folder: str) -> list[str]:
    model, optimizer = _made("tp=2")
    _steps(model, optimizer, 0, 1)
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("autopar").addHandler(handler)
    for _ in range(2):
        torch.save(model.state_dict(), Path(folder) / f"{rank}.pt")
    logging.getLogger("autopar").removeHandler(handler)
    return [record.getMessage() for record in handler.buffer]


def test_who_saves_parts_is_told_before_they_are_missed(two: Ranks, tmp_path: Path) -> None:
    """Rank 0's file alone lacks the others' parts, which nobody sees before it is read."""
    for told in two.run(_told_of_parts, str(tmp_path)):
        assert len(told) == 1 and "test_resume.py:" in told[0]
        assert "autopar.save_file(state, path) on every rank, in the place of torch.save, writes whole" in told[0]


def test_the_part_of_another_rank_is_no_part_of_mine(two: Ranks, tmp_path: Path) -> None:
    first = two.attempt(_one_file_of_all, str(tmp_path))[0]
    assert first.error is not None
    assert "the rank at tp=1 holds, and this rank is at tp=0" in first.error and "autopar.save_file" in first.error


def test_a_state_without_all_its_numbers_is_refused() -> None:
    with pytest.raises(AutoparError) as caught:
        RandomState(3, 1, 2).load_state_dict({"seed": 3, "steps": 1})
    assert str(caught.value) == (
        "random_state.load_state_dict was given ['seed', 'steps'], without forwards: load what "
        "random_state.state_dict() gave, {'seed': 3, 'steps': 1, 'forwards': 2} for example."
    )


def _file_of_one_rank(rank: int, folder: str) -> list[list[float]]:
    model, optimizer = _made("dp=2")
    _steps(model, optimizer, 0, 1)
    path, weight = Path(folder) / "net.pt", model.up.weight
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "weight": weight}
    if rank == 0:
        torch.save({**state, "random": model.random_state.state_dict()}, path)
    dist.barrier()
    given = torch.load(path)
    losses = [_steps(model, optimizer, 1, 3)]
    for each, name in ((model, "model"), (optimizer, "optimizer"), (model.random_state, "random")):
        each.load_state_dict(given[name])
    return [*losses, _steps(model, optimizer, 1, 3)]


def test_a_file_of_whole_tensors_is_one_of_one_device(two: Ranks, tmp_path: Path) -> None:
    """Where each rank has all of every tensor, `torch.save` on rank 0 writes what anyone can read."""
    for straight, again in two.run(_file_of_one_rank, str(tmp_path)):
        assert again == pytest.approx(straight, rel=1e-12)
    given = torch.load(tmp_path / "net.pt", weights_only=True)
    states = [x for each in given["optimizer"]["state"].values() for x in each.values()]
    assert {type(x) for x in (*given["model"].values(), *states)} == {Tensor}
    assert type(given["weight"]) is nn.Parameter and given["weight"].requires_grad
    Noisy().double().load_state_dict(given["model"])
