"""What is on the disk: damage of every kind is refused by name before anything changes, and a save is whole or not."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.checkpoint import folder
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.tensor_files import DTYPES, Reader, write_file
from autopar.checkpoint.together import AllRanks
from autopar.checkpoint.tree import decode, encode, inline, outline, tensors_of
from autopar.errors import CheckpointError


def _made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value.clone() for value in (*model.state_dict().values(), *states)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of one run, and one of another."""
    path = tmp_path_factory.mktemp("saved")
    for name, seeds in (("run", (0, 1)), ("other", (2,))):
        for step, seed in enumerate(seeds):
            autopar.save(path / name, *_made(seed), step=step)
    return path


def _flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _truncate(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def _zero(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    at = chance.randrange(max(1, len(data) - 4096)) // 512 * 512
    data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    file.write_bytes(data)


def _delete(file: Path, chance: random.Random) -> None:
    file.unlink()


def _of_step(file: Path, chance: random.Random) -> None:
    shutil.copy(file.parent.parent / folder.folder_of(0) / file.name, file)


def _of_run(file: Path, chance: random.Random) -> None:
    shutil.copy(file.parent.parent / "other" / folder.folder_of(0) / file.name, file)


def _link(file: Path, chance: random.Random) -> None:
    file.rename(file.parent.parent / "aside")
    file.symlink_to(file.parent.parent / "aside")


def _longer(file: Path, chance: random.Random) -> None:
    file.write_bytes(file.read_bytes() + b" ")


HARM: dict[str, tuple[Callable[[Path, random.Random], None], int]] = {
    "flip": (_flip, 50), "truncate": (_truncate, 10), "zero": (_zero, 3), "delete": (_delete, 1),
    "of another step": (_of_step, 1), "of another run": (_of_run, 1), "link": (_link, 1), "longer": (_longer, 1),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM)
def test_damage_is_refused_by_name_before_anything_changes(saved: Path, tmp_path: Path, harm: str) -> None:
    """Red where the checksum of a file is not looked at: half of the flips load."""
    do, times = HARM[harm]
    model, optimizer = _made(5)
    before = _values(model, optimizer)
    chance = random.Random(harm)
    for name in ("manifest.json", "rank-00000.safetensors"):
        for time in range(times):
            path = tmp_path / f"{name}-{time}"
            shutil.copytree(saved / "run", path)
            shutil.copytree(saved / "other", path / "other")
            file = path / folder.folder_of(1) / name
            do(file, chance)
            with pytest.raises(CheckpointError) as caught:
                autopar.load(path, model, optimizer, step=1)
            listed = harm == "delete" and name == "manifest.json"
            assert "has no checkpoint of step 1" in str(caught.value) or str(file) in str(caught.value), caught.value
            assert listed or str(file) in str(caught.value), caught.value
            shutil.rmtree(path)
    assert all(map(torch.equal, before, _values(model, optimizer)))


def test_a_file_that_is_not_of_the_checkpoint(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "run", tmp_path / "run")
    extra = tmp_path / "run" / folder.folder_of(1) / "rank-00001.safetensors"
    extra.write_text("")
    with pytest.raises(CheckpointError) as caught:
        autopar.load(tmp_path / "run", _made()[0])
    assert str(caught.value) == (
        f"'{extra}' is damaged: no file of this checkpoint, as its manifest.json says. Nothing was loaded. Take it "
        f"from a "
        f"backup, or load another step: autopar.load(..., step=N)."
    )


# -- manifests of somebody else ----------------------------------------------------------------------------------------


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


WEIGHT = ("tensors", "model/0.weight")
PIECE = (*WEIGHT, "pieces", 0)
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "format": (_set("format", to="pickle"), "its format is 'pickle'"),
    "version": (_set("version", to=2), "is of version 2 of the format; this autopar reads version 1."),
    "step": (_set("step", to=-1), "'-1' is no number from 0 to 2**63"),
    "step is text": (_set("step", to="1"), "'1' is no number from 0"),
    "step of another": (_set("step", to=7), "is damaged: it is that of step 7"),
    "a way out": (_set("files", to={"../../x": {"bytes": 1, "head": 1}}), "'../../x' is no name of a file"),
    "absolute": (_set(*PIECE, "file", to="/etc/passwd"), "'/etc/passwd' is no name of a file of a checkpoint"),
    "no such file": (_set(*PIECE, "file", to="rank-00007.safetensors"), "which is not among the files"),
    "no such key": (_set(*PIECE, "key", to="x"), "does not read"),
    "another tensor": (_set(*PIECE, "key", to="model/2.weight@0,0"), "where manifest.json says float32 [16, 8]"),
    "dtype": (_set(*WEIGHT, "dtype", to="load"), "no dtype 'load'"),
    "shape": (_set(*WEIGHT, "shape", to=[16, 9]), "the pieces of 'model/0.weight' are not the whole of [16, 9]"),
    "huge": (_set(*WEIGHT, "shape", to=[1 << 62, 1 << 62]), "are not the whole of"),
    "outside": (_set(*PIECE, "offset", to=[1, 0]), "ends at [17, 8], outside of [16, 8]"),
    "size": (_set("files", "rank-00000.safetensors", "bytes", to=1 << 60), "bytes, and was saved with"),
    "ranks": (lambda content: content.update(ranks=3, own=2 * content["own"]), "3 ranks have 2 states of their own"),
    "no tensors": (_set("tensors", to={}), "there is no tensor 'model/0.weight'"),
    "names": (_set("state", "models", "model", "state", "0.weight", to={"!": "eval", "of": "1"}), "there is no type "
    "'eval'"),
    "a state": (_set("state", "optimizers", "optimizer", "groups", to="x"), "is not a manifest"),
    "generators": (_set("own", 0, "generators", "torch", to={"!": "__import__", "of": "os"}), "no type '__import__'"),
    "a tree of no tensor": (_set("state", "extra", "extra", to={"!": "tensor", "of": "x"}), "is not a manifest"),
    "nested": (_set("state", "extra", "extra", to=None), ""),
}  # fmt: skip


def _written(path: Path, text: str) -> None:
    rest = text.encode()
    path.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_is_read_without_trust(saved: Path, tmp_path: Path, what: str) -> None:
    """Its checksum is right: somebody wrote it."""
    change, words = HOSTILE[what]
    shutil.copytree(saved / "run", tmp_path / "run")
    file = tmp_path / "run" / folder.folder_of(1) / "manifest.json"
    content = json.loads(file.read_text())
    del content["crc32"]
    change(content)
    text = json.dumps(content)[1:]
    if what == "nested":
        text = text.replace('"extra": null', '"extra": ' + "[" * 100_000 + "]" * 100_000)
        words = "is not a manifest of autopar: RecursionError"
    _written(file, text)
    model, optimizer = _made(5)
    before = _values(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        autopar.load(tmp_path / "run", model, optimizer)
    assert words in str(caught.value), caught.value
    assert all(map(torch.equal, before, _values(model, optimizer)))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('"a": 1, "a": 1}', "ValueError: the key 'a' stands twice"), ('"a": NaN}', "NaN is no number of JSON"),
        ("x", "JSONDecodeError"), ("[]}", "JSONDecodeError"), ('"step": ' + "9" * 5000 + "}", "ValueError"),
    ],
)  # fmt: skip
def test_what_is_no_manifest(tmp_path: Path, text: str, why: str) -> None:
    _written(tmp_path / "manifest.json", text)
    with pytest.raises(CheckpointError, match=f"is not a manifest of autopar: .*{why}"):
        autopar.load(tmp_path, nn.Linear(2, 2))


# -- values ------------------------------------------------------------------------------------------------------------


def test_values_come_back_of_their_types(tmp_path: Path) -> None:
    import collections

    import numpy

    extra = {
        "numbers": [1, 2.5, -0.0, float("inf"), 3 + 4j, True, None, 10**30], "text": 'a "quote"\n', "b": b"\x00\xff",
        "tuple": (1, (2,)), 3: {"!": "tensor"}, "set": {3, 1}, "counter": collections.Counter([1, 1]),
        "deque": collections.deque([1]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
        "ordered": collections.OrderedDict(b=1, a=2), "array": numpy.arange(3, dtype=numpy.uint16),
        "size": torch.Size([2]),
    }  # fmt: skip
    tensors = [torch.zeros(2, 3, dtype=dtype) for dtype in (*DTYPES, torch.complex64, torch.complex128)]
    tensors += [
        torch.tensor(1 + 2j),
        torch.arange(6.0).view(2, 3).T,
        torch.empty(0, 3),
        torch.tensor(2.5),
        torch.ones(2)[:1],
    ]
    model = nn.Linear(2, 2)
    autopar.save(tmp_path, model, extra={"extra": extra, "tensors": tensors})
    loaded = autopar.load(tmp_path, model).extra
    array, wanted = loaded["extra"].pop("array"), extra.pop("array")
    assert repr(loaded["extra"]) == repr(extra) and array.dtype == wanted.dtype and (array == wanted).all()
    for got, value in zip(loaded["tensors"], tensors, strict=True):
        assert got.dtype == value.dtype and got.shape == value.shape and torch.equal(got, value)
    state = torch.get_rng_state()
    assert torch.equal(decode(json.loads(json.dumps(encode(state, inline, ""))), outline), state)


def test_complex_numbers_that_lie_at_odd_places(tmp_path: Path) -> None:
    """Red before: torch copies 16 bytes in one move, which ends the process where a file has them at multiples of 8."""
    for odd in (1, 2, 3):
        model = nn.Module()
        model.first = nn.Buffer(torch.randn(odd, dtype=torch.float64))
        model.filter = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128))
        autopar.save(tmp_path / f"{odd}", model, step=1)
        want = model.filter.detach().clone()
        with torch.no_grad():
            model.filter.zero_()
        autopar.load(tmp_path / f"{odd}", model)
        assert torch.equal(model.filter, want)


def test_safetensors_reads_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, optimizer = _made()
    path = autopar.save(tmp_path, model, optimizer)
    read = load_file(path / "rank-00000.safetensors")
    assert torch.equal(read["model/0.weight@0,0"], model.state_dict()["0.weight"])


class _Holder(nn.Module):
    """Ties, an extra state, a buffer that is not saved, and names of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.count = 0

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_ties_and_extra_states(tmp_path: Path) -> None:
    first, second = _Holder(), _Holder()
    first.count = 3
    path = autopar.save(tmp_path, first)
    assert sorted(Manifest.read(path).tensors) == ["model/a.bias", "model/a.weight", "model/b.bias"]
    autopar.load(tmp_path, second)
    assert second.count == 3 and second.b.weight is second.a.weight and torch.equal(second.a.weight, first.a.weight)


def test_states_longer_than_their_parameters_are_not_rounded(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 3, dtype=torch.bfloat16)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = made()
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((3, 3), 1 / 3)
    autopar.save(tmp_path, model, optimizer)
    again, fresh = made()
    autopar.load(tmp_path, again, fresh)
    assert torch.equal(fresh.state[again.weight]["momentum_buffer"], torch.full((3, 3), 1 / 3))


# -- what is refused ---------------------------------------------------------------------------------------------------


def _other_groups(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.Adam([{"params": [first]}, {"params": others}])


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a lambda": (
        lambda path: autopar.save(path, nn.Linear(2, 2), extra={"f": [len]}),
        "'extra/f/0' is of type builtins.builtin_function_or_method, which a checkpoint has no form for: it holds "
        "tensors, "
        "numbers, text, and lists, tuples, dicts and sets of them, and no pickle. Leave it out, or give its values "
        "(its own "
        "state_dict()).",
    ),
    "no model": (lambda path: autopar.save(path, [1]), "model is of type builtins.list: give an nn.Module, or a "
    "dict of them by name."),
    "no optimizer": (
        lambda path: autopar.save(path, nn.Linear(2, 2), 0.1),
        "optimizer is of type builtins.float: give a torch optimizer, or a dict of them by name.",
    ),
    "no loader": (
        lambda path: autopar.save(path, nn.Linear(2, 2), loader=[1]),
        "loader is of type builtins.list, without state_dict() and load_state_dict(): give an object that has them, "
        "or keep "
        "what it needs in extra=.",
    ),
    "step": (
        lambda path: autopar.save(path, nn.Linear(2, 2), step=-1),
        "step=-1: write how many steps of training are done, a number of 0 or more.",
    ),
    "meta": (
        lambda path: autopar.save(path, nn.Linear(2, 2, device="meta")),
        "'model/weight' is on the meta device: it has no values to save.",
    ),
    "of no model": (
        lambda path: autopar.save(path, nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(3))])),
        "optimizer has a parameter of shape [3] (group 0, number 0) that is of none of the models model: give its "
        "module as "
        "well, model={'model': model, 'other': other}; nn.ParameterList([parameter]) is one.",
    ),
    "older": (
        lambda path: autopar.save(path, nn.Linear(2, 2), step=3),
        "step 3 cannot be saved to 'PATH', which has step 4: the newest there would be of another run. Save to another "
        "folder, or move newer steps away.",
    ),
    "nothing there": (
        lambda path: autopar.load(path / "x", nn.Linear(2, 2)),
        "'PATH/x': there is no such folder. Write the folder that autopar.save was given.",
    ),
    "no such step": (
        lambda path: autopar.load(path, nn.Linear(2, 2), step=7), "'PATH' has no checkpoint of step 7; it has step 4.",
    ),
    "no objects": (
        lambda path: autopar.load(path),
        "'PATH' holds checkpoints: write autopar.load('PATH', model, optimizer), with the objects that they are "
        "loaded into.",
    ),
    "names": (
        lambda path: autopar.load(path, nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))),
        "Error(s) in loading state_dict for Sequential:\n"
        '\tUnexpected key(s) in state_dict: "1.running_mean", "1.running_var", "1.num_batches_tracked", "2.weight", '
        '"2.bias".\n'
        "\tsize mismatch for 1.weight: copying a param with shape torch.Size([16]) from checkpoint, the shape in "
        "current "
        "model is torch.Size([4, 16]).\n"
        "\tsize mismatch for 1.bias: copying a param with shape torch.Size([16]) from checkpoint, the shape in "
        "current model "
        "is torch.Size([4]).",
    ),
    "groups": (
        lambda path: autopar.load(path, (model := _made()[0]), _other_groups(model)),
        "optimizer: loaded state dict has a different number of parameter groups: 1, here 2.",
    ),
    "parameters": (
        lambda path: autopar.load(path, (model := _made()[0]), torch.optim.Adam(list(model.parameters())[1:])),
        "optimizer: loaded state dict contains a parameter group that doesn't match the optimizer's group 0: "
        '"model/0.weight" is in one of them alone. Make the optimizer with the groups that it was saved with.',
    ),
    "names of models": (
        lambda path: autopar.load(path, {"a": _made()[0], "b": _made()[0]}),
        "'PATH/step-00000004' has no model 'a'; its models are model. Give them by these names, as a dict, or leave "
        "them out.",
    ),
    "no scheduler": (
        lambda path: autopar.load(path, (made := _made())[0], scheduler=torch.optim.lr_scheduler.StepLR(made[1], 1)),
        "'PATH/step-00000004' has no scheduler 'scheduler'; it was saved without schedulers. Give them by these "
        "names, as a "
        "dict, or leave it out.",
    ),
    "every": (lambda path: autopar.Checkpointer(path, every=0), "Checkpointer(every=0): write a number of 1 or more."),
    "never": (
        lambda path: autopar.Checkpointer(path).steps(9, nn.Linear(2, 2), resume="never"),
        "resume='never', but 'PATH' has checkpoints up to step 4: give another folder, or resume='auto' to go on "
        "from there.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_says_what_to_do(tmp_path: Path, what: str) -> None:
    autopar.save(tmp_path, *_made(), step=4)
    call, words = REFUSED[what]
    with pytest.raises(CheckpointError) as caught:
        call(tmp_path)
    assert str(caught.value) == words.replace("PATH", str(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000004"]


# -- saves that are cut off --------------------------------------------------------------------------------------------


class _Cut(BaseException):
    """A kill, as nothing catches it."""


class _Cutter:
    """Counts calls of the file system, and cuts off before one of them: a number, or a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.limit = 0, ""
        for owner, names in ((os, ("fsync", "unlink", "open")), (shutil, ("rmtree", "copyfile")), (Path, _OF_PATHS)):
            for name in names:
                monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, func: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.limit in (name, str(self.calls)):
                raise _Cut
            return func(*args, **options)

        return called

    def cuts(self, limit: str, path: Path, run: tuple[nn.Module, torch.optim.Optimizer], step: int) -> bool:
        """Save, and cut it off. False if it came to its end before."""
        self.calls, self.limit = 0, limit
        try:
            autopar.save(path, *run, step=step)
        except _Cut:
            return True
        finally:
            self.limit = ""
        return False


_OF_PATHS = ("rename", "mkdir", "open")


def test_a_save_is_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off before each of its calls of the file system, once over a step that is there and once beside it, and then
    again when it has swept: the newest checkpoint is one of the two, whole, and the next save finds its way."""
    old, new, found = _made(0), _made(1), set()
    cutter = _Cutter(monkeypatch)
    cuts = [(step, cut) for step in (1, 2) for cut in range(1, 22)]
    for step, cut in cuts:
        path = tmp_path / f"{step}-{cut}"
        autopar.save(path, *old, step=1)
        is_cut = cutter.cuts(str(cut), path, new, step)
        for again in (False, True):
            model, optimizer = _made(7)
            loaded = autopar.load(path, model, optimizer)
            values = _values(model, optimizer)
            which = next(each for each in (old, new) if all(map(torch.equal, _values(*each), values)))
            assert loaded.step == (step if which is new else 1) and (which is new or is_cut)
            found.add((step, which is new))
            if not again:
                assert cutter.cuts("fsync", path, new, 2)  # what the one before left is swept by now
        autopar.save(path, *new, step=2)
        assert {each.name for each in path.iterdir()} <= {"step-00000001", "step-00000002"}
        found.add((step, "cut" if is_cut else "to its end"))
        shutil.rmtree(path)
    assert found == {(step, how) for step in (1, 2) for how in (False, True, "cut", "to its end")}


@pytest.mark.parametrize(("error", "words"), [(28, "No space left on device"), (13, "Permission denied")])
def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, words: str) -> None:
    model, optimizer = _made()
    autopar.save(tmp_path, model, optimizer, step=1)

    def fails(path: Path, tensors: Any) -> Any:
        write_file(path, tensors)
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("autopar.checkpoint.save.write_file", fails)
    with pytest.raises(CheckpointError) as caught:
        autopar.save(tmp_path, model, optimizer, step=2)
    file = tmp_path / ".partial-step-00000002" / "rank-00000.safetensors"
    assert str(caught.value) == (
        f"'{file}' cannot be written: {words}. The checkpoints before it are as they were. Make room, or give a "
        f"folder that "
        f"this user may write to."
    )
    assert autopar.load(tmp_path, model, optimizer).step == 1
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_the_newest_stays(tmp_path: Path) -> None:
    """Torn folders are not counted."""
    model = nn.Linear(2, 2)
    for step in (1, 2, 3):
        autopar.save(tmp_path, model, step=step)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / ".partial-step-00000008").mkdir()
    folder.retain(tmp_path, 1)
    assert list(folder.committed(tmp_path)) == [3]
    assert autopar.load(tmp_path, model).step == 3
    assert autopar.load(tmp_path / "step-00000003", model).step == 3


def test_the_tensors_of_a_tree_are_found_in_their_order() -> None:
    names = iter("abc")
    tree = encode({"x": [torch.ones(1), 3], "y": (torch.ones(2), {"z": torch.ones(3)})}, lambda *_: next(names), "")
    assert tensors_of(tree) == ["a", "b", "c"]


def test_a_number_that_reads_as_infinite_is_none(saved: Path, tmp_path: Path) -> None:
    """Red before: a ValueError of json, where the manifest was compared between ranks."""
    path = tmp_path / "run"
    shutil.copytree(saved / "run", path)
    file = path / folder.folder_of(1) / "manifest.json"
    _, _, rest = file.read_bytes().partition(b"\n")
    rest = rest.replace(b'"lr": 0.', b'"lr": 1e999, "was": 0.', 1)
    assert b"1e999" in rest
    file.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest)
    with pytest.raises(CheckpointError, match=r"manifest\.json' is not a manifest of autopar: ValueError: 1e999"):
        autopar.load(path, *_made(5), step=1)


def test_a_part_of_a_tensor_is_read(tmp_path: Path) -> None:
    """A region across pieces, of a piece alone, and a tensor without dims."""
    torch.manual_seed(0)
    model = nn.Linear(3, 8)
    model.register_buffer("count", torch.tensor(5))
    autopar.save(tmp_path, model, step=0)
    where = tmp_path / folder.folder_of(0)
    reader = Reader(where, Manifest.read(where))
    part, count = torch.zeros(2, 2), torch.tensor(0)
    reader.fill("model/weight", (3, 1), part)
    reader.fill("model/count", (), count)
    assert torch.equal(part, model.weight[3:5, 1:3]) and count == 5
    assert torch.equal(reader.whole("model/bias"), model.bias)


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_plain_module_of_one_process_has_nobody_to_agree_with(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the script made a group of one rank or none: one of NCCL cannot tell what is on the host."""
    monkeypatch.setattr(dist, "is_initialized", lambda: ranks > 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    assert AllRanks.of([nn.Linear(2, 2)]) == AllRanks(0, 1, None)
