"""The one place where the environment is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import RankError


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says.

    dump: AUTOPAR_DUMP, a directory for the program after each pass.
    rank, world_size, local_rank, local_world_size: what torchrun sets; None without a launcher.
    error_file: where torchrun looks for what a rank that fails has to say.
    """

    dump: Path | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    error_file: Path | None = None

    @staticmethod
    def read() -> Settings:
        """The settings as they are now."""
        return Settings(
            dump=_path("AUTOPAR_DUMP"),
            rank=_integer("RANK"),
            world_size=_integer("WORLD_SIZE"),
            local_rank=_integer("LOCAL_RANK"),
            local_world_size=_integer("LOCAL_WORLD_SIZE"),
            error_file=_path("TORCHELASTIC_ERROR_FILE"),
        )


def _integer(name: str) -> int | None:
    value = os.environ.get(name)
    try:
        return int(value) if value else None
    except ValueError:
        raise RankError(f"{name}={value}: it must be a number, as torchrun sets it.") from None


def _path(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None
