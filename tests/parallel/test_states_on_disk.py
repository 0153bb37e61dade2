"""Optimizer states in files: the same bits as on the device, nothing left behind, errors before a weight changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import offload_case as case
import pytest
import torch
from test_offloaded_states import OPTIMIZERS, part, train

import autopar
from autopar.errors import MachineError, PlanError
from autopar.ir.modules import is_named
from autopar.ir.options import read_offload
from autopar.machines import named
from autopar.machines.runners import disk_speed
from autopar.runtime.tiers import disk_tier
from autopar.runtime.tiers.host_tier import BACK, OUT
from autopar.torch_compat import local_of

NAMES = ("AdamW", "Adam amsgrad", "SGD", "Adafactor", "Lion", "a subclass")
CPU = torch.device("cpu")


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [part(x) for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor) and x.ndim]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_step_to_the_bit(name: str, tmp_path: Path):
    want, plain, _ = train(OPTIMIZERS[name], 3)
    got, other, _ = train(OPTIMIZERS[name], 3, offload="optimizer", offload_dir=tmp_path)
    for p, q in zip(want.parameters(), got.parameters(), strict=True):
        assert torch.equal(local_of(p), local_of(q)) and torch.equal(local_of(p.grad), local_of(q.grad))
    for mine, its in zip(states_of(plain), states_of(other), strict=True):
        assert torch.equal(mine, its)
    assert not any(tmp_path.iterdir()), "files have no names"


def mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    """Of this process, as the system says."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{folder}/" in line]
    ends = (line.split()[0].split("-") for line in lines)
    return [(int(begin, 16), int(end, 16)) for begin, end in ends]


def mapped_bytes(folder: Path) -> int:
    return sum(end - begin for begin, end in mapped_ranges(folder))


def test_states_lie_in_files_and_the_reports_say_how_many_bytes(tmp_path: Path):
    _, optimizer, _ = train(OPTIMIZERS["AdamW"], 1, offload="optimizer", offload_dir=str(tmp_path))
    bytes_ = sum(x.nbytes for x in states_of(optimizer))
    assert bytes_ <= mapped_bytes(tmp_path) <= bytes_ + 64 * 4096
    found = case.compiled("shallow", "dp=1", torch.float64, offload="optimizer", offload_dir=str(tmp_path))
    report = found.memory()
    assert (report.disk, report.host) == (bytes_, 0) and f"on the disk {bytes_:,}" in str(report)
    there = case.compiled("shallow", "dp=1", torch.float64, offload="optimizer").memory()
    assert (there.disk, there.host, there.peak) == (0, bytes_, report.peak)


def test_the_time_of_a_step_is_that_of_what_is_read_and_written():
    """AdamW's two moments, each read and written once, of all ranks of the node; of patterns a part of that."""
    machine = replace(named("h100-80g"), disk=1e6)
    every = case.compiled("shallow", "dp=2", offload="optimizer", offload_dir="/x")
    bytes_ = 2 * every.memory().disk
    assert every.time(machine).optimizer == pytest.approx(2 * bytes_)  # us: two ranks share a disk of a byte a us
    some = case.compiled("shallow", "dp=2", offload={"optimizer": ["blocks.0-1"]}, offload_dir="/x")
    assert some.time(machine).optimizer == pytest.approx(2 * 2 * some.memory().disk)
    assert some.memory().disk < every.memory().disk
    assert case.compiled("shallow", "dp=2", offload="optimizer").time(machine).optimizer < bytes_


def test_a_checkpoint_is_the_same_and_is_loaded_into_files(tmp_path: Path):
    _, plain, _ = train(OPTIMIZERS["AdamW"], 2)
    options: dict[str, Any] = {"offload": "optimizer", "offload_dir": tmp_path}
    saved = train(OPTIMIZERS["AdamW"], 2, **options)[1].state_dict()
    _, other, _ = train(OPTIMIZERS["AdamW"], 1, **options)
    other.load_state_dict(saved)
    before = mapped_bytes(tmp_path)
    assert before > 0
    for mine, its in zip(states_of(plain), states_of(other), strict=True):
        assert torch.equal(mine, its)


def test_of_parameters_that_wait_the_states_are_on_the_disk(tmp_path: Path):
    options = {"offload": "parameters"}
    want, _, _ = train(OPTIMIZERS["AdamW"], 3, **options)
    got, optimizer, _ = train(OPTIMIZERS["AdamW"], 3, **options, offload_dir=tmp_path)
    for p, q in zip(want.parameters(), got.parameters(), strict=True):
        assert torch.equal(local_of(p), local_of(q))
    bytes_ = sum(x.nbytes for x in states_of(optimizer))
    assert mapped_bytes(tmp_path) >= bytes_
    report = case.compiled("shallow", "dp=1", torch.float64, **options, offload_dir=str(tmp_path)).memory()
    assert report.disk == bytes_ and report.host == bytes_  # weights and gradients are as large as both moments


def test_parameters_and_gradients_lie_in_files_too(tmp_path: Path):
    """To the bit, with micro-batches and without; nothing of them is in memory of the process's own."""
    for more in ({}, {"microbatches": 2}):
        there: dict[str, Any] = {"offload": {"parameters": "disk"}, "offload_dir": tmp_path, **more}
        want, _, _ = train(OPTIMIZERS["AdamW"], 3, offload="parameters", **more)
        got, optimizer, _ = train(OPTIMIZERS["AdamW"], 3, **there)
        for p, q in zip(want.parameters(), got.parameters(), strict=True):
            assert torch.equal(local_of(p), local_of(q)) and torch.equal(local_of(p.grad), local_of(q.grad))
        parts = [local_of(p) for p in got.parameters()]
        starts = [x.data_ptr() for p in got.parameters() for x in (local_of(p), local_of(p.grad))]
        files = [range(*ends) for ends in mapped_ranges(tmp_path)]
        assert all(any(start in one for one in files) for start in starts)
        bytes_ = sum(x.nbytes for x in (*states_of(optimizer), *parts, *parts))
        report = case.compiled("shallow", "dp=1", torch.float64, **{**there, "offload_dir": str(tmp_path)}).memory()
        assert (report.disk, report.host) == (bytes_, 0)
        assert not any(tmp_path.iterdir()), "files have no names"


def test_files_want_a_folder():
    with pytest.raises(PlanError) as caught:
        case.compiled("shallow", "dp=1", offload={"parameters": "disk"})
    assert str(caught.value) == "offload={'parameters': 'disk'}: say in which folder files may lie, by offload_dir=."
    assert read_offload("parameters=disk,activations=0.5") == {"parameters": "disk", "activations": 0.5}


def test_the_time_of_parameters_in_files_is_the_disk_s():
    machine = replace(named("h100-80g"), disk=1e6)
    memory = case.compiled("shallow", "dp=2", offload="parameters", offload_dir="/x")
    files = case.compiled("shallow", "dp=2", offload={"parameters": "disk"}, offload_dir="/x")
    every = files.memory().disk / 4  # weights; with gradients and two moments it is four times as much
    found, before = files.time(machine), memory.time(machine)
    assert found.optimizer == pytest.approx(2 * 7 * every)  # us: two ranks share a disk of a byte a us
    assert found.total - found.optimizer > 2 * 2 * every > 10 * (before.total - before.optimizer)


KILLED = """
import sys, os, signal
sys.path[:0] = {paths!r}
from test_offloaded_states import OPTIMIZERS, train
held = train(OPTIMIZERS["AdamW"], 1, offload={{"parameters": "disk"}}, offload_dir={folder!r})
assert {folder!r} in open("/proc/self/maps").read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path: Path):
    script = textwrap.dedent(KILLED).format(paths=sys.path, folder=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not any(tmp_path.iterdir())


# -- patterns ---------------------------------------------------------------------------------------------------------


def test_states_of_the_modules_that_patterns_name_wait():
    patterns = ["blocks.1-2", "he*"]
    want, _, _ = train(OPTIMIZERS["AdamW"], 3)
    got, optimizer, _ = train(OPTIMIZERS["AdamW"], 3, offload={"optimizer": patterns})
    for p, q in zip(want.parameters(), got.parameters(), strict=True):
        assert torch.equal(local_of(p), local_of(q))
    names = [n for n, _ in got.named_parameters() if any(is_named(n, one) for one in patterns)]
    assert len(names) == 2 * 6 + 2
    report = case.compiled("shallow", "dp=1", torch.float64, offload={"optimizer": patterns}).memory()
    named = dict(got.named_parameters())
    assert report.host == 2 * sum(local_of(named[n]).nbytes for n in names)
    assert optimizer.state


def test_a_pattern_that_names_nothing_is_refused_before_a_weight_changes():
    with pytest.raises(PlanError) as caught:
        train(OPTIMIZERS["AdamW"], 1, offload={"optimizer": ["block.*"]})
    assert str(caught.value).startswith(
        """offload={"optimizer": ['block.*']}: the pattern 'block.*' names no module. Nearest names: """
    )


# -- bad folders ------------------------------------------------------------------------------------------------------


def test_a_folder_that_takes_no_files_is_refused_at_once(tmp_path: Path):
    for folder in (tmp_path / "none", Path("/proc")):
        with pytest.raises(PlanError, match=f"offload_dir='{folder}': states cannot lie there: "):
            train(OPTIMIZERS["SGD"], 1, offload="optimizer", offload_dir=folder)
    with pytest.raises(PlanError, match="offload_dir='x' is of states that wait, and none do: write offload="):
        autopar.compile(torch.nn.Linear(2, 2), "dp=1", loss_fn=case.squares, batch=torch.ones(2, 2), offload_dir="x")
    with pytest.raises(MachineError, match="--disk /none: no file can be written there"):
        disk_speed(Path("/none"))


def test_a_disk_that_is_too_small_is_refused_before_a_weight_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, loss_fn, batch = case.deep(4)
    options: dict[str, Any] = {"offload": "optimizer", "offload_dir": tmp_path}
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, device="cpu", **options)
    optimizer = torch.optim.AdamW(parallel.parameters())
    parallel.forward_backward(*batch)
    before = [local_of(p).clone() for p in parallel.parameters()]
    bytes_ = sum(2 * x.nbytes for x in before)
    monkeypatch.setattr(disk_tier, "room", lambda folder: bytes_ - 1)
    with pytest.raises(
        PlanError, match=f"'{tmp_path}': the states of AdamW take {bytes_} bytes on this node, and {bytes_ - 1} are"
    ):
        optimizer.step()
    assert all(torch.equal(local_of(p), x) for p, x in zip(parallel.parameters(), before, strict=True))
    assert all(p.grad is not None for p in parallel.parameters()) and not optimizer.state
    monkeypatch.setattr(disk_tier, "room", lambda folder: bytes_)
    optimizer.step()
    assert not all(torch.equal(local_of(p), x) for p, x in zip(parallel.parameters(), before, strict=True))


def test_a_disk_that_is_too_small_for_parameters_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_tier, "room", lambda folder: 1000)
    model, loss_fn, _ = case.deep(1)
    bytes_ = 2 * sum(p.nbytes for p in model.parameters())
    with pytest.raises(PlanError) as caught:
        autopar.parallelize(
            model, "dp=1", loss_fn=loss_fn, device="cpu", offload={"parameters": "disk"}, offload_dir=tmp_path
        )
    assert f"parameters and their gradients take {bytes_} bytes on this node, and 1000 are free" in str(caught.value)


def test_a_file_that_finds_no_room_is_an_error_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PlanError, match=f"'{tmp_path}': 4096 bytes cannot lie there: No space left"):
        disk_tier.mapped(tmp_path, 4096)


# -- copies in threads ------------------------------------------------------------------------------------------------


def test_a_copy_back_waits_for_its_copy_out_and_a_failed_one_is_told():
    queues, seen = disk_tier.ThreadQueues(CPU), list[str]()
    out = queues.copy(OUT, lambda: seen.append("out"))
    back = queues.copy(BACK, lambda: seen.append("back"), (out,))
    queues.wait(back)
    assert seen == ["out", "back"]
    wrong = queues.copy(OUT, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        queues.wait(wrong)
    queues.end()
