"""`mesh="auto"`: planned at the first batch, alike on all ranks, and training equals the plain module."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ranks
from side_by_side import adamw, assert_same_state
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, MachineError, MeshError
from autopar.machines import named, write_machine
from autopar.machines.here import machine_of
from autopar.runtime.tiers import disk_tier


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def made(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    width = 320  # more than waits whole: parameters are split until there is a plan
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))).double()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(2, rows, 320, generator=torch.Generator().manual_seed(rows)).double()
    return drawn[0], drawn[1]


@contextmanager
def heard() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("autopar")
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


def lies_in_file(tensor: Tensor) -> bool:
    """True for memory that is mapped from a file without a name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith("(deleted)")
    return False


def train(
    rows: int, state: Any = None, layers: int = 3, steps: int = 2, in_files: str = "", **options: Any
) -> tuple[str, list[str]]:
    """Train both for some steps. An evaluation comes before the first batch, and so does the state of an optimizer.
    in_files: "parameters" if these lie in files in the end."""
    plain = made(layers)
    with heard() as said:
        model = autopar.parallelize(copy.deepcopy(plain), "auto", loss_fn=loss_fn, **options)
        first, args = next(model.parameters()), batch(rows)
        optimizers = [adamw(each.parameters()) for each in (model, plain)]
        if state is not None:
            for optimizer in optimizers:
                optimizer.load_state_dict(copy.deepcopy(state))
        torch.testing.assert_close(model(batch(4)[0]), plain(batch(4)[0]).detach(), rtol=1e-10, atol=1e-12)
        for _ in range(steps):
            loss, want = model.forward_backward(*args), loss_fn(plain, *args)
            want.backward()
            torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-10, atol=0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert next(model.parameters()) is first, "an optimizer holds it"
        for parameter in model.parameters():
            moment = optimizers[0].state[parameter]["exp_avg"]
            is_split = parameter.to_local().shape != parameter.shape
            assert not is_split or (moment.device_mesh, moment.placements) == (
                parameter.device_mesh,
                parameter.placements,
            )
        assert_same_state(model, plain, "weights")
        assert model.compiled is not None
        assert in_files != "parameters" or lies_in_file(first.to_local())  # type: ignore[attr-defined]
        return str(model.compiled.mesh), [text for text in said if "auto" in text]


def momenta() -> Any:
    """The state of an optimizer that took a step on one device."""
    model = made()
    optimizer = adamw(model.parameters())
    loss_fn(model, *batch(4)).backward()
    optimizer.step()
    return optimizer.state_dict()


def _train(rank: int, rows: int, has_state: bool) -> tuple[str, list[str]]:
    return train(rows, momenta() if has_state else None)


@pytest.mark.gloo
@pytest.mark.parametrize(("rows", "has_state"), [(1024, False), (1, True)])
def test_training_equals_the_plain_loop(two: Ranks, rows: int, has_state: bool) -> None:
    """One row cannot be split over dp: the module moves to tp."""
    (mesh, said), (other, silent) = two.run(_train, rows, has_state)
    assert mesh == other == ("dp=2" if rows > 1 else "tp=2")
    assert len(said) == 1 and said[0].startswith(f"mesh 'auto': {mesh} ") and "a step" in said[0], said
    assert f"for 2 ranks of cpu and {rows} rows" in said[0] and "candidates: " in said[0] and not silent


@pytest.mark.gloo
def test_four_ranks(four: Ranks) -> None:
    """Both ways to divide the work at once: the module moves from four ranks of dp to dp and tp."""
    (mesh, said), *others = four.run(_train, 512, True)
    assert mesh == "dp=2,tp=2" and len(said) == 1 and "for 4 ranks of cpu and 512 rows" in said[0], said
    assert others == 3 * [(mesh, [])]


def _different_rows(rank: int) -> None:
    autopar.parallelize(made(), "auto", loss_fn=loss_fn).forward_backward(*batch(2 + 2 * rank))


def _no_machine(rank: int) -> None:
    autopar.parallelize(made(), "auto", loss_fn=loss_fn, machine="cpu" if rank else "tpu")


@pytest.mark.gloo
def test_what_ranks_must_agree_on(two: Ranks) -> None:
    rows = [outcome.error or "" for outcome in two.attempt(_different_rows)]
    assert all("ranks disagree on the rows of the batch" in text for text in rows), rows
    machines = [outcome.error or "" for outcome in two.attempt(_no_machine)]
    assert "MeshError: mesh 'auto': machine 'tpu': there is a100-80g, cpu" in machines[0]
    assert "RankError" in machines[1] and "mesh 'auto': machine 'tpu'" in machines[1], machines


def _train_on_disk(rank: int, machine: str, memory: int, where: str) -> tuple[str, list[str]]:
    return train(4, layers=12, steps=3, in_files=where, machine=machine, memory=memory)


@pytest.mark.gloo
@pytest.mark.parametrize(("memory", "where"), [(15_000_000, "optimizer"), (8_000_000, "parameters")])
def test_a_plan_on_a_disk(two: Ranks, tmp_path: Path, memory: int, where: str) -> None:
    """Neither the device nor the host has room. Red before: parameters of a plan on a disk stayed on the device, for
    the module moved as if nothing waited."""
    machine = tmp_path / "small.toml"
    disk = replace(named("cpu"), host_memory=1e7, disk=1e9, disk_folder=str(tmp_path), disk_memory=1e9)
    write_machine(disk, machine, [])
    (mesh, said), (other, _) = two.run(_train_on_disk, str(machine), memory, where)
    assert mesh == other and f"{where} on disk" in said[0], said
    assert list(tmp_path.iterdir()) == [machine], "files have no names, and go with their process"


# ---- one rank


def test_one_rank_has_a_plan_too() -> None:
    mesh, said = train(4)
    assert mesh == "dp=1" and len(said) == 1


@pytest.mark.parametrize(("memory", "where"), [("30MB", "optimizer"), (15_000_000, "parameters")])
def test_a_plan_that_fits_by_the_memory_of_the_host_alone(tmp_path: Path, memory: int | str, where: str) -> None:
    """Weights, gradients and states of AdamW are 39 MB. What waits follows the plan, and so does the optimizer."""
    machine = tmp_path / "small.toml"
    write_machine(replace(named("cpu"), host_memory=1e9, host_update=1e8), machine, [])
    with heard() as said:
        mesh, _ = train(4, layers=12, machine=str(machine), memory=memory)
    assert mesh == "dp=1" and f"{where} in host" in said[0], said


@pytest.mark.parametrize("where", ["parameters", "optimizer"])
def test_a_full_disk_that_the_plan_chose_is_named(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both sizes; and whoever started the rank reads in which folder its memory lies, if a fault ends it. Red
    before: that was left of a job's own `offload_dir=` alone."""
    machine, folder = tmp_path / "small.toml", tmp_path / "disk"
    folder.mkdir()
    disk = replace(named("cpu"), host_memory=1e7, disk=1e9, disk_folder=str(folder), disk_memory=1e9)
    write_machine(disk, machine, [])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(disk_tier, "room", lambda folder: 1000)
    memory = {"parameters": 15_000_000, "optimizer": "30MB"}[where]
    whose = {"parameters": "parameters and their gradients", "optimizer": "the states of AdamW"}[where]
    with pytest.raises(AutoparError) as raised:
        train(4, layers=12, machine=str(machine), memory=memory)
    assert re.search(
        rf"offload_dir='{folder}': {whose} take \d+ bytes on this node, and 1000 are free there.* "
        r"\(with mesh='auto' by disk_folder of the machine\)", str(raised.value),
    ), raised.value  # fmt: skip
    assert (tmp_path / "mapped").read_text() == str(folder)


def test_a_decorated_factory() -> None:
    @autopar.parallelize("auto", loss_fn=loss_fn, machine="cpu")
    def build() -> nn.Module:
        return made()

    assert float(build().forward_backward(*batch(2)).detach()) == pytest.approx(
        float(loss_fn(made(), *batch(2)).detach())
    )


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"zero": 3}, "mesh 'auto' decides zero itself: leave out zero=3, or write a mesh."),
    "shard": ({"shard": {"*": "[tp]"}}, "mesh 'auto' decides shard itself: leave out shard="),
    "local": ({"batch": "local"}, "mesh 'auto' with batch=\"local\": which part of the batch a rank passes follows"),
    "machine": ({"machine": "tpu"}, "mesh 'auto': machine 'tpu': there is a100-80g, cpu, h100-80g"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_beside_auto(name: str) -> None:
    options, text = WRONG[name]
    with pytest.raises(MeshError) as raised:
        autopar.parallelize(made(), "auto", loss_fn=loss_fn, **options)
    assert str(raised.value).startswith(text)


def test_a_machine_beside_a_mesh() -> None:
    """It is what the programs are made for."""
    model = autopar.parallelize(made(), "dp=1", loss_fn=loss_fn, machine="h200")
    model.forward_backward(*batch(2))
    assert model.compiled.plan.fixed.machine == named("h200")
    with pytest.raises(MachineError, match="machine 'tpu': there is a100-80g, cpu, h100-80g"):
        autopar.parallelize(made(), "dp=1", loss_fn=loss_fn, machine="tpu")
    with pytest.raises(MachineError, match=r"machine=3: write a name .*, the path of a file, or a Machine"):
        autopar.compile(made(), "dp=1", loss_fn=loss_fn, batch=batch(2), machine=3)  # type: ignore[arg-type]


def test_auto_needs_ranks() -> None:
    with pytest.raises(MeshError, match="mesh 'auto' is planned where ranks run: parallelize and `autopar run` take"):
        autopar.compile(made(), "auto", loss_fn=loss_fn, batch=batch(2))


def test_a_batch_without_rows() -> None:
    model = autopar.parallelize(made(), "auto", loss_fn=lambda model, scale: model[0][0].weight.sum() * scale)
    with pytest.raises(MeshError, match="mesh 'auto': a plan divides the rows of the batch, and this batch has no"):
        model.forward_backward(torch.tensor(2.0))


@pytest.mark.parametrize(
    ("name", "memory", "found"),
    [
        ("NVIDIA A100-SXM4-80GB", 85_100_000_000, "a100-80g"), ("NVIDIA H100 80GB HBM3", 85_000_000_000, "h100-80g"),
        ("NVIDIA H200", 150_100_000_000, "h200"), ("NVIDIA A100-SXM4-40GB", 42_400_000_000, None),
        ("NVIDIA H100 PCIe", 85_000_000_000, None), ("NVIDIA GH200 480GB", 100_000_000_000, None),
    ],
)  # fmt: skip
def test_the_machine_of_a_device(name: str, memory: int, found: str | None) -> None:
    if found is not None:
        assert machine_of(name, memory).name == found
        return
    with pytest.raises(MachineError, match=f"nobody knows how fast '{name}' with [0-9.]+ GB is: built in are a100-80g"):
        machine_of(name, memory)
