"""Keep the figures of benchmarks as data, a line a number in benchmarks/results/NAME.csv, and make RESULTS.md of them.

    python -m benchmarks.launch --record     # any benchmark with this option: append what it measured to its file
    python -m benchmarks.records             # write benchmarks/RESULTS.md anew from all files

Columns: date, commit, machine, load (of the last minute, when the run began; empty where nobody looked), yardstick (see
benchmarks/yardstick.py; of figures in CPU seconds alone), case, metric, unit, ours, peer, goal. Where a peer was
measured in the same run, goal and best are said of ours / peer. A goal is `<=1.0` or `>=95`; `<=` or `>=` alone says
which way is better where there is no goal.
"""

from __future__ import annotations

import argparse
import csv
import operator
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
FOLDER, PAGE = HERE / "results", HERE / "RESULTS.md"
HISTORY = 6  # values of before that a row of the page shows
HEAD = """# Results

The latest figure of each case beside its goal and the best so far, made by `python -m benchmarks.records` from
`benchmarks/results/*.csv`, which benchmarks append to with `--record`. Ratios are ours over the peer's, of one run:
below 1 is faster or smaller. CPU seconds are of a day whose [yardstick](yardstick.py) is 1.00 where one is given.
Those of a GPU are in [GPU.md](GPU.md).
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number: a row of a file."""

    case: str
    metric: str
    unit: str
    ours: float
    peer: float | None = None
    goal: str = "<="
    date: str = ""
    commit: str = ""
    machine: str = ""
    load: float | None = None
    yardstick: float | None = None

    @property
    def value(self) -> float:
        """What goal and best are said of: the ratio to the peer, or seconds of the reference day, or the number."""
        if self.peer is not None:
            return self.ours / self.peer
        return self.ours / self.yardstick if self.yardstick else self.ours

    @property
    def is_met(self) -> bool | None:
        """Whether the value reaches the goal, or None where there is none."""
        limit = self.goal[2:]
        return (operator.le if self.goal.startswith("<=") else operator.ge)(self.value, float(limit)) if limit else None


COLUMNS = ("date", "commit", "machine", "load", "yardstick", "case", "metric", "unit", "ours", "peer", "goal")
assert sorted(COLUMNS) == sorted(field.name for field in fields(Figure))


class Records:
    """The figures of one run of a benchmark, appended to its file at once if the user asked for it."""

    def __init__(self, benchmark: str, is_wanted: bool) -> None:
        self.path = FOLDER / f"{benchmark}.csv"
        self.is_wanted = is_wanted
        self.load = round(os.getloadavg()[0], 1)  # of before the run, which makes load of its own

    def add(self, *figures: Figure) -> None:
        """Append the figures with today's date, the commit and the machine; nothing without `--record`."""
        if not self.is_wanted:
            return
        stamp = {"date": str(date.today()), "commit": _commit(), "machine": machine(), "load": self.load}
        append(self.path, [replace(figure, **stamp) for figure in figures])  # type: ignore[arg-type]


def record_option(parser: argparse.ArgumentParser) -> None:
    """Give a benchmark the option `--record`."""
    parser.add_argument("--record", action="store_true", help="append the figures to benchmarks/results")


def machine() -> str:
    """The machine in words that stay the same from day to day: the GPU, or the number of cores."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    return f"{where}, torch {torch.__version__}"


def append(path: Path, figures: Sequence[Figure]) -> None:
    """Append rows to a file, with its head if it is new."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        for figure in figures:
            row = asdict(figure)
            writer.writerow(row | {name: _text(row[name]) for name in ("ours", "peer", "load", "yardstick")})


def read(path: Path) -> list[Figure]:
    """The figures of a file, oldest first; a ValueError names the row that is none."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for number, row in enumerate(rows, 2):
        numbers = {name: float(row[name]) if row[name] else None for name in ("peer", "load", "yardstick")}
        try:
            found.append(Figure(**{**row, **numbers, "ours": float(row["ours"])}))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return found


def page() -> str:
    """The text of RESULTS.md."""
    return HEAD + "".join("\n" + "\n".join(_section(path)) + "\n" for path in sorted(FOLDER.glob("*.csv")))


def _section(path: Path) -> Iterator[str]:
    """A heading and the table of one benchmark, a row a case and metric."""
    series: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for figure in read(path):
        series[figure.case, figure.metric].append(figure)
    yield f"## {path.stem}\n"
    yield "| case | metric | ours | peer | ours / peer | goal | best | measured | before |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (case, metric), figures in series.items():
        last = figures[-1]
        best = (min if last.goal.startswith("<=") else max)(figure.value for figure in figures)
        ratio = _short(last.value) if last.peer is not None else ""
        unit = last.unit if last.yardstick is None else f"{last.unit} (yardstick {last.yardstick:.2f})"
        ours = f"{_short(last.ours)} {unit}".strip()
        peer = f"{_short(last.peer)} {last.unit}".strip() if last.peer is not None else ""
        load = f", load {last.load:g}" if last.load is not None else ""
        before = ", ".join(_short(figure.value) for figure in figures[-HISTORY - 1 : -1])
        yield (f"| {case} | {metric} | {ours} | {peer} | {ratio} | {_goal(last)} | {_short(best)} "
               f"| {' '.join(filter(None, (last.date, last.commit)))}{load} | {before} |")  # fmt: skip


def _goal(figure: Figure) -> str:
    """The goal in words, and whether it is missed."""
    if figure.is_met is None:
        return ""
    words = "at most" if figure.goal.startswith("<=") else "at least"
    return f"{words} {figure.goal[2:]}{'' if figure.is_met else ' **missed**'}"


def _short(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _commit() -> str:
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
