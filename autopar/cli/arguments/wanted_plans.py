"""What a command line asks of plans: read and checked before torch is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import TargetError
from autopar.ir.options import UNITS, read_bytes
from autopar.machines import named

_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_NUMBER = r"(\d+\.?\d*|\.\d+)"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of plans, as it is written."""

    gpus: str
    batch: str | None
    machine: str
    memory: str | None
    top: int
    fix: Sequence[str]
    out_file: Path | None
    html: Path | None
    tokens: str | None
    check: bool
    as_json: bool = False
    hf: Path | None = None
    sequence: int | None = None

    def check_words(self, target: str | None) -> None:
        """Raise TargetError or MachineError for what cannot be read, or written."""
        if (target is None) == (self.hf is None):
            raise TargetError(
                "write a TARGET, file.py:function or package.module:function, or --hf CONFIG.json in its place"
                + (f"; there are both, '{target}' and --hf {self.hf}." if self.hf is not None else ".")
            )
        if self.hf is not None and self.batch is None:
            raise TargetError(f"--hf {self.hf}: it has no batch of its own: write --batch N, the rows of a step.")
        if self.hf is not None and not self.hf.exists():
            raise TargetError(
                f"--hf {self.hf}: there is no such file. Name the config.json of a model, or its folder; nothing is "
                f"downloaded."
            )
        if self.hf is None and self.sequence is not None:
            raise TargetError(f"--sequence {self.sequence}: it is of --hf; a TARGET's batch has its own length.")
        sizes, _, _ = self.sizes, self.trained, self.bytes
        if self.as_json and (len(sizes) > 1 or self.tokens is not None or not (self.batch or "0").isdecimal()):
            raise TargetError("--json is of one number of devices and one batch: leave out --tokens and what is more.")
        for flag, file in (("--out", self.out_file), ("--html", self.html)):
            if file is not None and len(sizes) > 1:
                raise TargetError(
                    f"{flag} {file}: it is of one number of devices, and there are {len(sizes)} behind --gpus."
                )
            if file is not None and not file.parent.is_dir():
                raise TargetError(f"{flag} {file}: there is no folder '{file.parent}'; make it first.")
        named(self.machine)

    @property
    def sizes(self) -> list[int]:
        """The numbers of devices."""
        sizes = [int(word) if word.strip().isdecimal() else 0 for word in self.gpus.split(",")]
        if not all(sizes):
            raise TargetError(f"--gpus {self.gpus}: write a number of 1 or more, or several with commas: 8,64,512.")
        return sizes

    @property
    def trained(self) -> float | None:
        """The tokens of a training."""
        if self.tokens is None:
            return None
        match = re.fullmatch(rf"({_NUMBER}(?:e\d{{1,2}})?)\s*([KMBT]?)", self.tokens)
        if match is None or not float(match[1]) > 0:
            raise TargetError(f"--tokens {self.tokens}: write a number above 0, such as 15T, 300B or 1.5e12.")
        return float(match[1]) * _COUNTS[match[3]]

    @property
    def bytes(self) -> int | None:
        """The bytes that a rank may hold."""
        if self.memory is None:
            return None
        found = read_bytes(self.memory)
        if not found:
            units = ", ".join(filter(None, UNITS))
            raise TargetError(f"--memory {self.memory}: write a number of bytes, or one with {units}.")
        return found
