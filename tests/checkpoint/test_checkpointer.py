"""A loop that resumes where it was, on ranks that are killed, told to leave, or cannot write."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Ranks, ranks_of
from torch import nn

import autopar
from autopar.checkpoint import folder, save
from autopar.checkpoint.checkpointer import SIGNALS
from autopar.checkpoint.tensor_files import write_file
from autopar.errors import CheckpointError

COUNT = 6


def _train(path: str, mesh: str | None, ends: Any = None, **how: Any) -> tuple[list[str], Any]:
    """The losses of the steps that were done here, to the bit. ends: called behind each step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    if mesh is not None:
        model = autopar.parallelize(model, mesh, loss_fn=lambda model, x: model(x).square().mean())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    checkpointer = autopar.Checkpointer(path, **{"every": 2, **how})
    losses = []
    for step in checkpointer.steps(COUNT, model, optimizer, scheduler=scheduler):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        if mesh is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            loss = model.forward_backward(x)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item().hex())
        checkpointer.extra = {"losses": len(losses)}
        if ends is not None:
            ends(step)
    return losses, checkpointer


@pytest.mark.parametrize(("mesh", "beside"), [(None, True), (None, False), ("dp=1", True)])
def test_it_goes_on_to_the_bit(tmp_path: Path, mesh: str | None, beside: bool) -> None:
    """The plain module, alone, whose masks torch's own generator gives; and a parallel one, which has its own."""
    straight, _ = _train(str(tmp_path / "a"), mesh, asynchronous=beside)

    def stop(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _train(str(tmp_path / "b"), mesh, stop, asynchronous=False)
    torch.manual_seed(9)
    again, checkpointer = _train(str(tmp_path / "b"), mesh, asynchronous=beside)
    assert again == straight[4:] and len(straight) == COUNT
    assert list(folder.committed(tmp_path / "b")) == [2, 4, 6] and checkpointer.done == COUNT
    assert _train(str(tmp_path / "b"), mesh)[0] == [], "all is done"


def test_the_steps_since_a_break_are_kept(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpointer = autopar.Checkpointer(tmp_path, every=1, keep=2)
    for step in checkpointer.steps(9, model):
        if step == 3:
            break
    checkpointer.close()
    assert list(folder.committed(tmp_path)) == [2, 3]


@pytest.mark.parametrize("by", SIGNALS)
def test_it_leaves_when_told_to(tmp_path: Path, by: signal.Signals) -> None:
    straight, _ = _train(str(tmp_path / "a"), None)
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(SystemExit) as caught:
        _train(str(tmp_path / "b"), None, lambda step: os.kill(os.getpid(), by) if step == 2 else None)
    assert caught.value.code == 128 + by
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert max(folder.committed(tmp_path / "b")) == 3
    assert _train(str(tmp_path / "b"), None)[0] == straight[3:]


def test_a_save_that_fails_beside_is_raised_behind_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fails(path: Path, tensors: Any) -> Any:
        if "00000004" in str(path):
            raise OSError(28, "No space left on device")
        return write_file(path, tensors)

    monkeypatch.setattr("autopar.checkpoint.save.write_file", fails)
    with pytest.raises(CheckpointError, match=r"No space left on device\. The checkpoints before it are as they were"):
        _train(str(tmp_path), None, lambda step: (seen.append(step), time.sleep(0.05)))
    assert seen[-1] == 4 and list(folder.committed(tmp_path)) == [2]


def test_a_step_waits_for_a_copy_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where a step writes the manifest or removes what is too old, or where what is written is no copy."""
    model, changed, threads = nn.Linear(2, 2), threading.Event(), set()

    def noted(where: Any, name: str) -> None:
        work = getattr(where, name)

        def does(*args: Any) -> Any:
            threads.add(threading.current_thread())
            if name == "write_file":
                assert changed.wait(5), "training does not go on while this is written"
                changed.clear()
            return work(*args)

        monkeypatch.setattr(where, name, does)

    for where, name in ((save, "write_file"), (save, "write_text"), (folder, "commit"), (folder, "retain")):
        noted(where, name)
    checkpointer, saved = autopar.Checkpointer(tmp_path, every=1, keep=2), {}
    for step in checkpointer.steps(9, model):
        with torch.no_grad():
            model.weight.add_(1)
        saved[step + 1] = model.weight.detach().clone()
        if step > 0:
            changed.set()
        if step == 3:
            break
    checkpointer.close()
    assert list(folder.committed(tmp_path)) == [2, 3] and threading.main_thread() not in threads
    for step in (2, 3):
        autopar.load(tmp_path, model, step=step)
        assert torch.equal(model.weight, saved[step])


def test_a_commit_that_fails_beside_is_raised_behind_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, commit = [], folder.commit

    def fails(partial: Path) -> Path:
        if "00000004" in str(partial):
            raise OSError(28, "No space left on device")
        return commit(partial)

    monkeypatch.setattr(folder, "commit", fails)
    with pytest.raises(CheckpointError, match=r"'.*00000004' cannot be written: No space left on device"):
        _train(str(tmp_path), None, lambda step: (seen.append(step), time.sleep(0.05)))
    assert seen[-1] >= 4 and [each.name for each in tmp_path.iterdir()] == ["step-00000002"]


# -- on ranks ----------------------------------------------------------------------------------------------------------


FAILURES: dict[str, tuple[int, Any, str, Exception]] = {  # by what is said of it: a rank's, of which function
    "rank-00001.safetensors' cannot be written": (1, save, "write_file", OSError(28, "No space left on device")),
    "can't start new thread": (1, save, "write_file", RuntimeError("can't start new thread")),
    "-00000004' cannot be written": (0, folder, "commit", OSError(28, "No space left on device")),
}


def _full(rank: int, path: str, beside: bool, said: str) -> None:
    """A disk that is full on one rank, or anything else that fails there."""
    which, where, name, error = FAILURES[said]
    work = getattr(where, name)

    def fails(file: Path, *more: Any) -> Any:
        if rank == which and "00000004" in str(file):
            raise error
        return work(file, *more)

    setattr(where, name, fails)
    try:
        _train(path, "dp=2", lambda step: time.sleep(0.05), asynchronous=beside)
    finally:
        setattr(where, name, work)


def _asked(rank: int, path: str) -> int:
    """One rank is told to leave; the others leave as well."""
    try:
        _train(path, "dp=2", lambda step: os.kill(os.getpid(), signal.SIGUSR1) if (step, rank) == (2, 1) else None)
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def _goes_on(rank: int, path: str) -> list[str]:
    return _train(path, "dp=2")[0]


@pytest.mark.gloo
def test_what_one_rank_cannot_write_is_an_error_on_all(two: Ranks, tmp_path: Path) -> None:
    straight = two.run(_goes_on, str(tmp_path / "a"))[0]
    for beside, said in itertools.product((False, True), FAILURES):
        path = tmp_path / f"{beside}{len(said)}"
        for outcome in two.attempt(_full, str(path), beside, said):
            assert outcome.error is not None and said in outcome.error
        assert [each.name for each in path.iterdir()] == ["step-00000002"]
        assert two.run(_goes_on, str(path))[0] == straight[2:]


@pytest.mark.gloo
def test_all_ranks_leave_when_one_is_told_to(two: Ranks, tmp_path: Path) -> None:
    straight = two.run(_goes_on, str(tmp_path / "a"))[0]
    assert two.run(_asked, str(tmp_path / "b")) == [128 + signal.SIGTERM, 128 + signal.SIGUSR1]
    assert two.run(_goes_on, str(tmp_path / "b"))[0] == straight[3:]


def _killed(rank: int, path: str, victim: int, point: str) -> None:
    """A rank that is killed: in a step, while its file is written, or before the commit."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def writes(file: Path, tensors: Any) -> Any:
        if "00000004" in str(file):
            file.write_bytes(b"half of it")
            die()
        return write_file(file, tensors)

    def commits(partial: Path) -> Path:
        if "00000004" in str(partial):
            die()
        return commit(partial)

    def ends(step: int) -> None:
        if (rank, step, point) == (victim, 4, "step"):
            die()

    commit = folder.commit
    if rank == victim:
        save.write_file = writes if point == "file" else write_file
        folder.commit = commits if point == "commit" else commit
    _train(path, "dp=2", ends, asynchronous=False)


@pytest.mark.gloo
@pytest.mark.parametrize(("victim", "point"), [(1, "step"), (0, "commit"), (1, "file")])
def test_a_rank_that_is_killed_costs_an_interval(two: Ranks, tmp_path: Path, victim: int, point: str) -> None:
    straight = two.run(_goes_on, str(tmp_path / "a"))[0]
    with ranks_of(2) as ranks:
        outcomes = ranks.attempt(_killed, str(tmp_path / "b"), victim, point, fatal=True)
        assert outcomes[victim].died and (outcomes[1 - victim].error or outcomes[1 - victim].died)
    done = max(folder.committed(tmp_path / "b"))
    assert done == (4 if point == "step" else 2)
    assert two.run(_goes_on, str(tmp_path / "b"))[0] == straight[done:]
