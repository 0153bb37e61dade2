"""A checkpoint of any mesh is loaded on any other one; `python -m benchmarks.checkpoints` tries all pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import autopar
from autopar.checkpoint import folder
from autopar.checkpoint.manifest import Manifest
from autopar.parallel.module import ParallelModule
from autopar.parallel.tensors.placed import PlacedTensor
from benchmarks.checkpoints import Model, Way, again, differences, train

pytestmark = pytest.mark.gloo

CHAIN = (
    Way("fsdp=2,tp=2"),
    Way("pp=2,dp=2", (("microbatches", 2), ("zero", 1))),
    Way("dp=2,ep=2", (("zero", 3),)),
    Way("cp=2,dp=2"),
)


def test_what_comes_back_is_what_went_in(four: Ranks, tmp_path: Path) -> None:
    """Each mesh loads what the one before it saved, and goes on with the losses of the first."""
    straight = four.run(train, CHAIN[0], str(tmp_path / "0"))[0]
    for at, way in enumerate((*CHAIN[1:], CHAIN[0]), 1):
        losses = four.run(again, way, str(tmp_path / f"{at - 1}"), str(tmp_path / f"{at}"))
        assert differences(tmp_path / "0", tmp_path / f"{at}") == [], str(way)
        assert losses[0] == losses[3] == pytest.approx(straight, rel=1e-10), str(way)
    manifest = Manifest.read(folder.newest(tmp_path / "4"))
    assert len(manifest.files) == 4, "replicas take turns"
    names = [(piece.offset, name) for name, saved in manifest.tensors.items() for piece in saved.pieces]
    assert len(names) == len(set(names)), "no block twice"
    _plain(tmp_path / "4")


def _plain(path: Path) -> None:
    """The plain module on one device, without any mesh."""
    model = Model().double()
    groups = ([p for p in model.parameters() if (p.ndim > 1) is big] for big in (True, False))
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    assert not dist.is_initialized()
    loaded = autopar.load(path, model, optimizer)
    assert (loaded.step, loaded.extra) == (2, {"at": 2})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    again = path.with_name("plain")
    autopar.save(again, model, optimizer, step=2, extra={"at": 2})
    assert differences(path, again) == ["state", "own"], "no random state of a model, no scheduler and no loader"


def _pair(rank: int, path: str, mesh: str) -> list[float]:
    """Two networks, one of them plain, each with an optimizer that sees whole matrices or none."""
    torch.manual_seed(rank if mesh == "tp=2,dp=2" else 5)
    first = autopar.parallelize(
        nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double(), mesh,
        loss_fn=lambda model, x: model(x).square().mean(),
    )  # fmt: skip
    torch.manual_seed(1)
    second = nn.Linear(8, 2).double()
    muon = torch.optim.Muon([p for p in first.parameters() if p.ndim == 2], lr=0.1)
    rest = torch.optim.SGD([p for p in first.parameters() if p.ndim < 2], lr=0.1, momentum=0.9)
    rows = torch.optim.Adafactor(second.parameters(), lr=0.1)
    models, optimizers = {"generator": first, "critic": second}, {"muon": muon, "rest": rest, "rows": rows}
    x = torch.arange(96.0).double().view(12, 8).cos()

    def steps() -> list[float]:
        losses = []
        for _ in range(2):
            losses.append(first.forward_backward(x).item())
            F.mse_loss(second(x), x[:, :2]).backward()
            losses.append(second.weight.detach().sum().item())
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
        return losses

    if mesh == "tp=2,dp=2":
        steps()
        autopar.save(path, models, optimizers, step=2)
    else:
        autopar.load(path, models, optimizers)
    assert isinstance(first, ParallelModule)
    return steps()


def test_several_models_and_optimizers(four: Ranks, tmp_path: Path) -> None:
    wanted = four.run(_pair, str(tmp_path), "tp=2,dp=2")[0]
    for losses in four.run(_pair, str(tmp_path), "dp=4"):
        assert losses == pytest.approx(wanted, rel=1e-10)


def _own(rank: int, path: str, size: int) -> Any:
    """What a rank has for itself: its generator, and its place in its data."""
    model = autopar.parallelize(nn.Linear(4, 4), f"dp={size}", loss_fn=lambda model, x: model(x).mean())
    loader = _Own()
    if size == 4:
        loader.at = 10 + rank
        torch.manual_seed(rank)
        autopar.save(path, model, step=1, loader=loader)
        drawn = torch.rand(1).item()
        torch.manual_seed(9)
        autopar.load(path, model, loader=loader)
        return drawn == torch.rand(1).item(), loader.at
    return None


class _Own:
    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_what_each_rank_has_for_itself(four: Ranks, tmp_path: Path) -> None:
    assert four.run(_own, str(tmp_path), 4) == [(True, 10 + rank) for rank in range(4)]
    plain = nn.Linear(4, 4)
    autopar.load(tmp_path, plain)
    with pytest.raises(autopar.AutoparError) as caught:
        autopar.load(tmp_path, plain, loader=_Own())
    assert str(caught.value) == (
        "each of the 4 ranks that saved has a loader at another place; there is 1 now: leave out loader= and set its "
        "place yourself, or load on 4 ranks."
    )


def _unlike(rank: int, path: str, what: str) -> None:
    model = autopar.parallelize(nn.Linear(4, 4), "dp=4", loss_fn=lambda model, x: model(x).mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autopar.save(path, model, optimizer, step=1)
    if what == "extra":
        autopar.save(path, model, step=2, extra={"best": rank // 3})
    if what == "folder" and rank == 2:
        path += "/elsewhere"
    if what == "missing":
        fresh = nn.Linear(4, 4) if rank != 1 else nn.Linear(4, 3)
        autopar.load(path, fresh)
    if what == "alone" and rank:
        optimizer.step()
        model.forward_backward(torch.ones(4, 4))
    autopar.load(path, model, optimizer)


UNLIKE = {
    "extra": "ranks disagree on the state:\n  rank 3 has '\"best\": 1' where the others have '\"best\": 0'",
    "folder": "ranks disagree on the arguments:\n  rank 2 has 'directory=",
    "missing": "size mismatch for weight: copying a param with shape torch.Size([4, 4]) from checkpoint, the shape in "
    "current model is torch.Size([3, 4]).",
    "alone": "every rank must make the same calls",
}


@pytest.mark.parametrize("what", UNLIKE)
def test_ranks_agree(four: Ranks, tmp_path: Path, what: str) -> None:
    outcomes = four.attempt(_unlike, str(tmp_path), what)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is not None and UNLIKE[what] in outcome.error, f"rank {rank}: {outcome.error}"
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")], "nothing half-written stays"
    assert json.loads((folder.newest(tmp_path) / "manifest.json").read_text())["step"] == 1


def _odd(
    rank: int, source: str, target: str, mesh: str, options: dict[str, Any], kind: str, early: bool
) -> list[float]:
    """Sizes that no axis divides, a matrix that waits in parts for the first program, masters, a loss scale. Train and
    save, or load and save again; either way two more steps. early: load before there is a program."""
    torch.manual_seed(len(target))
    dtype = torch.float32 if "precision" in options else torch.float64
    plain = nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 301), nn.Tanh(), nn.Linear(301, 3)).to(dtype)
    model = autopar.parallelize(
        plain, mesh, loss_fn=lambda m, x: 64 * m(x).square().mean(), seed=len(target), **options
    )
    x = torch.arange(84.0, dtype=dtype).view(12, 7).cos()
    if not early:
        model.prepare(x)
    parameters = [*model.parameters()]
    optimizer = {
        "Adam": lambda: torch.optim.Adam(parameters, lr=0.01),
        "Adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
        "Adafactor": lambda: torch.optim.Adafactor(parameters, lr=0.01),
        "LBFGS": lambda: torch.optim.LBFGS(parameters, lr=0.01, max_iter=2, history_size=3),
    }[kind]()

    def closure() -> float:
        optimizer.zero_grad()
        losses.append(model.forward_backward(x).item())
        return losses[-1]

    def steps() -> list[float]:
        losses.clear()
        for _ in range(2):
            if kind == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        return [*losses]

    losses: list[float] = []
    if source:
        autopar.load(source, model, optimizer)
    else:
        steps()
    autopar.save(target, model, optimizer, step=2)
    return steps()


ODD: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]], str, bool]] = {
    "zero": (("dp=4", {"zero": 3}), ("tp=2,dp=2", {"zero": 1}), "Adam", True),
    "factors": (("fsdp=4", {}), ("dp=2,tp=2", {}), "Adafactor", True),
    "states of no steps": (("tp=4", {}), ("dp=4", {"zero": 2}), "Adagrad", False),
    "lists": (("dp=2,tp=2", {}), ("dp=4", {}), "LBFGS", False),
    "masters": (("dp=4", {"zero": 3, "precision": "bf16"}), ("dp=2,tp=2", {"precision": "bf16"}), "Adam", False),
    "scale": (("dp=2,tp=2", {"precision": "fp16"}), ("dp=4", {"zero": 1, "precision": "fp16"}), "Adam", True),
}


@pytest.mark.parametrize("what", ODD)
def test_sizes_optimizers_and_precisions(four: Ranks, tmp_path: Path, what: str) -> None:
    (mesh, options), (other, others), kind, early = ODD[what]
    a, b, c = (str(tmp_path / name) for name in ("a", "bb", "ccc"))
    straight = four.run(_odd, "", a, mesh, options, kind, False)[0]
    there = four.run(_odd, a, b, other, others, kind, early)[0]
    back = four.run(_odd, b, c, mesh, options, kind, early)[0]
    assert differences(a, b) == differences(a, c) == []
    assert back == straight, "to the bit on the same mesh"
    assert there == pytest.approx(straight, rel=1e-10 if "precision" not in options else 2e-2)


def _foreign(rank: int, path: str) -> None:
    """A state that is a DTensor of torch's own, as its loaders make one where no step was before."""
    torch.manual_seed(0)
    model = autopar.parallelize(nn.Linear(6, 4).double(), "tp=4", loss_fn=lambda m, x: m(x).sum())
    model.forward_backward(torch.ones(2, 6).double())
    optimizer, again = (torch.optim.Adam(model.parameters()) for _ in range(2))
    optimizer.step()
    value = torch.arange(24.0).double().view(4, 6)
    held: Any = model.get_parameter("weight")
    foreign = held.detach().redistribute(placements=[Shard(0)])
    assert isinstance(foreign, DTensor) and not isinstance(foreign, PlacedTensor)
    foreign.to_local().copy_(value[rank : rank + 1])
    optimizer.state[held]["exp_avg"] = foreign
    autopar.save(path, model, optimizer)
    autopar.load(path, model, again)
    assert torch.equal(again.state[held]["exp_avg"].full_tensor(), value)


def test_states_that_torch_made(four: Ranks, tmp_path: Path) -> None:
    four.run(_foreign, str(tmp_path))
