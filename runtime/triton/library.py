"""The kernels of a program: written for its groups, in one file."""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autopar.ir.ops.fused import Fused
from autopar.runtime.triton.emit import KernelText
from autopar.runtime.triton.launch_kernel import Function, FusedKernel

_log = logging.getLogger("autopar")
_HEADER = '"""Triton kernels that autopar wrote. `rows` is the number of rows of a kernel\'s domain."""\n'
_DRAWS = "from autopar.runtime.kernels.random_triton import FIRST, SECOND, key_of, mixed\n"
_COMMENT_AT = 88


class Library:
    """Makes a kernel for each group that it is given. The first that runs writes all of those known to one file.

    directory: for that file. plain: computes a group op by op, where it has no kernel. exact: kernels round after each
    op, as eager does, rather than once at the end: for comparisons.
    """

    def __init__(
        self, directory: Path, device: torch.device, plain: Callable[[Fused], Function], exact: bool = False
    ) -> None:
        self._directory, self._device, self._plain, self._exact = directory, device, plain, exact
        self._kernels: dict[str, KernelText] = {}

    def __call__(self, fused: Fused, over: tuple[int | None, ...] = ()) -> FusedKernel:
        """The function of a group's operands. over: for each result the operand over which it may be written."""
        made = FusedKernel(fused, self._plain(fused), self._function, self._device, self._exact, over)
        if made.kernel is not None:
            self._kernels.setdefault(made.kernel.digest, made.kernel)
        return made

    @property
    def source(self) -> str:
        """The file, for people to read; operands of other strides than in it have kernels of their own."""
        return text_of(list(self._kernels.values())) if self._kernels else ""

    def _function(self, kernel: KernelText) -> Any:
        """The function of a kernel: of the program's file, or of one that has it alone."""
        is_known = kernel.digest in self._kernels
        module = load(list(self._kernels.values()) if is_known else [kernel], self._directory)
        return getattr(module, name_of(kernel))


# -- the file ---------------------------------------------------------------------------------------------------------


def name_of(kernel: KernelText) -> str:
    """The function of a kernel in its file."""
    return f"{kernel.name}_{kernel.digest[:6]}"


def text_of(kernels: Sequence[KernelText]) -> str:
    """A file of kernels, each once."""
    unique = {kernel.digest: kernel for kernel in kernels}.values()
    imports = "import triton\nimport triton.language as tl\n"
    if any(kernel.draws for kernel in unique):
        imports += "\n" + _DRAWS
    return "\n\n".join((_HEADER + "\n" + imports, *map(_function, unique)))


def _function(kernel: KernelText) -> str:
    tile = kernel.tile
    numbers = [line.split(":")[0] for line in kernel.head if "[" not in line and line.startswith("in")]
    lines = [f"# {line}" for line in kernel.head]
    lines.append(f"# tiles of {tile.rows} x {tile.columns}, {tile.warps} warps")
    lines.append(f"@triton.jit(do_not_specialize={['rows', *numbers]!r})".replace("'", '"'))
    for text, comment in zip(kernel.body, kernel.comments, strict=True):
        lines.append(f"{text:{_COMMENT_AT}}  # {comment}" if comment else text)
    return "\n".join(lines).replace("KERNEL", name_of(kernel), 1) + "\n"


def load(kernels: Sequence[KernelText], directory: Path) -> ModuleType:
    """The module of some kernels, from a file in a directory, written there if no earlier run did; in a temporary one
    if nothing can be written there."""
    try:
        return _module(_written(kernels, directory))
    except OSError as error:
        return _module(_written(kernels, _instead_of(directory, error.strerror or str(error))))


def _written(kernels: Sequence[KernelText], directory: Path) -> Path:
    digest = hashlib.sha256("".join(sorted(kernel.digest for kernel in kernels)).encode()).hexdigest()[:16]
    path = directory / f"kernels_{digest}.py"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        _write(path, text_of(kernels))
    return path


@functools.cache
def _instead_of(directory: Path, reason: str) -> Path:
    """A temporary directory, which goes when the process ends."""
    made = tempfile.mkdtemp(prefix="autopar_kernels_")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    _log.warning(
        "generated kernels cannot be kept in %s (%s): they go to %s and are compiled anew in each run. "
        "AUTOPAR_KERNELS names another directory.", directory, reason, made,
    )  # fmt: skip
    return Path(made)


def _write(path: Path, text: str) -> None:
    """Other processes see the whole file or none, and a disk that is full keeps no part of it."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"autopar_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
