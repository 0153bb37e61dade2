"""Models of other people's packages, as they are, on dp=2,tp=2 and dp=3, in float64, beside one device; then with
micro-batches, as `zero=3, recompute="full"` and over the stages of `pp=2,dp=2`.

    pip install -e .[libraries]
    timeout 10800 .venv/bin/python -m benchmarks.libraries [PACKAGE[/MODEL] ...] [--jobs 2] [--rows FILE] [--out FILE]

A row is a model, in a process of its own. Where the message of a refusal offers `specialize=True`, it is taken,
and so is `batch_statistics="microbatch"` for micro-batches ("statistics"), and a call of the plain module before, for
one that sets itself up by its first batch ("run once").
"broken": a traceback that is no message of ours (there should be none), or a model that does not run without us either.
--rows keeps each row as a line of JSON as it comes; the table has the last one of each model that is in the file, so
that a run of some models, or one that was cut short, adds to those of before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.libraries.measure import BROKEN, FURTHER, MESHES, VERIFIED, Row, measure
from benchmarks.libraries.models import TABLE
from benchmarks.records import Figure, Records, record_option

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="PACKAGE or PACKAGE/MODEL; all of them by default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", action="store_true", help="measure one model here and print its row as JSON")
    record_option(parser)
    options = parser.parse_args()
    records = Records("libraries", options.record and not options.names)
    if options.row:
        print(json.dumps(asdict(measure(*options.names))))
        return
    wanted = [pair for pair in pairs() if not options.names or {pair[0], "/".join(pair)} & set(options.names)]
    if not wanted:
        parser.error(f"no package is called {', '.join(options.names)}; there are {', '.join(TABLE)}")
    rows = kept(options.rows)
    print("\n".join(header()), flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(measured, wanted):
            rows[row.package, row.model] = row
            print(line(row), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    rows = [rows[pair] for pair in pairs() if pair in rows]
    lines = [*header(), *map(line, rows), *summary(rows)]
    print("\n".join(summary(rows)))
    verified = sum(row.first == VERIFIED for row in rows)
    records.add(Figure(f"{len(rows)} models", "verified on two meshes", "models", verified, goal=">="))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def pairs() -> list[tuple[str, str]]:
    return [(package, model) for package, models in TABLE.items() for model in models]


def kept(file: Path | None) -> dict[tuple[str, str], Row]:
    """The rows of earlier runs, by package and model."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {(row.package, row.model): row for row in (Row(**json.loads(text)) for text in lines)}


def measured(pair: tuple[str, str]) -> Row:
    """The row of one model, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.libraries", "--row", *pair]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return _broken(pair, f"took more than {SECONDS} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return _broken(pair, f"the process ended with {done.returncode}: {last}")
    return Row(**json.loads(done.stdout.strip().splitlines()[-1]))


def _broken(pair: tuple[str, str], why: str) -> Row:
    return Row(*pair, results=dict.fromkeys(MESHES, BROKEN), reasons=dict.fromkeys(MESHES, why))


def header() -> Iterable[str]:
    names = ("package", "model", *MESHES, *FURTHER, "CPU s", "why not")
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"


def line(row: Row) -> str:
    results = [row.results.get(name, "-") for name in (*MESHES, *FURTHER)]
    reasons = dict.fromkeys(why.replace("|", "/")[:300] for why in row.reasons.values() if why)
    words = ("specialize", row.specialize), ("statistics", row.statistics), ("run once", row.run_once)
    needed = [word for word, is_so in words if is_so]
    model = f"{row.model} ({', '.join(needed)})" if needed else row.model
    cells = [f"{row.package} {row.version}", model, *results, f"{row.seconds:.0f}", "; ".join(reasons)]
    return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row]) -> list[str]:
    verified = [row for row in rows if row.first == VERIFIED]
    packages = len({row.package for row in rows})
    parts = [f"{name} {_counted(Counter(row.results.get(name, BROKEN) for row in verified))}" for name in FURTHER]
    return [
        "",
        f"{len(rows)} models of {packages} packages: {_counted(Counter(row.first for row in rows))}. Of the verified "
        f"ones with micro-batches: {'; '.join(parts)}; both {_counted(Counter(row.second for row in verified))}.",
    ]


def _counted(found: Counter[str]) -> str:
    total = max(sum(found.values()), 1)
    return ", ".join(f"{n} {word} ({100 * n / total:.0f} %)" for word, n in found.most_common()) or "none"


if __name__ == "__main__":
    main()
