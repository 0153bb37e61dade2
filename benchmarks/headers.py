"""Headers of checkpoints and weights that were changed on purpose: is each refused, without more memory than the file?

    timeout 3600 .venv/bin/python -m benchmarks.headers --count 10000 --seed 0

A checkpoint of a small model and a file of weights, of MIB MiB each. Each row changes the header of one of their files:
bytes, the length before it, or values of its JSON (shapes, offsets, dtypes, names, keys twice, deep nesting, numbers of
5,000 digits); half of the checkpoint's get right checksums, as whoever means harm would give them. Allowed are an
error of ours that names the file or the folder, and a result. All else is counted: another error, LIMIT_S seconds, and
a process that grows by more than TWICE times a file over all rows.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autopar
from autopar.checkpoint.folder import folder_of
from autopar.checkpoint.manifest import NAME
from autopar.parallel.weights.materialize import Weights
from benchmarks.hostile import VALUES
from benchmarks.specs import ODD, command, fault_of, timed

MIB, TWICE = 16, 2
WIDTH = 2048  # of a matrix of MIB MiB
KEYS = ("dtype", "shape", "data_offsets", "__metadata__", "0.weight", "a" * 10_000)
NUMBERS = (-1, 0, 1, 2**31, 2**40, 2**63 - 1, 2**64, 10**30, 1.5, 1e308, float("nan"))


def made(folder: Path) -> tuple[dict[Path, Callable[[], object]], Path]:
    """What reads each of the files, and the manifest."""
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
    autopar.save(folder / "run", model, step=1)
    (folder / "weights").mkdir()
    file = folder / "weights" / "model.safetensors"
    save_file(model.state_dict(), file)
    entries = [((name,), tensor) for name, tensor in model.state_dict().items()]
    step = folder / "run" / folder_of(1)

    def checkpoint() -> None:
        autopar.load(folder / "run", model)

    def weights() -> None:
        found = Weights.open(folder / "weights")
        found.check(entries)
        for names, tensor in entries:  # as the whole part of one rank is read
            found.file_of[names[0]].get_slice(names[0])[:] if tensor.ndim else found.file_of[names[0]]

    readers: dict[Path, Callable[[], object]] = {
        file: weights, step / "rank-00000.safetensors": checkpoint, step / NAME: checkpoint
    }  # fmt: skip
    return readers, step / NAME


def changed(header: bytes, dice: random.Random) -> bytes:
    """A header with some changes: of its bytes, or of its values."""
    if dice.random() < 0.4:
        data = bytearray(header)
        for _ in range(dice.choice((1, 1, 2, 8))):
            at = dice.randrange(len(data))
            put = dice.choice((bytes([dice.randrange(256)]), *(odd.encode("utf-8", "replace") for odd in ODD)))
            data[at : at + dice.randrange(3)] = put
        return bytes(data)
    content = json.loads(header)
    for _ in range(dice.choice((1, 1, 2, 4))):
        content = _changed(content, dice)
    text = json.dumps(content)
    if dice.random() < 0.1 and text.startswith("{") and len(text) > 2:
        text = f'{{"{dice.choice(KEYS)}": {json.dumps(dice.choice(VALUES))}, {text[1:]}'  # maybe twice
    return text.encode()


def _changed(value: Any, dice: random.Random) -> Any:
    if isinstance(value, (dict, list)) and value and dice.random() < 0.9:
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        key = dice.choice(list(items))
        kind = dice.random()
        if kind < 0.1:
            del items[key]
        elif kind < 0.2:
            items[dice.choice(KEYS) if isinstance(value, dict) else len(items)] = items[key]
        else:
            items[key] = _changed(items[key], dice)
        return items if isinstance(value, dict) else list(items.values())
    if isinstance(value, int) and dice.random() < 0.8:
        return dice.choice((*NUMBERS, value + 1, value * 2, -value))
    return dice.choice(VALUES)


def faults(seed: int, numbers: range, seconds: float) -> tuple[dict[int, str], int]:
    """What is wrong, by row, and how many rows were tried."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as top:
        readers, manifest = made(Path(top))
        before = 0

        def run(number: int) -> str | None:
            nonlocal before
            dice = random.Random(f"{seed} {number}")
            file = dice.choice(list(readers))
            data, listed = file.read_bytes(), manifest.read_bytes()
            size = len(data) if file == manifest else 8 + int.from_bytes(data[:8], "little")
            if file == manifest:
                rest = changed(b"{" + data[data.index(b"\n") + 1 :], dice)[1:]
                head = data[: data.index(b"\n") + 1]
                put = (b'{"crc32": "%08x",\n' % zlib.crc32(rest) if dice.random() < 0.5 else head) + rest
            else:
                header = changed(data[8:size].rstrip(), dice)
                length = dice.choice((len(header),) * 4 + (0, 2**20, 2**40, 2**63, 2**64 - 1))
                put = length.to_bytes(8, "little") + header + data[size:]
            file.write_bytes(put)
            if file.parent == manifest.parent and file != manifest and dice.random() < 0.5:
                _sign(manifest, file.name, len(put), put[: 8 + min(length, len(put))])
            try:
                fault = fault_of(readers[file], names=top)
                if fault is not None and fault.startswith("no name: Error(s) in loading state_dict"):
                    fault = None  # what does not fit the model is told in these words, by the tensor's name
            finally:
                file.write_bytes(data)
                manifest.write_bytes(listed)
            # of all rows together: what one leaves behind counts for the next
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            if fault is None and number >= 0 and most - before > (TWICE * MIB) << 10:
                fault = f"the process grew by {(most - before) >> 10} MiB, of files of {MIB} MiB"
            before = most if number < 0 else before
            return f"{file.name}: {fault}" if fault else None

        for number in range(-12, 0):  # what reading and writing here needs is no growth
            run(number)
        return timed(run, numbers, seconds)


def _sign(manifest: Path, name: str, size: int, head: bytes) -> None:
    """Put the right size and checksums of a file, and of the manifest itself."""
    data = manifest.read_bytes()
    content = json.loads(b"{" + data[data.index(b"\n") + 1 :])
    content["files"][name] = {"bytes": size, "head": zlib.crc32(head)}
    rest = json.dumps(content)[1:].encode()
    manifest.write_bytes(b'{"crc32": "%08x",\n' % zlib.crc32(rest) + rest)


if __name__ == "__main__":
    sys.exit(command(__doc__ or "", faults, "headers"))
