"""A program of an earlier run is taken only where everything that it was made of is the same."""

from __future__ import annotations

import functools
import gc
import importlib
import io
import json
import os
import random
import sys
import threading
import tokenize
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from edited_model import HELPERS, MODEL
from torch import Tensor, nn
from torch.distributed import get_rank as tell

import autopar
from autopar.capture.python import read_digests
from autopar.errors import ArtifactError
from autopar.parallel.programs import cache_files, cache_key, program_cache
from autopar.parallel.programs.cache_files import entries, write_entry
from autopar.parallel.programs.maker import Maker

NAMES = ("edited_model_under_test", "edited_helpers")


class Missed(Exception):
    """A program would be compiled."""


@dataclass
class Place:
    """Where the edited files and the cache lie."""

    root: Path
    texts: dict[str, str] = field(default_factory=lambda: dict(zip(NAMES, (MODEL, HELPERS), strict=True)))

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def load(self) -> Any:
        """The model's module, from its files as they are now."""
        for name, text in self.texts.items():
            path = self.root / f"{name}.py"
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module(NAMES[0])

    def made(self, **options: Any) -> autopar.ParallelModule:
        module = self.load()
        torch.manual_seed(0)
        return self.parallel(module.Model(), module.loss_fn, **options)

    def parallel(self, model: nn.Module, loss_fn: Any, **options: Any) -> autopar.ParallelModule:
        return autopar.parallelize(model, "dp=1", loss_fn=loss_fn, cache=self.cache, **options)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Place(tmp_path)
    for name in NAMES:
        sys.modules.pop(name, None)


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(3)
    return torch.randn(rows, 4, generator=made), torch.randn(rows, 4, generator=made)


def prepared(model: autopar.ParallelModule, args: Any = None, kwargs: Any = None) -> autopar.ParallelModule:
    """The model with its training program: the line of this call is part of what is kept."""
    model.prepare(*(batch() if args is None else args), **(kwargs or {}))
    return model


def is_hit(model: autopar.ParallelModule, args: Any = None, kwargs: Any = None) -> bool:
    """Whether the step's program is read. One that would be compiled is not: `Maker._built` raises."""
    try:
        prepared(model, args, kwargs)
    except Missed:
        return False
    assert model.programs[0].compiled.is_read
    return True


def keep(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the program of the unedited model; from now on none is compiled."""
    prepared(place.made())
    assert len(list(place.cache.iterdir())) == 1

    def built(*_: Any) -> Any:
        raise Missed

    monkeypatch.setattr(Maker, "_built", built)


# -- edits of files ---------------------------------------------------------------------------------------------------


def edits(text: str) -> Iterator[tuple[str, str]]:
    """Every single edit of a number, an operator, a text or a function's name in a file: what was changed, and the
    text."""
    swapped = {"+": "-", "-": "+", "*": "+", "/": "*", "**": "*", "==": "!=", "gelu": "relu", "relu": "gelu",
               "sin": "cos", "abs": "square", "mse_loss": "l1_loss", "mean": "sum"}  # fmt: skip
    lines = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        row, start, end, was = token.start[0] - 1, token.start[1], token.end[1], token.string
        if token.type == tokenize.NUMBER:
            now = f"({was} + 1)"
        elif was in swapped and "import" not in token.line:
            now = swapped[was]
        elif token.type == tokenize.STRING and token.start[0] == token.end[0] and not was.startswith('"""'):
            now = '"other"'
        else:
            continue
        changed = lines[row][:start] + now + lines[row][end:]
        yield f"line {row + 1}: {was} -> {now}", "".join((*lines[:row], changed, *lines[row + 1 :]))


@pytest.mark.parametrize("are_files_compared", (pytest.param(True, marks=pytest.mark.slow), False))
def test_no_single_edit_of_its_files_takes_an_old_program(
    place: Place, monkeypatch: pytest.MonkeyPatch, are_files_compared: bool
) -> None:
    if not are_files_compared:  # what ran, and what it read, tell it as well
        monkeypatch.setattr(program_cache, "_file_digest", lambda _: "any")
    keep(place, monkeypatch)
    stale, tried, texts = [], [], dict(place.texts)
    for name in NAMES:
        for what, edited in edits(texts[name]):
            place.texts = {**texts, name: edited}
            try:
                model = place.made()
            except (TypeError, RuntimeError, ValueError):
                continue  # no longer a model
            tried.append(what)
            stale += [f"{name} {what}"] * is_hit(model)
    assert stale == []
    assert len(tried) >= 50
    place.texts = texts
    assert is_hit(place.made())


# -- edits of what is in memory ---------------------------------------------------------------------------------------


def _hooked(model: nn.Module) -> None:
    model.blocks[0].register_forward_hook(lambda module, args, out: out * 1.5)


def _twice(model: nn.Module) -> None:
    model.blocks[1].down = model.blocks[0].down


def _cell(model: nn.Module) -> None:
    model.post.__closure__[0].cell_contents = 0.9


def _method(model: nn.Module) -> None:
    type(model.blocks[0]).forward = lambda self, x, offset=0.25: x + offset


# Each changes one thing about a model, made as the kept one was. `module`: what holds its classes and functions.
MODELS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda model, _: setattr(model.blocks[0], "rate", 0.25),
    "attribute of another type": lambda model, _: setattr(model.blocks[0], "rate", 1),
    "text attribute": lambda model, _: setattr(model.blocks[1], "kind", "relu"),
    "attribute of an object": lambda model, _: setattr(model.scaled, "by", 2.0),
    "class attribute": lambda model, _: setattr(type(model.blocks[0]), "slope", 0.4),
    "method": lambda model, _: _method(model),
    "property": lambda model, _: setattr(type(model.blocks[0]), "twice", property(lambda self: 3.0)),
    "cell of a closure": lambda model, _: _cell(model),
    "another closure": lambda model, module: setattr(model, "post", module.make_post(0.75, -1.0)),
    "function": lambda model, _: setattr(model, "post", torch.sin),
    "global": lambda _, module: setattr(module, "GAIN", 1.6),
    "global in another file": lambda _, module: setattr(sys.modules[NAMES[1]], "OFFSET", 0.5),
    "imported name": lambda _, module: setattr(module, "BIAS", 0.5),
    "item of a global dict": lambda _, module: module.POWERS.update(first=3.0),
    "new item of a global dict": lambda _, module: module.POWERS.update(third=3.0),
    "item of a global list": lambda _, module: module.STEPS.__setitem__(0, 0.5),
    "longer global list": lambda _, module: module.STEPS.append(0.5),
    "global function": lambda _, module: setattr(module, "halved", lambda x: x / 3),
    "default argument": lambda _, module: setattr(module.loss_fn, "__defaults__", (2.0,)),
    "default of a method": lambda _, module: setattr(module.Block.forward, "__defaults__", (0.5,)),
    "default in another file": lambda _, module: setattr(module.halved, "__defaults__", (3,)),
    "code of a function": lambda _, module: setattr(module.halved, "__code__", (lambda x, parts=2: x * parts).__code__),
    "eval mode": lambda model, _: model.eval(),
    "eval mode of one layer": lambda model, _: model.norm.eval(),
    "frozen parameter": lambda model, _: model.norm.weight.requires_grad_(False),
    "dtype": lambda model, _: model.double(),
    "buffer of another dtype": lambda model, _: setattr(model.blocks[0], "mask", torch.ones(4, dtype=torch.float64)),
    "buffer of another shape": lambda model, _: setattr(model.blocks[0], "mask", torch.ones(1)),
    "tensor attribute of another shape": lambda model, _: setattr(model, "table", torch.arange(1.0)),
    "tensor attribute of other strides": lambda model, _: setattr(model, "table", torch.arange(8.0)[::2]),
    "two buffers are one": lambda model, _: setattr(model.blocks[0], "mask", model.blocks[1].mask),
    "tied layers": lambda model, _: _twice(model),
    "no bias": lambda model, _: setattr(model.blocks[0].up, "bias", None),
    "another layer": lambda model, _: setattr(model, "norm", nn.RMSNorm(4, eps=1e-4)),
    "eps of a layer": lambda model, _: setattr(model.norm, "eps", 1e-3),
    "more layers": lambda model, module: model.blocks.append(module.Block(4)),
    "fewer layers": lambda model, _: model.blocks.__delitem__(0),
    "forward hook": lambda model, _: _hooked(model),
    "wrapped forward": lambda model, _: setattr(model.norm, "forward", lambda x: x * 2),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"}, "zero": {"zero": 1}, "micro-batches": {"microbatches": 2},
    "precision": {"precision": "bf16"}, "reduce_dtype": {"reduce_dtype": torch.float16},
    "bucket_bytes": {"bucket_bytes": 99}, "attention": {"attention": "ring"}, "shard": {"shard": {"norm.*": "[-]"}},
    "batch_dims": {"batch_dims": 0}, "statistics": {"batch_statistics": "rank"}, "chunked_loss": {"chunked_loss": True},
    "sequence": {"sequence_parallel": "auto"}, "chunks": {"chunks": 2}, "specialize": {"specialize": True}, 
    "schedule": {"schedule": "gpipe"},
    "graphs": {"cuda_graphs": "dry-run"}, "batch": {"batch": "local"}, "own batches": {"batch": "ddp"},
}  # fmt: skip
X, Y = batch()
BATCHES: dict[str, tuple[Any, Any]] = {
    "more rows": (batch(8), {}),
    "dtype": ((X.double(), Y), {}),
    "strides": ((X.t().contiguous().t(), Y), {}),
    "by keyword": ((X,), {"y": Y}),
    "a Python number": ((X, Y, 1.0), {}),
    "another number": ((X, Y), {"weight": 2.0}),
    "one tensor twice": ((X, X), {}),
    "broadcast": ((X, Y[:1]), {}),
    "more dims": ((X[None], Y[None]), {}),
}


def _setting(name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setenv(name, value)


WORLDS: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "autopar's source": lambda patch: patch.setattr(cache_key, "own_source", lambda: "another"),
    "torch's environment": _setting("TORCHINDUCTOR_X", "1"),
    "exact kernels": _setting("AUTOPAR_EXACT_KERNELS", "1"),
    "products": lambda _: torch.set_float32_matmul_precision("medium"),
    "attention": lambda _: torch.backends.cuda.enable_flash_sdp(False),
    "deterministic": lambda _: torch.use_deterministic_algorithms(True),
    "default dtype": lambda _: torch.set_default_dtype(torch.float64),
}


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_flash_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def test_nothing_else_that_is_changed_takes_an_old_program(
    place: Place, monkeypatch: pytest.MonkeyPatch, torch_as_before: None
) -> None:
    keep(place, monkeypatch)
    stale = []
    for what, edit in MODELS.items():
        module = place.load()
        model = module.Model()
        edit(model, module)
        stale += [what] * is_hit(place.parallel(model, module.loss_fn))
    stale += [what for what, options in OPTIONS.items() if is_hit(place.made(**options))]
    stale += [what for what, (args, kwargs) in BATCHES.items() if is_hit(place.made(), args, kwargs)]
    module = place.load()
    stale += ["own loss"] * is_hit(place.parallel(module.Model(), lambda model, x, y: module.loss_fn(model, x, y)))
    stale += ["partial"] * is_hit(place.parallel(module.Model(), functools.partial(module.loss_fn)))
    assert is_hit(place.made())  # and it is still there
    for what, change in WORLDS.items():
        with monkeypatch.context() as patch:
            change(patch)
            stale += [what] * is_hit(place.made())
            torch.set_float32_matmul_precision("highest")
            torch.backends.cuda.enable_flash_sdp(True)
            torch.use_deterministic_algorithms(False)
            torch.set_default_dtype(torch.float32)
    assert stale == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    monkeypatch.setenv("MASTER_PORT", "29999")
    assert is_hit(place.made(seed=7))  # which none of them decides
    assert len(MODELS) + len(OPTIONS) + len(BATCHES) + len(WORLDS) >= 70


@pytest.mark.parametrize(
    ("owner", "name"),
    [(nn.Linear, "forward"), (nn.functional, "linear"), (Tensor, "relu"), (nn.Module, "__call__"), (torch, "matmul")],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_what_was_replaced_in_torch_is_compiled_each_time(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: Any, name: str
) -> None:
    """As libraries of faster kernels do: torch's version says nothing of it."""
    keep(place, monkeypatch)
    was = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kwargs: was(*args, **kwargs) * 2)
        assert not is_hit(place.made())
    assert f"{owner.__name__}.{name}', which was replaced in this process" in caplog.text
    monkeypatch.setattr(nn.Module, "smart_apply", lambda self: None, raising=False)  # transformers adds one
    assert is_hit(place.made())


# -- what is read -----------------------------------------------------------------------------------------------------


def test_what_another_process_would_read_or_draw_is_compiled_each_time(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Each with the reason that the note says."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.register_buffer("count", torch.tensor(2.0))

        def forward(self, x: Tensor, kind: str) -> Tensor:
            y = self.up(x).mean()
            if kind == "number":
                return y * self.count.item()
            if kind == "branch" and x.sum() > 0:
                return y * 2
            return y

    class Drawing(Reading):
        def forward(self, x: Tensor, kind: str) -> Tensor:
            return self.up(x).mean() * torch.tensor(random.random())

    class Opening(Reading):
        def forward(self, x: Tensor, kind: str) -> Tensor:
            with open(os.devnull) as file:
                return self.up(x).mean() + len(file.read())

    @functools.cache
    def table(size: int) -> Tensor:
        return torch.arange(float(size))

    class Cached(Reading):
        def forward(self, x: Tensor, kind: str) -> Tensor:
            return (self.up(x) * table(4)).mean()

    class Ranked(Reading):
        def forward(self, x: Tensor, kind: str) -> Tensor:
            return self.up(x).mean() * (1 if dist.is_initialized() and dist.get_rank() else 2)

    class Renamed(Reading):
        def forward(self, x: Tensor, kind: str) -> Tensor:
            return self.up(x).mean() * (1 if dist.is_initialized() and tell() else 2)

    elsewhere = "which may give something else on another rank or at the next start"
    reasons = {
        (Opening, ""): f"the code of the step reads 'open', {elsewhere}",
        (Ranked, ""): f"the code of the step reads 'get_rank', {elsewhere}",
        (Renamed, ""): f"the code of the step reads 'get_rank', {elsewhere}",
        (Reading, "number"): "values of the batch, or random numbers, decide the program",
        (Reading, "branch"): "values of the batch, or random numbers, decide the program",
        (Drawing, ""): f"the code of the step reads 'random', {elsewhere}",
        (Cached, ""): "a functools._lru_cache_wrapper",
    }
    for (kind, how), why in reasons.items():
        caplog.clear()
        model = autopar.parallelize(kind(), "dp=1", cache=place.cache, specialize=how == "number")
        model.forward_backward(batch()[0], how)
        said = [text for text in caplog.messages if text.startswith("cache: ")]
        assert len(said) == 1, (how, caplog.messages)
        assert said[0].startswith("cache: this program is not kept, and each start compiles it: "), said
        assert said[0].endswith(why), said
        assert list(place.cache.iterdir()) == []


LIBRARY = """
import dataclasses, functools

@functools.cache
def is_new(version):
    return version > 1

@dataclasses.dataclass
class Answer:
    value: object

def double(x):
    return Answer(x * (2 if is_new(2) else 3)).value
"""


def test_a_table_of_an_installed_package_is_told_by_what_is_installed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those by which transformers asks which torch there is; red before: no mixture of it was kept. What
    `dataclass` writes stands in no file, and is found all the same."""
    packages = place.root / "site-packages"
    packages.mkdir()
    (packages / "answering.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(packages))
    library = importlib.import_module("answering")
    read_digests.installed.cache_clear()

    class Model(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return library.double(super().forward(x)) - y

    def is_found() -> bool:
        model = place.parallel(Model(4, 4), lambda model, x, y: model(x, y).square().mean())
        return bool(prepared(model).programs[0].compiled.is_read)

    assert [is_found(), is_found()] == [False, True]
    (packages / "answering-2.0.dist-info").mkdir()
    read_digests.installed.cache_clear()
    assert [is_found(), is_found()] == [False, True]
    read_digests.installed.cache_clear()
    sys.modules.pop("answering")


def test_a_class_that_other_files_import_is_found_where_its_file_has_it(place: Place) -> None:
    """Red before: the importing module was looked through first, the class taken for seen, and all objects that the
    collector knows were looked through; it knows none of those that are frozen."""
    forward = "    def forward(self, x): return super().forward(x).relu()"
    net = f"import torch\nfrom torch import nn\n\nclass Net(nn.Linear):\n{forward}\n"
    place.texts = {
        NAMES[0]: f"from {NAMES[1]} import Net\n\ndef loss_fn(model, x, y): return (model(x) - y).square().mean()\n",
        NAMES[1]: net,
    }
    module = place.load()
    sys.modules[NAMES[1]] = sys.modules.pop(NAMES[1])  # behind the one that imports it
    gc.freeze()
    try:
        read = [
            prepared(place.parallel(module.Net(4, 4), module.loss_fn)).programs[0].compiled.is_read for _ in range(2)
        ]
    finally:
        gc.unfreeze()
    assert read == [False, True]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda data: data[: len(data) // 2],
    "flipped in the head": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "flipped behind": lambda data: data[:-50] + bytes([data[-50] ^ 4]) + data[-49:],
    "version": lambda data: b"2" + data[1:],
}
MORE_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "last byte": lambda data: data[:-1],
    "empty": lambda data: b"",
    "zeros": lambda data: data[:2000] + bytes(1000) + data[3000:],
    "twice": lambda data: data + data,
}


@pytest.mark.parametrize("how", (*DAMAGE, *(pytest.param(how, marks=pytest.mark.slow) for how in MORE_DAMAGE)))
def test_a_damaged_entry_is_compiled_and_written_again(place: Place, how: str) -> None:
    prepared(place.made())
    (path,) = place.cache.iterdir()
    data = path.read_bytes()
    path.write_bytes({**DAMAGE, **MORE_DAMAGE}[how](data))
    again = prepared(place.made())
    assert not again.programs[0].compiled.is_read
    assert path.read_bytes() == data
    assert is_hit(place.made())


def test_entries_that_were_made_by_others_are_no_code_and_no_crash(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """With a right checksum: what does not read as ours is compiled, with a note."""
    prepared(place.made())
    (path,) = place.cache.iterdir()
    key, read = path.stem.split("-")
    ((_, _, says, content),) = entries(place.cache, key)
    known = json.loads(content)
    nested: Any = []
    for _ in range(900):
        nested = [nested]
    changes: tuple[dict[str, Any], ...] = (
        {"program": known["program"].replace("aten.", "os.", 1)}, {"program": "import os"}, {"program": 7},
        {"plan": {}}, {"pipeline": {"graphs": [], "lists": {}}}, {"constants": [["x", ["GAIN", "", 0]]]},
        {"constants": [["x", "no.such"]]}, {"constants": [["x", {"dtype": "f32", "shape": [9], "data": "AAAA"}]]},
        {"result": nested}, {"searched": {"blocks.0.up.weight": "[dp"}},
    )  # fmt: skip
    for change in changes:
        write_entry(place.cache, key, read, says, json.dumps({**known, **change}).encode())
        model = prepared(place.made())
        assert not model.programs[0].compiled.is_read, change
        assert "cannot be read, and is compiled again" in caplog.messages[-1]
        caplog.clear()
    for says_too in ({"files": {}, "codes": {}}, {"files": [], "codes": 3}, [], None, {"files": {"/x": "y"}}):
        write_entry(place.cache, key, read, says_too, content)
        model = prepared(place.made())
        assert not model.programs[0].compiled.is_read, says_too
    assert is_hit(place.made())


def test_two_writers_and_readers_meet_whole_entries(tmp_path: Path) -> None:
    content, faults = b"x" * 200_000, []

    def write() -> None:
        for _ in range(20):
            write_entry(tmp_path, "key", "read", {}, content)

    def read() -> None:
        for _ in range(40):
            faults.extend(1 for *_, found in entries(tmp_path, "key") if found != content)

    threads = [threading.Thread(target=run) for run in (write, write, read)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert [path.name for path in tmp_path.iterdir()] == ["key-read.entry"]


def test_the_entries_unused_longest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files, "_FOLDER_ENTRIES", 3)
    abandoned = tmp_path / ".aside-7-x"
    abandoned.write_text("killed")
    os.utime(abandoned, (0, 0))
    for number in range(5):
        write_entry(tmp_path, f"key{number}", "read", {}, b"{}")
        os.utime(tmp_path / f"key{number}-read.entry", (1000 + number, 1000 + number))
        if number == 3:
            cache_files.used(tmp_path / "key1-read.entry")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "key1-read.entry", "key3-read.entry", "key4-read.entry",
    ]  # fmt: skip


def test_a_folder_that_everyone_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ArtifactError) as found:
        autopar.parallelize(nn.Linear(2, 2), "dp=1", cache=tmp_path)
    assert str(found.value) == (
        f"cache='{tmp_path}' may be written by everyone (mode 777), and who writes there decides which program trains. "
        f"Take that right away (chmod o-w), or name another folder."
    )
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ArtifactError) as found:
        autopar.parallelize(nn.Linear(2, 2), "dp=1", cache=file)
    assert str(found.value) == f"cache='{file}': File exists. Name a folder that can be made."


def test_the_environment_names_the_folder(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(place.cache))
    module = place.load()
    for has in (False, True):
        model = prepared(autopar.parallelize(module.Model(), "dp=1", loss_fn=module.loss_fn))
        assert model.programs[0].compiled.is_read is has


def test_variables_of_the_environment_are_compared_where_code_names_them(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    way = ContextVar("way", default=1.0)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).mean() * float(os.environ.get("EDITED_SCALE", "1.0")) * way.get()

    class Computed(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x).mean() * float(os.environ.get(f"EDITED_{'SCALE'}", "1.0"))

    def is_read(kind: type[nn.Module] = Scaled) -> bool:
        model = prepared(autopar.parallelize(kind(), "dp=1", cache=place.cache), (batch()[0],))
        return model.programs[0].compiled.is_read

    found = [is_read(), is_read()]
    monkeypatch.setenv("SOMETHING_ELSE", "5")
    found.append(is_read())
    monkeypatch.setenv("EDITED_SCALE", "2.0")
    found += [is_read(), is_read()]
    way.set(3.0)
    found += [is_read(), is_read()]
    assert found == [False, True, True, False, True, False, True]
    assert [text for text in caplog.messages if text.startswith("cache: ")] == []
    assert not is_read(Computed)
    assert "reads 'os', which may give something else" in caplog.text
