"""Read the weights of a model from safetensors files, each rank its parts.

A file of `transformers` or of `save_pretrained`: one file, or a folder of them, with or without an index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError, CaptureError
from autopar.ir.layout import Layout
from autopar.parallel.tensors.padding import padded_part
from autopar.parallel.tensors.place import Place


@dataclass(frozen=True)
class Weights:
    """The tensors of some files. file_of: by the name of a tensor."""

    path: Path
    file_of: Mapping[str, Any]  # open, mapped into memory: nothing is read yet

    @staticmethod
    def open(path: str | Path) -> Weights:
        """The tensors of a file, or of all safetensors files of a folder."""
        try:
            from safetensors import safe_open
        except ImportError:
            raise AutoparError("weights= reads safetensors files: pip install safetensors.") from None
        path = Path(path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise AutoparError(f"weights='{path}': there is no such file, or no .safetensors file in that folder.")
        opened = [safe_open(file, framework="pt") for file in files]
        return Weights(path, {name: file for file in opened for name in file.keys()})  # noqa: SIM118

    def check(self, wanted: Sequence[tuple[Sequence[str], torch.Tensor]]) -> None:
        """Raise CaptureError for tensors, by their names, that are in no file or have another shape there."""
        faults, missing = [], []
        for names, tensor in wanted:
            name = self._known(names)
            if name is None:
                missing.append(f"'{names[0]}'")
            elif (found := list(self.file_of[name].get_slice(name).get_shape())) != list(tensor.shape):
                faults.append(f"'{name}' is {found} there and {list(tensor.shape)} in the model")
        if missing:
            faults.append(
                f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if missing[3:] else ''} "
                f"{'are' if missing[1:] else 'is'} on the meta device and in no file (what no checkpoint keeps, such "
                f"as a buffer with persistent=False, must be built on a real device)"
            )
        if faults:
            raise CaptureError(f"weights='{self.path}' does not fit the model: {'; '.join(faults)}.")

    def part(self, names: Sequence[str], place: Place, like: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor, in the dtype of `like` and memory of its own: no more is read."""
        name = self._known(names)
        assert name is not None
        file = self.file_of[name]
        part = file.get_slice(name)[_rows(place, like.shape)] if like.ndim else file.get_tensor(name)
        return part.to(like.dtype, copy=True, memory_format=torch.contiguous_format)  # else it would keep the file

    def _known(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.file_of), None)


def _rows(place: Place, shape: torch.Size) -> tuple[slice, ...]:
    """Where a part lies in the whole: one block, of what no integer splits."""
    found = []
    for dim, size in enumerate(shape):
        mine = padded_part(torch.arange(1, size + 1), Layout((place.layout.dims[dim],)), place.mesh, place.world.coord)
        mine = mine[mine > 0]  # the rest is padding
        found.append(slice(int(mine[0]) - 1, int(mine[-1])) if len(mine) else slice(0, 0))
    return tuple(found)
