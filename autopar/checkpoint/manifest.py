"""The manifest of a checkpoint: which file holds which piece of which tensor, and all that is no tensor, as JSON.

Its first line holds a checksum of all the other bytes, and it lists size and checksum of each file beside it. It is
read without trust: a type, a name or a number that `Manifest.text` would not write is refused.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.checkpoint.tree import Give, decode, dtype_of, outline
from autopar.errors import CheckpointError

NAME = "manifest.json"
FORMAT, VERSION = "autopar checkpoint", 1
MOST = 1 << 30  # bytes of a manifest
_HEAD = '{"crc32": "%08x",\n'
_FILE = re.compile(r"rank-\d{5,9}\.safetensors")


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block of a tensor, in a file under a key. sum: of its bytes (`checksum.py`)."""

    file: str
    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    sum: int = 0


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint. placed: it was a DTensor of a parallel model."""

    dtype: str
    shape: tuple[int, ...]
    placed: bool
    pieces: tuple[SavedBlock, ...]


@dataclass(frozen=True, slots=True)
class FileSum:
    """The size of a file, and the CRC-32 of its head; behind that each block has its own. They find damage, and are no
    defence against who changes a file on purpose: for that keep SHA-256 sums elsewhere."""

    bytes: int
    head: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds. state: trees (`tree.py`) of what all ranks share. own: trees of what each rank has for
    itself: one, if all have the same."""

    step: int
    ranks: int
    files: Mapping[str, FileSum]
    tensors: Mapping[str, SavedTensor]
    state: Mapping[str, Any]
    own: tuple[Any, ...]

    @property
    def text(self) -> bytes:
        """The manifest as a file."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "ranks": self.ranks,
            "files": {name: asdict(each) for name, each in self.files.items()},
            "tensors": {name: asdict(each) for name, each in self.tensors.items()},
            "state": self.state,
            "own": self.own,
        }
        rest = json.dumps(content, allow_nan=False)[1:].encode()
        return (_HEAD % zlib.crc32(rest)).encode() + rest

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a folder. Raises CheckpointError."""
        file = folder / NAME
        try:
            if file.is_symlink() or not file.is_file():
                raise CheckpointError(f"'{folder}' is no checkpoint: '{file}' is missing, or no plain file.")
            size = file.stat().st_size
            if size > MOST:
                raise CheckpointError(f"'{file}' has {size} bytes; a manifest has at most {MOST}.")
            data = file.read_bytes()
        except OSError as error:
            raise CheckpointError(f"'{file}' cannot be read: {error.strerror}.") from None
        cut = len(_HEAD % 0)
        if data[:cut] != (_HEAD % zlib.crc32(data[cut:])).encode():
            raise CheckpointError(damaged(file, "its checksum is not that of its content"))
        try:
            return _checked(
                json.loads(data, object_pairs_hook=_once, parse_constant=_refused, parse_float=_finite), folder
            )
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"'{file}' is not a manifest of autopar: {type(error).__name__}: {str(error)[:200]}."
            ) from None


def damaged(file: Path, why: str) -> str:
    """What is said of a file that is not what was saved."""
    return (
        f"'{file}' is damaged: {why}. Nothing was loaded. Take it from a backup, or load another step: "
        f"autopar.load(..., step=N)."
    )


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key '{key[:80]}' stands twice")
        made[key] = value
    return made


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    """A number that `json` would read as infinite, such as 1e999, is none."""
    value = float(text)
    return value if math.isfinite(value) else _refused(text[:40])


def _checked(content: Any, folder: Path) -> Manifest:
    """A manifest of JSON that was read. Raises ValueError or TypeError for what does not fit."""
    if content["format"] != FORMAT:
        raise ValueError(f"its format is '{str(content['format'])[:40]}'")
    if content["version"] != VERSION:
        raise CheckpointError(
            f"'{folder / NAME}' is of version {str(content['version'])[:20]} of the format; this autopar reads version "
            f"{VERSION}. Load it with the autopar that wrote it."
        )
    files = {
        _file(name): FileSum(_natural(each["bytes"]), _natural(each["head"])) for name, each in content["files"].items()
    }
    tensors = {name: _saved(name, each, files) for name, each in content["tensors"].items()}
    own = content["own"]
    if not isinstance(own, list) or not isinstance(content["state"], dict):
        raise TypeError("'own' is a list and 'state' an object")
    _check_state(content["state"], own, tensors)
    ranks = _natural(content["ranks"])
    if len(own) not in (1, ranks):
        raise ValueError(f"{ranks} ranks have {len(own)} states of their own")
    return Manifest(_natural(content["step"]), ranks, files, tensors, content["state"], tuple(own))


def _check_state(state: Any, own: list[Any], tensors: Mapping[str, SavedTensor]) -> None:
    """Look at all trees: the tensors that they name are there, and all else reads."""

    def known(name: Any) -> torch.Tensor:
        if name not in tensors:
            raise ValueError(f"there is no tensor '{str(name)[:80]}'")
        return torch.empty(0, device="cpu")

    def read(trees: Any, give: Give = known) -> None:
        for tree in trees.values():
            decode(tree, give)

    for model in state["models"].values():
        read(model["state"])
        read({name: model[name] for name in ("random", "scale") if name in model})
    for optimizer in state["optimizers"].values():
        for name in ("state", "others", "more"):
            read(optimizer[name])
        for group in optimizer["groups"]:
            read(group)
            if not all(isinstance(name, str) for name in group["params"]):
                raise TypeError("parameters of a group have names")
    read(state["schedulers"])
    read({"extra": state["extra"]["extra"]})
    for each in own:
        read(each["loaders"], outline)
        read(each["generators"], outline)


def _saved(name: str, each: Any, files: Mapping[str, FileSum]) -> SavedTensor:
    shape = _naturals(each["shape"])
    dtype_of(each["dtype"])
    pieces = []
    for piece in each["pieces"]:
        offset, shape_ = (_naturals(piece[name]) for name in ("offset", "shape"))
        found = SavedBlock(_file(piece["file"]), piece["key"], offset, shape_, _natural(piece["sum"]))
        if found.file not in files or not isinstance(found.key, str):
            raise ValueError(f"'{name[:80]}' lies in '{found.file}', which is not among the files")
        ends = [at + size for at, size in zip(found.offset, found.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a piece of '{name[:80]}' ends at {ends}, outside of {list(shape)}")
        pieces.append(found)
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        raise ValueError(f"the pieces of '{name[:80]}' are not the whole of {list(shape)}")
    return SavedTensor(each["dtype"], shape, bool(each["placed"]), tuple(pieces))


def _file(name: Any) -> str:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"'{str(name)[:80]}' is no name of a file of a checkpoint")
    return name


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"'{str(value)[:40]}' is no number from 0 to 2**63")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"'{str(values)[:40]}' is no list of sizes")
    return tuple(map(_natural, values))
