"""Files of a checkpoint: safetensors, written with checksums beside, and read by regions.

The library makes a file in memory first; here each tensor is written from where it lies, and its checksum is taken
while fsync waits for the disk in another thread.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from autopar.checkpoint.checksum import checksum
from autopar.checkpoint.manifest import NAME, FileSum, Manifest, SavedBlock, SavedTensor, damaged
from autopar.checkpoint.tree import dtype_of
from autopar.errors import CheckpointError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BLOCK = 1 << 24


def stored(value: torch.Tensor) -> torch.Tensor:
    """A tensor as the file has it: complex numbers are pairs."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[FileSum, dict[str, int]]:
    """Write contiguous tensors of the host to a new file, and wait until the disk has them. Gives the checksums of the
    file and of each tensor, which are computed while the disk works."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # so that each lies aligned
    header: dict[str, Any] = {}
    end = 0
    for name, value in ordered:
        start, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    with ThreadPoolExecutor(1) as beside, path.open("xb", buffering=0) as file:
        _write(file, memoryview(head))
        for _, value in ordered:
            _write(file, bytes_of(value))
        on_disk = beside.submit(os.fsync, file.fileno())
        sums = {name: checksum(bytes_of(value)) for name, value in ordered}
        on_disk.result()
        return FileSum(len(head) + end, zlib.crc32(head)), sums


def write_text(path: Path, text: bytes) -> None:
    """Write a small new file, and wait until the disk has it."""
    with path.open("xb", buffering=0) as file:
        _write(file, memoryview(text))
        os.fsync(file.fileno())


def bytes_of(value: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    flat: Any = value.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _write(file: Any, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += file.write(data[at : at + _BLOCK])


def check_files(folder: Path, manifest: Manifest) -> None:
    """Check that a folder has the files that its manifest lists, of their sizes, and no others. Raises CheckpointError
    with the name of a file."""
    extra = sorted({path.name for path in folder.iterdir()} - {NAME, *manifest.files})
    extra = [name for name in extra if not name.startswith(".")]  # which file systems keep for themselves
    if extra:
        raise CheckpointError(damaged(folder / extra[0], f"no file of this checkpoint, as its {NAME} says"))
    for name, wanted in sorted(manifest.files.items()):
        file = folder / name
        try:
            found = file.lstat()
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(damaged(file, "it is no plain file"))
            if found.st_size != wanted.bytes:
                raise CheckpointError(damaged(file, f"it has {found.st_size} bytes, and was saved with {wanted.bytes}"))
            with file.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                opened.seek(0)
                head = opened.read(8 + min(size, found.st_size))
            if zlib.crc32(head) != wanted.head:
                raise CheckpointError(damaged(file, "the checksum of its head is not that of what was saved"))
        except FileNotFoundError:
            raise CheckpointError(damaged(file, "it is missing")) from None
        except OSError as error:
            raise CheckpointError(f"'{file}' cannot be read: {error.strerror}.") from None


@dataclass(slots=True)
class Reader:
    """Reads regions of the tensors of a checkpoint whose files have the sizes and heads that were saved."""

    folder: Path
    manifest: Manifest
    _open: dict[str, Any] = field(default_factory=dict)

    def check(self, rank: int = 0, size: int = 1) -> None:
        """Check that the files hold what the manifest says, and the data of every `size`-th file. Raises
        CheckpointError."""
        mine = sorted(self.manifest.files)[rank::size]
        for name, saved in self.manifest.tensors.items():
            for block in saved.pieces:
                self._check_block(name, saved, block)
                if block.file in mine and checksum(bytes_of(self._read(block, []))) != block.sum:
                    why = f"the checksum of '{name[:80]}' in it is not that of what was saved"
                    raise CheckpointError(damaged(self.folder / block.file, why))

    def _check_block(self, name: str, saved: SavedTensor, block: SavedBlock) -> None:
        try:
            found = self._file(block.file).get_slice(block.key)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"'{self.folder / block.file}' does not read: {str(error)[:200]}.") from None
        of = dtype_of(saved.dtype)
        wanted = (*block.shape, 2) if of.is_complex else block.shape
        if shape != wanted or dtype != DTYPES.get(of.to_real() if of.is_complex else of):
            raise CheckpointError(
                f"'{self.folder / block.file}' has {dtype} {list(shape)} where {NAME} says {saved.dtype} "
                f"{list(block.shape)} of '{name[:80]}'."
            )

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return dtype_of(self.manifest.tensors[name].dtype)

    def whole(self, name: str) -> torch.Tensor:
        """A whole tensor, in memory of its own on the host."""
        saved = self.manifest.tensors[name]
        made = torch.empty(saved.shape, dtype=dtype_of(saved.dtype), device="cpu")
        self.fill(name, (0,) * made.ndim, made)
        return made

    def fill(self, name: str, offset: Sequence[int], target: torch.Tensor) -> None:
        """Write the region of a tensor that begins at an offset into a tensor of its shape."""
        saved: SavedTensor = self.manifest.tensors[name]
        of_complex = dtype_of(saved.dtype).is_complex
        for piece in saved.pieces:
            both = [
                (max(at, begins), min(at + size, begins + has))
                for at, size, begins, has in zip(offset, target.shape, piece.offset, piece.shape, strict=True)
            ]
            if any(start >= stop for start, stop in both):
                continue
            read = self._read(piece, [slice(a - at, b - at) for (a, b), at in zip(both, piece.offset, strict=True)])
            # A file has 8 bytes' alignment, and torch copies complex numbers of 16 in one move: a crash where they lie.
            value = torch.view_as_complex(read.clone(memory_format=torch.contiguous_format)) if of_complex else read
            into = target[tuple(slice(a - at, b - at) for (a, b), at in zip(both, offset, strict=True))]
            into.copy_(value)

    def _read(self, piece: SavedBlock, region: list[slice]) -> torch.Tensor:
        file = self._file(piece.file)
        with torch.device("cpu"):  # safetensors leaves it to torch's default device
            if not region:
                return file.get_tensor(piece.key)  # type: ignore[no-any-return]
            return file.get_slice(piece.key)[tuple(region)]  # type: ignore[no-any-return]

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt")
        return self._open[name]
