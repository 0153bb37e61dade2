"""Runs that are not what was saved, and values that cannot be: said in whole, and nothing changes."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from processes import Ranks
from safetensors.torch import load_file
from torch import nn

import autopar
from autopar.checkpoint import folder, tensor_files
from autopar.checkpoint.checkpointer import Checkpointer
from autopar.checkpoint.checksum import ROWS, WORDS, checksum
from autopar.checkpoint.generators import generators, set_generators
from autopar.checkpoint.load import _own_of
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.outgoing import Outgoing, targets
from autopar.checkpoint.run import Run
from autopar.checkpoint.together import AllRanks
from autopar.checkpoint.tree import decode, encode
from autopar.errors import CheckpointError


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


class _Extra(nn.Module):
    """Has a state of its own that is no tensor."""

    def get_extra_state(self) -> Any:
        return 3


class _Half:
    """Gives its state, and takes none."""

    def state_dict(self) -> Any:
        return {}


class _Named(nn.Module):
    """Has a tensor under the name of an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_extra_state", torch.ones(2))


def _grouped(model: nn.Module, *sizes: int) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    return torch.optim.SGD([{"params": parameters[a : a + n]} for a, n in zip(starts, sizes, strict=True)], lr=0.1)


LOADED: dict[str, tuple[Callable[[], Any], Callable[[Path], Any], str]] = {
    "names that are missing": (
        _model, lambda path: autopar.load(path, {"m": nn.Sequential(*_model(), nn.Linear(2, 1))}),
        "Error(s) in loading state_dict for Sequential ('m'):\n\tMissing key(s) in state_dict: \"2.weight\", "
        '"2.bias".',
    ),
    "no memory": (
        _model, lambda path: autopar.load(path, _model().to("meta")),
        "Error(s) in loading state_dict for Sequential:\n\t"
        + "\n\t".join(
            f"{name} is on the meta device: give it memory first, model.to_empty(device=...)."
            for name in ("0.weight", "0.bias", "1.weight", "1.bias")
        ),
    ),
    "no tensor": (
        _Extra, lambda path: autopar.load(path, _Named()),
        "Error(s) in loading state_dict for _Named:\n\t_extra_state is no tensor in the checkpoint.",
    ),
    "several names": (
        _model, lambda path: autopar.load(path, {"model": _model(), "b": _model()}),
        "'PATH/step-00000004' has no model 'b'; its models are model. Give them by these names, as a dict, or leave it "
        "out.",
    ),
    "other groups": (
        lambda: ((model := _model()), _grouped(model, 1, 3)),
        lambda path: autopar.load(path, (model := _model()), _grouped(model, 3, 1)),
        "optimizer: loaded state dict contains a parameter group that doesn't match the optimizer's group 0: "
        '"model/0.bias", "model/1.weight" are in one of them alone. Make the optimizer with the groups that it was '
        "saved with.",
    ),
    "groups of others": (
        lambda: ((model := nn.Sequential(_model(), _model())), _grouped(model, 1, 7)),
        lambda path: autopar.load(
            path, (model := nn.Sequential(_model(), _model())), _grouped(model, 7, 1)
        ),
        "optimizer: loaded state dict contains a parameter group that doesn't match the optimizer's group 0: "
        '"model/0.0.bias", "model/0.1.bias", "model/0.1.weight" and others are in one of them alone. Make the '
        "optimizer with the groups that it was saved with.",
    ),
    "half of a loader": (
        _model, lambda path: autopar.save(path, _model(), loader=_Half(), step=9),
        "loader is of type test_unlike._Half, without state_dict() and load_state_dict(): give an object that has "
        "them, or keep what it needs in extra=.",
    ),
    "a name with a slash": (
        _model, lambda path: autopar.save(path, {"a/b": _model()}, step=9),
        "model: a name in the dict is 'a/b'; write a text without '/'.",
    ),
    "no name": (
        _model, lambda path: autopar.save(path, {"": _model()}, step=9),
        "model: a name in the dict is ''; write a text without '/'.",
    ),
    "a number for a name": (
        _model, lambda path: autopar.save(path, _model(), {1: None}, step=9),
        "optimizer: a name in the dict is 1; write a text without '/'.",
    ),
    "a sparse tensor": (
        _model, lambda path: autopar.save(path, _model(), extra=torch.eye(2).to_sparse(), step=9),
        "'extra' is torch.float32, torch.sparse_coo: safetensors has no form for it. Convert it, or leave it out.",
    ),
    "a dtype that has no form": (
        _model, lambda path: autopar.save(path, _model(), extra=torch.empty(2, dtype=torch.float8_e5m2fnuz), step=9),
        "'extra' is torch.float8_e5m2fnuz, torch.strided: safetensors has no form for it. Convert it, or leave it out.",
    ),
    "one name for two": (
        _model,
        lambda path: autopar.save(path, _model(), extra={1: torch.ones(1), "1": torch.ones(2)}, step=9),
        "two tensors would be saved as 'extra/1'.",
    ),
    "the word of a resume": (
        _model, lambda path: Checkpointer(path).steps(9, _model(), resume="again"),
        "resume='again': write 'auto', 'never' or the number of a step.",
    ),
    "keep": (
        _model, lambda path: Checkpointer(path, keep=True),
        "Checkpointer(keep=True): write a number of 1 or more.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", LOADED)
def test_it_is_said_what_does_not_fit(tmp_path: Path, what: str) -> None:
    made, call, words = LOADED[what]
    run = made()
    autopar.save(tmp_path, *(run if isinstance(run, tuple) else (run,)), step=4)
    with pytest.raises(CheckpointError) as caught:
        call(tmp_path)
    assert str(caught.value) == words.replace("PATH", str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000004"]


# -- the folder --------------------------------------------------------------------------------------------------------


def _step(path: Path, name: str) -> Path:
    (path / name).mkdir()
    (path / name / "manifest.json").write_text("{}")
    return path / name


def test_a_step_has_one_folder(tmp_path: Path) -> None:
    """What is being replaced counts until its successor is there; names that are like those of steps do not."""
    assert folder.committed(tmp_path / "none") == {}
    for name in ("step-00000002", ".replaced-step-00000002", ".replaced-step-00000010", "step-3", "xstep-00000004"):
        _step(tmp_path, name)
    assert folder.committed(tmp_path) == {
        2: tmp_path / "step-00000002", 10: tmp_path / ".replaced-step-00000010",
    }  # fmt: skip
    assert list(folder.committed(tmp_path)) == [2, 10]
    assert folder.newest(tmp_path).name == ".replaced-step-00000010"
    assert [folder.is_step(name) for name in ("step-00000002", ".replaced-step-00000002", "step-2", "run")] == [
        True, True, False, False,
    ]  # fmt: skip
    folder.sweep(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "step-00000002", "step-00000010", "step-3", "xstep-00000004",
    ]  # fmt: skip


def test_a_sweep_follows_no_link(tmp_path: Path) -> None:
    other, run = tmp_path / "other", tmp_path / "run"
    other.mkdir()
    run.mkdir()
    (other / "kept").write_text("")
    (run / ".partial-step-00000001").symlink_to(other)
    (run / ".removed-step-00000001").mkdir()
    folder.sweep(run)
    assert [each.name for each in run.iterdir()] == [".partial-step-00000001"] and (other / "kept").exists()


def test_the_last_steps_are_listed(tmp_path: Path) -> None:
    for step in range(1, 7):
        _step(tmp_path, folder.folder_of(step))
        if step == 5:
            with pytest.raises(CheckpointError, match=r"it has steps 1, 2, 3, 4, 5\.$"):
                folder.newest(tmp_path, 9)
    with pytest.raises(CheckpointError, match=r"it has steps \.\.\., 2, 3, 4, 5, 6\.$"):
        folder.newest(tmp_path, 9)
    assert folder.newest(tmp_path, 3).name == "step-00000003"
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="there is no checkpoint in it"):
        folder.newest(tmp_path / "empty")
    folder.retain(tmp_path, 2)
    assert list(folder.committed(tmp_path)) == [5, 6]
    assert folder.begin(tmp_path, 6).name == ".partial-step-00000006"


# -- values ------------------------------------------------------------------------------------------------------------


def test_numbers_of_numpy_are_numbers() -> None:
    assert encode([numpy.float32(0.5), numpy.int64(3), numpy.bool_(True)], lambda *_: None, "") == [0.5, 3, True]


def test_what_does_not_read_is_said() -> None:
    for tree, words in (
        ({"!": "size", "of": 3}, "a value of type 'size' does not read"),
        ({"!": "dtype", "of": "load"}, "no dtype 'load'"),
        ({"!": ["tuple"], "of": []}, "does not read"),
        ({"!": "device", "of": "nowhere"}, "a value of type 'device' does not read"),
    ):
        with pytest.raises(ValueError, match=words):
            decode(tree, lambda of: of)


def test_what_is_saved_later_is_what_was_there(tmp_path: Path) -> None:
    """The memory of the copies is kept from save to save, and made anew for another shape."""
    staging: dict[str, torch.Tensor] = {}
    value = torch.arange(6.0).view(2, 3)
    for each in (value, value.T, value + 1, torch.arange(6).view(2, 3), torch.zeros(2, 3)):
        out = Outgoing(0, staging)
        assert out.take(each, "x") == out.take(each, "y") == "x"
        before, copy = each.clone(), out.mine["x@0,0"]
        assert copy.is_contiguous() and staging["x@0,0"] is copy
        each.fill_(7)
        assert torch.equal(copy, before) and copy.dtype == before.dtype
        assert out.tensors["x"].shape == tuple(before.shape) and not out.tensors["x"].placed
    last = staging["x@0,0"]
    Outgoing(0, staging).take(torch.ones(2, 3), "x")
    assert staging["x@0,0"] is last, "the same memory again"
    there = torch.ones(3)
    out = Outgoing(0, None)
    out.take(there, "x")
    assert out.mine["x@0"].data_ptr() == there.data_ptr(), "written from where it lies"
    assert Outgoing(1, None).take(there, "x") == "x"


def test_long_files_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_BLOCK", 8)
    values = {"a": torch.randn(9), "b": torch.arange(5, dtype=torch.int8), "c": torch.randn(2, dtype=torch.float64)}
    total, sums = tensor_files.write_file(tmp_path / "f", values)
    read = load_file(tmp_path / "f")
    assert all(torch.equal(read[name], value) for name, value in values.items())
    assert total.bytes == (tmp_path / "f").stat().st_size and set(sums) == set(values)
    header = json.loads((tmp_path / "f").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert header["c"]["data_offsets"] == [0, 16], "the longest elements first: each lies aligned"


# -- manifests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "to", "words"),
    [
        (("own",), {}, "'own' is a list and 'state' an object"),
        (("state",), [], "'own' is a list and 'state' an object"),
        (("state", "optimizers", "optimizer", "groups", 0, "params"), [0, 1], "parameters of a group have names"),
        (("tensors", "model/0.weight", "shape"), "33", "'33' is no list of sizes"),
        (("tensors", "model/0.weight", "pieces", 0, "key"), 3, "which is not among the files"),
        (("tensors", "model/0.weight", "pieces", 0, "sum"), True, "'True' is no number"),
        (("step",), 1 << 63, "is no number from 0 to 2"),
        (("state", "schedulers"), {"a": {"!": "run", "of": 1}}, "there is no type 'run'"),
        (("own", 0, "loaders"), {"a": {"!": "run", "of": 1}}, "there is no type 'run'"),
        (("state", "extra", "extra"), {"!": "run", "of": 1}, "there is no type 'run'"),
        (("state", "models", "model", "random"), {"!": "run", "of": 1}, "there is no type 'run'"),
        (("state", "optimizers", "optimizer", "others"), {"a": {"!": "run", "of": 1}}, "there is no type 'run'"),
        (("state", "optimizers", "optimizer", "more"), {"a": {"!": "run", "of": 1}}, "there is no type 'run'"),
    ],
)
def test_each_part_of_a_manifest_is_looked_at(tmp_path: Path, keys: tuple[Any, ...], to: Any, words: str) -> None:
    model = _model()
    path = autopar.save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    content = json.loads((path / "manifest.json").read_text())
    del content["crc32"]
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = to
    rest = json.dumps(content)[1:].encode()
    (path / "manifest.json").write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest)
    with pytest.raises(CheckpointError, match=words):
        Manifest.read(path)


def test_a_manifest_has_a_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = autopar.save(tmp_path, _model())
    size = (path / "manifest.json").stat().st_size
    monkeypatch.setattr("autopar.checkpoint.manifest.MOST", size)
    Manifest.read(path)
    monkeypatch.setattr("autopar.checkpoint.manifest.MOST", size - 1)
    with pytest.raises(CheckpointError, match=rf"has {size} bytes; a manifest has at most {size - 1}\.$"):
        Manifest.read(path)
    monkeypatch.undo()
    os.truncate(path / "manifest.json", (1 << 30) + 1)  # a file of holes: nobody reads it
    with pytest.raises(CheckpointError, match=r"a manifest has at most 1073741824\.$"):
        Manifest.read(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without CUDA")
def test_a_generator_that_is_not_here_stays_as_it_was() -> None:
    states = generators()
    drawn = torch.rand(3)
    set_generators({**states, "cuda": "of another machine"})
    assert torch.equal(torch.rand(3), drawn)


# -- what each rank has for itself -------------------------------------------------------------------------------------


def _saved_by(*own: dict[str, Any]) -> Manifest:
    return Manifest(3, max(2, len(own)), {}, {}, {}, own)


def test_each_rank_finds_its_own(caplog: pytest.LogCaptureFixture) -> None:
    a, b = ({"generators": {"torch": at, "numpy": 5}, "loaders": {"loader": at}} for at in (1, 2))
    run, none = Run({}, {}, {}, {"loader": None}), Run({}, {}, {}, {})
    assert _own_of(_saved_by(a, b), AllRanks(1, 2, None), run) == (b, b["generators"])
    assert _own_of(_saved_by(a), AllRanks(1, 3, None), run) == (a, a["generators"])
    for size, words in ((1, "there is 1 now"), (3, "there are 3 now")):
        with pytest.raises(CheckpointError, match=words):
            _own_of(_saved_by(a, b), AllRanks(0, size, None), run)
    with caplog.at_level(logging.WARNING, "autopar"):
        assert _own_of(_saved_by(a, b), AllRanks(1, 3, None), none) == (a, {"numpy": 5})
        assert not caplog.records, "one rank says it"
        _own_of(_saved_by(a, b), AllRanks(0, 3, None), none)
    assert [record.getMessage() for record in caplog.records] == [
        "the random numbers of torch had gone different ways on the 2 ranks that saved, and now there are 3: the state "
        "that your script seeded is kept. What the step draws (dropout) goes on as it was; what is drawn outside of it "
        "(the order of samples, augmentation) is drawn anew."
    ]
    like = {**b, "generators": a["generators"]}
    caplog.clear()
    assert _own_of(_saved_by(a, like), AllRanks(0, 3, None), none) == (a, a["generators"]) and not caplog.records


def test_it_is_said_that_a_run_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    with caplog.at_level(logging.WARNING, "autopar"), pytest.raises(SystemExit):
        for _ in Checkpointer(tmp_path, every=100).steps(9, model):
            signal.raise_signal(signal.SIGUSR1)
    assert [record.getMessage() for record in caplog.records] == [
        f"SIGUSR1: step 1 is saved in '{tmp_path}'; this run leaves."
    ]


def test_steps_are_saved_when_they_are_due(tmp_path: Path) -> None:
    """Every third, and the last; and two are kept, of which one was being written."""
    checkpointer = Checkpointer(tmp_path, every=3, keep=2)
    assert checkpointer.done == 0
    seen = []
    for step in checkpointer.steps(7, _model()):
        seen.append((step, checkpointer.done))
    assert seen == [(step, step) for step in range(7)] and checkpointer.done == 7
    assert list(folder.committed(tmp_path)) == [6, 7]
    again = Checkpointer(tmp_path, every=3)
    assert list(again.steps(8, _model(), resume=6)) == [6, 7] and list(folder.committed(tmp_path)) == [6, 7, 8]


def test_what_is_written_beside_is_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is written when the next step has changed the values, and is committed when it is whole."""
    changed = threading.Event()

    def late(path: Path, tensors: Any) -> Any:
        assert "step-00000003" in str(path) or changed.wait(10)
        return tensor_files.write_file(path, tensors)

    monkeypatch.setattr("autopar.checkpoint.save.write_file", late)
    model = nn.Linear(2, 2)
    for step in Checkpointer(tmp_path, every=1, keep=9).steps(3, model):
        with torch.no_grad():
            model.weight.fill_(step)
        changed.set() if step == 1 else changed.clear()
    for step in (1, 2, 3):
        autopar.load(tmp_path, model, step=step)
        assert (model.weight == step - 1).all()


def test_a_disk_that_fails_at_last_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(handle: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        tensor_files.write_file(tmp_path / "f", {"a": torch.ones(1)})
    with pytest.raises(OSError, match="Input/output error"):
        tensor_files.write_text(tmp_path / "g", b"text")
    with pytest.raises(OSError, match="Input/output error"):
        folder.flush(tmp_path)


def test_a_checksum_is_that_of_other_versions() -> None:
    """What was saved is read years later: the sums are the same, and every byte counts."""
    found = []
    for size in (0, 7, 8 * WORDS, 8 * WORDS * ROWS - 1, 2 * 8 * WORDS * ROWS + 9):
        data = bytearray(bytes(range(251)) * (size // 251 + 1))[:size]
        found.append(checksum(data))
        for at in {0, size // 2, size - 1} if size else ():
            data[at] ^= 1
            assert checksum(data) != found[-1]
            data[at] ^= 1
    assert found == [0, 2908228089, 4058515879, 3100228058, 3383811468]


# -- ranks that do not mean the same -----------------------------------------------------------------------------------


def _apart(rank: int, path: str, how: str) -> None:
    model = _model()
    if how == "saved":
        autopar.save(path, model, step=rank)
    else:
        autopar.load(path, model, step=rank)


@pytest.mark.gloo
def test_ranks_say_where_they_differ(two: Ranks, tmp_path: Path) -> None:
    for how in ("saved", "loaded"):
        for outcome in two.attempt(_apart, str(tmp_path), how):
            assert outcome.error is not None and "RankError" in outcome.error and "step=" in outcome.error, how
    assert not any(tmp_path.iterdir())


def test_memory_that_is_read_into_keeps_its_values_until_then() -> None:
    """What is missing in a file, or cannot be read, leaves a parameter as it was."""
    model = autopar.parallelize(nn.Linear(4, 3), "dp=1", loss_fn=lambda model, x: model(x).sum())
    for parameter in model.parameters():
        before = parameter.full_tensor().clone()
        ((offset, part),) = targets(parameter)
        assert not any(offset) and part.shape == before.shape
        assert torch.equal(parameter.full_tensor(), before)
