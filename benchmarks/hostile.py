"""Files that were made to do harm: saved programs and weights. Is each refused, with nothing run or written?

    timeout 1200 .venv/bin/python -m benchmarks.hostile --count 2000 --seed 0

Saves the programs of a small step with and without a pipeline, and a file of weights. Each row damages a copy: bits
flipped, cut short, zeroed, deleted, another's in its place, a pickle, a link to a file outside; or values within JSON
and program text put wrong, with the digests made right again as whoever means harm would. Then it is loaded. Allowed
are an error of ours that names the file, and a result (where what was changed says nothing). All else is counted:
another error, LIMIT_S seconds, LIMIT_MIB of memory, a file written beside the folder, code that ran (the pickles would
make a folder). What is loaded may compute anything: digests are no signature.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.api import compile as compile_
from autopar.compiled import load
from autopar.parallel.weights.materialize import Weights
from autopar.report.artifact.artifact import INDEX
from benchmarks.specs import NET, ODD, X, command, fault_of, loss_fn, timed

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1e308, float("nan"), "", "\0", "../../outside", "/etc/passwd", "os.system", "eval",
    "__class__", "%x", [], {}, [[[[]]]], {"a": {"b": 1}}, "f32[99999999999999]", "0-99999999999", "dp=99999999",
    "return value \"y\" = %x", "%x: f32[2] = aten.add.Tensor(%x, %x)", "%x: f32[8] = builtins.exec(%x)", "9" * 5000,
)  # fmt: skip


class Canary:
    """What a pickle runs that is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def made(folder: Path) -> dict[str, Callable[[], object]]:
    """What is read of intact files in a folder, by the folder in it."""
    from safetensors.torch import save_file

    for name, mesh, options in (("plain", "dp=2,tp=2", {}), ("staged", "pp=2,dp=2", {"microbatches": 2})):
        compile_(NET, mesh, loss_fn=loss_fn, batch=(X,), **options).save(folder / name)  # type: ignore[arg-type]
    (folder / "weights").mkdir()
    save_file(dict(NET.state_dict()), folder / "weights" / "model.safetensors")
    entries = dict(NET.state_dict())

    def weights() -> None:
        found = Weights.open(folder / "weights")
        found.check([((name,), tensor) for name, tensor in entries.items()])

    return {"plain": lambda: load(folder / "plain"), "staged": lambda: load(folder / "staged"), "weights": weights}


def damage_bytes(path: Path, dice: random.Random, outside: Path) -> None:
    """Change what a file holds without looking into it."""
    data = bytearray(path.read_bytes())
    kind = dice.choice(("flip", "cut", "zero", "delete", "swap", "pickle", "link", "grow", "header"))
    if kind == "flip":
        for _ in range(dice.choice((1, 1, 3, 20))):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        data = data[: dice.randrange(len(data))]
    elif kind == "zero":
        at = dice.randrange(len(data))
        data[at : at + 4096] = bytes(len(data[at : at + 4096]))
    elif kind == "swap":
        data = bytearray(dice.choice(sorted(path.parent.iterdir())).read_bytes())
    elif kind == "pickle":
        data = bytearray(pickle.dumps(Canary(outside / "canary")))
    elif kind == "grow":
        data += dice.choice((b"\0" * 4096, b"[" * 100_000, b"}" * 10, b"9" * 100_000))
    elif kind == "header":
        data[:8] = dice.choice((b"\xff" * 8, bytes(8), (1 << 40).to_bytes(8, "little"), b"PK\3\4\0\0\0\0"))
    if kind in ("delete", "link"):
        path.unlink()
    if kind == "link":
        path.symlink_to(outside / "secret")
    elif kind != "delete":
        path.write_bytes(data)


def damage_values(folder: Path, dice: random.Random) -> None:
    """Change values within the JSON of saved programs, and sign it again."""
    names = [path.name for path in sorted(folder.glob("*.json"))]
    name = dice.choice(names)
    content = json.loads((folder / name).read_text())
    for _ in range(dice.choice((1, 1, 2, 4))):
        content = _changed(content, dice)
    (folder / name).write_text(json.dumps(content))
    index = json.loads((folder / INDEX).read_text())
    if not isinstance(index, dict) or not isinstance(index.get("files"), dict):
        return
    for each in index["files"]:
        if isinstance(each, str) and "\0" not in each and (folder / each).is_file():
            index["files"][each] = hashlib.sha256((folder / each).read_bytes()).hexdigest()
    unsigned = {key: value for key, value in index.items() if key != "sha256"}
    index["sha256"] = hashlib.sha256(json.dumps(unsigned, sort_keys=True).encode()).hexdigest()
    (folder / INDEX).write_text(json.dumps(index))


def _changed(value: Any, dice: random.Random) -> Any:
    """A value of JSON with one change somewhere in it."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        key = dice.choice(sorted(value))
        if dice.random() < 0.1:
            return {dice.choice((key + "x", "../x", "\0")) if one == key else one: each for one, each in value.items()}
        return {**value, key: _changed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.9:
        at = dice.randrange(len(value))
        kind = dice.random()
        if kind < 0.1:
            return [*value[:at], *value[at + 1 :]]
        if kind < 0.2:
            return [*value, value[at]]
        if kind < 0.3:
            other = dice.randrange(len(value))
            swapped = list(value)
            swapped[at], swapped[other] = value[other], value[at]
            return swapped
        return [*value[:at], _changed(value[at], dice), *value[at + 1 :]]
    if isinstance(value, str) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        put = dice.choice((*ODD, "%", "[dp,-]", "partial(tp)", "9", "f64", "aten.mul.Tensor", "autopar.wait.default"))
        return value[:at] + put + value[at + dice.randrange(12) :]
    return dice.choice(VALUES)


def faults(seed: int, numbers: range, seconds: float) -> tuple[dict[int, str], int]:
    """What is wrong, by row, and how many rows were tried."""
    with tempfile.TemporaryDirectory() as top:
        intact, used, outside = (Path(top) / name for name in ("intact", "used", "outside"))
        outside.mkdir()
        (outside / "secret").write_text("secret")
        used.mkdir()
        readers = made(used)
        shutil.copytree(used, intact)

        def run(number: int) -> str | None:
            dice = random.Random(f"{seed} {number}")
            name = dice.choice(sorted(readers))
            shutil.rmtree(used)
            shutil.copytree(intact, used)
            if name != "weights" and dice.random() < 0.6:
                damage_values(used / name, dice)
            else:
                damage_bytes(dice.choice(sorted((used / name).iterdir())), dice, outside)
            fault = fault_of(readers[name], names=str(used))
            if sorted(path.name for path in (*outside.iterdir(), *Path(top).iterdir())) != [
                "intact", "outside", "secret", "used",
            ]:  # fmt: skip
                return f"{name}: something was written or run"
            return f"{name}: {fault}" if fault else None

        return timed(run, numbers, seconds)


if __name__ == "__main__":
    sys.exit(command(__doc__ or "", faults, "files"))
