"""Optimizers on the parameters of a parallel module: the numbers of one device, and DTensors in every other respect."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn.functional as F
from off_host import off_host
from processes import server
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import autopar
from autopar.ir.layout import parse_layout
from autopar.ir.mesh import parse_mesh
from autopar.parallel.tensors.parameter import ParameterTensor
from autopar.parallel.weights.distribute import Distributor

OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1, "foreach": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"maximize": True, "lr": torch.tensor(0.01)}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adamax", {"foreach": False}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("RMSprop", {"foreach": True}),
    ("ASGD", {}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adafactor", {}),
    ("Rprop", {}),
    ("Rprop", {"foreach": True}),
    ("Adamax", {"foreach": True}),
    # What these take on a GPU unless told otherwise is lists; fused kernels are there on a CPU, too.
    ("Adam", {"foreach": True, "amsgrad": True}),
    ("Adam", {"fused": True, "amsgrad": True, "weight_decay": 0.1}),
    ("NAdam", {"foreach": True}),
    ("RAdam", {"foreach": True}),
    ("Adagrad", {"foreach": True}),
    ("Adagrad", {"fused": True}),
    ("Adadelta", {"foreach": True}),
    ("ASGD", {"foreach": True}),
    ("Adafactor", {"foreach": True}),
)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).double()


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4, n, generator=random, dtype=torch.float64) for n in (6, 4))  # type: ignore[return-value]


def _spawn(work: Any, path: Path) -> None:
    server()  # whose forks start in milliseconds, where `spawn` imports torch in each process
    mp.start_processes(work, args=(str(path),), nprocs=2, start_method="forkserver")


def _join(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)


def _steps_of_every_optimizer(rank: int, mesh: str) -> None:
    batch = _batch()
    model = autopar.parallelize(_model(), mesh, loss_fn=_loss)
    start = _model().state_dict()
    for name, options in OPTIMIZERS:
        plain = _model()
        model.load_state_dict(start)
        options = copy.deepcopy(options)
        theirs = getattr(torch.optim, name)(plain.parameters(), **copy.deepcopy(options))
        ours = getattr(torch.optim, name)(model.parameters(), **options)
        for _ in range(3):
            _loss(plain, *batch).backward()
            model.forward_backward(*batch)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-10, atol=0)
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
        found = model.full_state_dict()
        for key, value in plain.state_dict().items() if rank == 0 else ():
            torch.testing.assert_close(
                found[key],
                value,
                rtol=1e-9,
                atol=1e-12,
                msg=lambda text: f"{name} {options} {mesh} {key}: {text}",  # noqa: B023
            )


def _every_optimizer(rank: int, path: str) -> None:
    _join(rank, path)
    for mesh, side in (("tp=2", nullcontext), ("dp=2", nullcontext), ("tp=2", off_host)):
        with side():  # as on the CPU, and with the branches that a GPU takes
            _steps_of_every_optimizer(rank, mesh)
    dist.destroy_process_group()


@pytest.mark.gloo
def test_every_optimizer_takes_the_steps_of_one_device(tmp_path: Path) -> None:
    _spawn(_every_optimizer, tmp_path)


def _checkpoints(rank: int, path: str) -> None:
    _join(rank, path)
    batch = _batch()
    model = autopar.parallelize(_model(), "tp=2", loss_fn=_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model.forward_backward(*batch)
        optimizer.step()
        optimizer.zero_grad()

    def everything() -> dict[str, Any]:
        names = [name for name, _ in model.named_parameters()]
        states = {
            f"{names[i]}.{key}": value
            for i, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }
        return {**model.state_dict(), **states}

    step()
    assert all(isinstance(value, DTensor) for key, value in everything().items() if not key.endswith(".step"))
    dcp.save(everything(), checkpoint_id=f"{path}/dcp")
    kept = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kept)
    step()
    after = {key: value.clone() for key, value in everything().items()}

    kept.seek(0)
    loaded = torch.load(kept, weights_only=False)
    for key, value in model.state_dict().items():  # readable without autopar, and what is whole without DTensors
        is_whole = all(placement.is_replicate() for placement in value.placements)
        assert type(loaded["model"][key]) is (torch.Tensor if is_whole else DTensor), key
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    saved = everything()
    dcp.load(saved, checkpoint_id=f"{path}/dcp")  # in place, and the same
    step()
    for key, value in everything().items():
        assert torch.equal(_local(value), _local(after[key])), key
    dist.destroy_process_group()


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@pytest.mark.gloo
def test_checkpoints_hold_plain_dtensors_and_training_goes_on(tmp_path: Path) -> None:
    _spawn(_checkpoints, tmp_path)


def _semantics(rank: int, path: str) -> None:
    """Beside DTensors of any other maker."""
    _join(rank, path)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    where = Distributor(parse_mesh("tp=2"), mesh, lambda what: None)
    whole = torch.arange(1.0, 13.0).view(4, 2 + 1)
    split = where.split(whole, parse_layout("[tp,-]"))
    other = distribute_tensor(whole, mesh, [Shard(1)])
    partial = DTensor.from_local(whole, mesh, [Partial()])
    number = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()])
    kept = split.clone()
    with torch.no_grad():
        cases = {
            "other placement": (split + other, whole + whole),
            "other shape": (split * distribute_tensor(whole[:1], mesh, [Replicate()]), whole * whole[:1]),
            "partial": (split + partial, whole + 2 * whole),
            "number": (split * number, whole * 3),
            "tensor number": (split * torch.tensor(3.0), whole * 3),
            "in place": (kept.mul_(2).add_(split, alpha=3), whole * 5),
            "operators": ((-split + 1) / 2 - split * 2, (-whole + 1) / 2 - whole * 2),
            "reduction": (split.sum(), whole.sum()),
            "norm": (torch.stack(torch._foreach_norm([split])).sum(), whole.norm()),
            "matmul": (split @ other.T, whole @ whole.T),
            "list": (torch._foreach_add([split], [other])[0], whole + whole),
            "whole number": (where.split(whole.long(), parse_layout("[tp,-]")) * 0.5, whole * 0.5),
        }
    for name, (found, expected) in cases.items():
        assert isinstance(found, DTensor), name
        assert found.dtype == expected.dtype, name
        torch.testing.assert_close(found.full_tensor(), expected, msg=name)
    before = kept
    with torch.no_grad():
        kept *= 2
        kept.clamp_(min=3)
    assert kept is before
    torch.testing.assert_close(kept.full_tensor(), (whole * 10).clamp(min=3))
    with torch.no_grad():
        kinds = (split.sqrt(), torch.zeros_like(split), split.detach(), copy.deepcopy(split), nn.Parameter(split))
    assert [type(kind) for kind in kinds] == [ParameterTensor] * len(kinds)
    weight = nn.Parameter(split)
    (weight * weight).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), 2 * whole)
    product = (weight * weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    dist.destroy_process_group()


@pytest.mark.gloo
def test_a_parameter_is_a_dtensor_in_all_but_speed(tmp_path: Path) -> None:
    _spawn(_semantics, tmp_path)
