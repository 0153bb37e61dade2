"""The one place where the environment is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import RankError

_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_TRUE = ("1", "true", "yes", "on", "y")  # as Triton reads it


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says.

    dump: AUTOPAR_DUMP, a directory for the program after each pass.
    cache: AUTOPAR_CACHE, a directory of compiled programs, where `parallelize` and `run` are not told one.
    kernels: AUTOPAR_KERNELS, a directory where generated kernels are kept; by default a part of the user's cache.
    exact: AUTOPAR_EXACT_KERNELS, by which generated kernels round after each op, as eager does.
    interpret: TRITON_INTERPRET, by which Triton runs kernels on a CPU.
    trims: whether MALLOC_TRIM_THRESHOLD_ says when glibc gives memory back; else ranks on a CPU keep it.
    rank, world_size, local_rank, local_world_size: what torchrun sets; None without a launcher. Slurm's srun and Open
      MPI's mpirun have names of their own for the place on a machine.
    attempt: how often torchrun has started this machine's ranks anew.
    error_file: where torchrun looks for what a rank that fails has to say.
    """

    dump: Path | None = None
    cache: Path | None = None
    kernels: Path = Path.home() / ".cache" / "autopar" / "kernels"
    exact: bool = False
    interpret: bool = False
    trims: bool = False
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    attempt: int = 0
    error_file: Path | None = None

    @staticmethod
    def read() -> Settings:
        """The settings as they are now."""
        return Settings(
            dump=_path("AUTOPAR_DUMP"),
            cache=_path("AUTOPAR_CACHE"),
            kernels=_path("AUTOPAR_KERNELS") or _cache() / "autopar" / "kernels",
            exact=_flag("AUTOPAR_EXACT_KERNELS"),
            interpret=_flag("TRITON_INTERPRET"),
            trims="MALLOC_TRIM_THRESHOLD_" in os.environ,
            rank=_integer("RANK"),
            world_size=_integer("WORLD_SIZE"),
            local_rank=_first_integer(_LOCAL_RANK) if _integer("RANK") is not None else _integer("LOCAL_RANK"),
            local_world_size=_integer("LOCAL_WORLD_SIZE"),
            attempt=_integer("TORCHELASTIC_RESTART_COUNT") or 0,
            error_file=_path("TORCHELASTIC_ERROR_FILE"),
        )


def variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The variables whose names begin so, in the order of their names: what libraries read for themselves. None of
    torchrun's, which are others at each start, and not the one that torch itself sets as it runs."""
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
    others = ("TORCHELASTIC_", "TORCHINDUCTOR_CACHE_DIR")
    return {name: value for name, value in found.items() if not name.startswith(others)}


def _cache() -> Path:
    """Where the user's programs keep what they can make again (XDG base directories)."""
    return _path("XDG_CACHE_HOME") or Path.home() / ".cache"


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in _TRUE


def _first_integer(names: Iterable[str]) -> int | None:
    return next((value for name in names if (value := _integer(name)) is not None), None)


def _integer(name: str) -> int | None:
    value = os.environ.get(name)
    try:
        return int(value) if value else None
    except ValueError:
        raise RankError(f"{name}={value}: it must be a number, as torchrun sets it.") from None


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
