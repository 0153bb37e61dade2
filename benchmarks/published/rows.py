"""Read the cases of a file, whose kind its columns tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from csv import DictReader
from pathlib import Path

from autopar.errors import TargetError
from benchmarks.published import h100_rows, megatron_rows
from benchmarks.published.case import Case, Row

# By the columns that no other kind of file has.
KINDS: Mapping[frozenset[str], Callable[[Row], Case]] = {
    frozenset(columns.split()): made
    for columns, made in (
        ("tflops_hw chunks step_s", megatron_rows.sc21),
        ("iter_ms", megatron_rows.vtrain),
        ("forward_ms backward_ms", megatron_rows.layer),
        ("sequence_parallel step_s", megatron_rows.korthikanti),
        ("schedule memory_gb", megatron_rows.zero_bubble),
        ("sharding tok_s_gpu", h100_rows.mpt),
        ("zero tok_s_gpu step_ms", h100_rows.nanotron),
        ("local_batch step_s", h100_rows.torchtitan),
        ("local_batch memory_gib", h100_rows.fsdp2),
        ("least_s most_s", h100_rows.nemo),
    )
}


def cases(path: Path) -> Iterator[Case]:
    """The cases of a file; lines that begin with # are its source. Raises TargetError for a file of other columns, and
    for a row that lacks a value or has one that is no number."""
    with path.open(encoding="utf-8-sig") as file:
        lines = [(number, line) for number, line in enumerate(file, 1) if line.strip() and not line.startswith("#")]
    reader = DictReader(line for _, line in lines)
    columns = frozenset(reader.fieldnames or ())
    made = next((made for names, made in KINDS.items() if names <= columns), None)
    if made is None:
        known = "; ".join(", ".join(sorted(names)) for names in KINDS)
        raise TargetError(
            f"{path}: its columns are {', '.join(sorted(columns))}; a file has those of one kind: {known}."
        )
    for (number, _), row in zip(lines[1:], reader, strict=True):
        try:
            case = made(row)
        except (KeyError, TypeError, ValueError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise TargetError(f"{path}, line {number}: {what}. Rows are as those of ../shared/published.") from error
        yield case
