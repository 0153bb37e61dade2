"""Parameters that lie on one stage of a pipeline: the numbers of one device, on every rank."""

from __future__ import annotations

import copy
import io, time; T0=time.time()
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import Ranks, ranks_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from autopar.ir.layout import local_part, parse_layout
from autopar.module import ParallelModule, _accumulate
from autopar.stage_tensor import StageTensor
from autopar.torch_compat import SUBCLASSED_DTENSORS, local_of

pytestmark = pytest.mark.gloo

# Layouts and homes of the parameters below; `scale` has no dims, `tied` lies on every stage.
LAYOUTS = {
    "first.weight": ("[3:tp,-]", 0),
    "first.bias": ("[3:tp]", 0),
    "norm.weight": ("[-]", 0),
    "norm.bias": ("[-]", 1),
    "scale": ("[]", 1),
    "last.weight": ("[-,tp]", 1),
    "last.bias": ("[-]", 1),
    "tied": ("[tp]", None),
}
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "foreach": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "foreach": True}),
    ("AdamW", {}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"maximize": True, "lr": torch.tensor(0.01)}),
    ("NAdam", {}),
    ("NAdam", {"foreach": True}),
    ("RAdam", {}),
    ("RAdam", {"foreach": True}),
    ("Adamax", {"foreach": False}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adagrad", {"fused": True}),
    ("Adadelta", {"foreach": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("RMSprop", {"foreach": True}),
    ("ASGD", {}),
    ("ASGD", {"foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 12), nn.LayerNorm(5), nn.Linear(4, 1)
        self.scale, self.tied = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.randn(2))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)


def plain() -> Model:
    torch.manual_seed(0)
    return Model().double()


def made(mesh: str, moved: bool = True) -> tuple[ParallelModule, Model]:
    """A parallel model whose parameters lie as after a compilation, and the plain one."""
    model = autopar.parallelize(plain(), mesh, loss_fn=lambda m, x: x.sum())
    if moved:
        model._relayout(*places(mesh))
    return model, plain()


def places(mesh: str) -> tuple[dict[str, Any], dict[str, int | None]]:
    layouts = {name: text if "tp" in mesh else text.replace("3:tp", "-").replace("tp", "-") for name, (text, _) in LAYOUTS.items()}
    return {n: parse_layout(t) for n, t in layouts.items()}, {n: home for n, (_, home) in LAYOUTS.items()}


def give_gradients(model: ParallelModule, single: Model, seed: int = 0) -> None:
    """The same random gradients to both, to each rank of `model` those that its program would give."""
    random = torch.Generator().manual_seed(seed)
    where, known = model._distributor, dict(model.named_parameters())
    for name, parameter in single.named_parameters():
        if not parameter.requires_grad:
            continue
        value = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.grad = value if parameter.grad is None else parameter.grad + value
        here = where.is_home(model._homes[name])
        part = local_part(value, model._layouts[name], where.mesh, where.coord).clone() if here else None
        _accumulate(known[name], part)


def assert_same(model: ParallelModule, single: Model, what: str) -> None:
    """Every rank's whole values, and what rank 0 gathers, are those of one device."""
    gathered, known = model.full_state_dict(), dict(model.named_parameters())
    assert bool(gathered) == (torch.distributed.get_rank() == 0)
    for key, value in single.state_dict().items():
        found = full(known[key])
        torch.testing.assert_close(found, value, rtol=1e-11, atol=1e-13, msg=f"{what} {key}")
        assert not gathered or torch.equal(gathered[key], found), key


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with ranks_of(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks_of(2) as ranks:
        yield ranks


def _optimizers(rank: int, mesh: str) -> None:
    model, _ = made(mesh)
    held, start = list(model.parameters()), plain().state_dict()
    for name, options in OPTIMIZERS:
        single, what = plain(), f"{name} {options} {mesh}"
        model.load_state_dict(start)
        model.zero_grad()
        theirs = getattr(torch.optim, name)(single.parameters(), **copy.deepcopy(options))
        ours = getattr(torch.optim, name)(model.parameters(), **copy.deepcopy(options))
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (theirs, ours)]
        for step in range(3):
            give_gradients(model, single, step)
            give_gradients(model, single, step + 10)  # accumulated
            wanted = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            torch.testing.assert_close(norm.full_tensor(), wanted, rtol=1e-12, atol=0, msg=what)
            for optimizer, schedule in zip((theirs, ours), schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=step != 1)
        assert_same(model, single, what); print(rank, time.time()-T0, what, flush=True)
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        for parameter, state in ours.state.items():
            empty = local_of(parameter).numel() == 0
            assert not empty or not any(local_of(v).numel() for v in state.values() if isinstance(v, DTensor)), what


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", "tp=2,pp=2", "pp=2,dp=2"])
def test_every_optimizer_takes_the_steps_of_one_device(four: Ranks, mesh: str) -> None:
    four.run(_optimizers, mesh)


def test_a_mesh_of_stages_alone(two: Ranks) -> None:
    two.run(_optimizers, "pp=2")
