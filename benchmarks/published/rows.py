"""Read the cases of a file, whose kind its name tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from csv import DictReader
from pathlib import Path

from benchmarks.published import h100_rows, megatron_rows
from benchmarks.published.case import Case, Row

KINDS: Mapping[str, Callable[[Row], Case]] = {
    "megatron": megatron_rows.sc21,
    "vtrain": megatron_rows.vtrain,
    "korthikanti_layers": megatron_rows.layer,
    "korthikanti_steps": megatron_rows.korthikanti,
    "zero_bubble": megatron_rows.zero_bubble,
    "mpt": h100_rows.mpt,
    "nanotron": h100_rows.nanotron,
    "torchtitan": h100_rows.torchtitan,
    "fsdp2": h100_rows.fsdp2,
    "nemo": h100_rows.nemo,
}


def cases(path: Path) -> Iterator[Case]:
    """The cases of a file; lines that begin with # are its source. Raises ValueError for another name."""
    kind = next((kind for kind in KINDS if path.name.startswith(kind)), None)
    if kind is None:
        raise ValueError(f"{path}: a file is named {', '.join(f'{kind}*.csv' for kind in KINDS)}.")
    with path.open() as file:
        for row in DictReader(line for line in file if not line.startswith("#")):
            yield KINDS[kind](row)
