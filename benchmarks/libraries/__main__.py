"""Models of other people's packages, as they are, on dp=2,tp=2 and dp=3, in float64, beside one device; then with
micro-batches, as `zero=3, recompute="full"` and over the stages of `pp=2,dp=2`.

    pip install -e .[libraries]
    timeout 10800 .venv/bin/python -m benchmarks.libraries [PACKAGE[/MODEL] ...] [--jobs 2] [--rows FILE] \
        [--only zero=3 pp=2,dp=2] [--page benchmarks/LIBRARIES.md]

A row is a model, in a process of its own. Where the message of a refusal offers `specialize=True`, it is taken,
and so is `batch_statistics="microbatch"` for micro-batches ("statistics"), and a call of the plain module before, for
one that sets itself up by its first batch ("run once").
"undecided": rounding alone moves the plain module so far that nothing is left to compare.
"broken": a traceback that is no message of ours (there should be none), or a model that does not run without us either.
--rows keeps each row as a line of JSON as it comes, --page writes the table into a page under its words. Both add to
the rows of before, which stand in these files: a model that is not run keeps its row, and with --only the
configurations that are not named keep their results. "CPU s" is of the configurations that were run last.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.libraries.measure import BROKEN, CONFIGURATIONS, FURTHER, MESHES, VERIFIED, Row, measure
from benchmarks.libraries.models import TABLE
from benchmarks.records import Figure, Records, record_option

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 400
NOT_RUN = "-"
INSTALLED = re.compile(r"\S*/site-packages/")  # before the name of a file
REASONS = re.compile(r"; (?=\w+Error: )")  # between two of a line
NEEDED = {"specialize": "specialize", "statistics": "statistics", "run once": "run_once"}  # by the word: fields of Row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="PACKAGE or PACKAGE/MODEL, in this order; all of them by default")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--page", type=Path, help="the page to write the table into, with the rows that it has")
    parser.add_argument(
        "--only", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS), metavar="CONFIGURATION"
    )
    parser.add_argument("--seconds", type=int, default=SECONDS, help="how long a model may take")
    parser.add_argument("--row", action="store_true", help="measure one model here and print its row as JSON")
    record_option(parser)
    options = parser.parse_args()
    records = Records("libraries", options.record and not options.names)
    if options.row:
        print(json.dumps(asdict(measure(*options.names, only=options.only))))
        return
    named = [pair for name in options.names for pair in pairs() if name in (pair[0], "/".join(pair))]
    wanted = named if options.names else pairs()
    if not wanted:
        parser.error(f"no package is called {', '.join(options.names)}; there are {', '.join(TABLE)}")
    rows = kept(options.rows, options.page)
    print("\n".join(header()), flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda pair: measured(pair, options.only, options.seconds), wanted):
            row = rows[row.package, row.model] = joined(rows.get((row.package, row.model)), row)
            print(line(row), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
    rows = [row for pair, row in rows.items() if pair in pairs()]  # in the order of the page
    print("\n".join(summary(rows)))
    verified = sum(row.first == VERIFIED for row in rows)
    records.add(Figure(f"{len(rows)} models", "verified on two meshes", "models", verified, goal=">="))
    if options.page:
        words = options.page.read_text().split("| package |")[0] if options.page.exists() else ""
        options.page.write_text(words + "\n".join([*header(), *map(line, rows), *summary(rows)]) + "\n")


def pairs() -> list[tuple[str, str]]:
    return [(package, model) for package, models in TABLE.items() for model in models]


def kept(file: Path | None, page: Path | None) -> dict[tuple[str, str], Row]:
    """The rows of earlier runs, by package and model: those of a page, then those of a file, which are newer."""
    lines = page.read_text().splitlines() if page and page.exists() else []
    rows = [parsed(text) for text in lines if text.startswith("| ") and text not in header()]
    lines = file.read_text().splitlines() if file and file.exists() else []
    found = dict[tuple[str, str], Row]()
    for row in (*rows, *(Row(**json.loads(text)) for text in lines)):
        found[row.package, row.model] = joined(found.get((row.package, row.model)), row)
    return found


def joined(before: Row | None, now: Row) -> Row:
    """A row whose configurations of this run stand beside those of an earlier one that were not run again. Those with
    micro-batches are run where the meshes verify, so that a page's reasons are of the one or of the other."""
    if before is None or set(now.results) >= set(MESHES):
        return now
    results = {**before.results, **now.results}
    reasons = now.reasons if set(now.results) >= set(FURTHER) else {**before.reasons, **now.reasons}
    needed = {name: getattr(before, name) or getattr(now, name) for name in NEEDED.values()}
    return replace(now, version=now.version or before.version, results=results, reasons=reasons, **needed)


def measured(pair: tuple[str, str], only: Sequence[str], seconds: int) -> Row:
    """The row of one model, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.libraries", "--row", *pair, "--only", *only]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return _broken(pair, only, f"took more than {seconds} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return _broken(pair, only, f"the process ended with {done.returncode}: {last}")
    return Row(**json.loads(done.stdout.strip().splitlines()[-1]))


def _broken(pair: tuple[str, str], only: Sequence[str], why: str) -> Row:
    names = [name for name in only if name in MESHES] or only
    return Row(*pair, results=dict.fromkeys(names, BROKEN), reasons=dict.fromkeys(names, why))


def header() -> Iterable[str]:
    names = ("package", "model", *MESHES, *FURTHER, "CPU s", "why not")
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"


def line(row: Row) -> str:
    results = [row.results.get(name, NOT_RUN) for name in CONFIGURATIONS]
    reasons = dict.fromkeys(INSTALLED.sub("", why).replace("|", "/")[:300] for why in row.reasons.values() if why)
    needed = [word for word, name in NEEDED.items() if getattr(row, name)]
    model = f"{row.model} ({', '.join(needed)})" if needed else row.model
    cells = [f"{row.package} {row.version}", model, *results, f"{row.seconds:.0f}", "; ".join(reasons)]
    return f"| {' | '.join(cells)} |"


def parsed(text: str) -> Row:
    """A row of the line that `line` made of it; which configuration had which reason stands in no line."""
    package, model, *results, seconds, why = (cell.strip() for cell in text[1:].rstrip()[:-1].split(" | "))
    name, _, version = package.partition(" ")
    model, _, needed = model.partition(" (")
    words = needed.rstrip(")").split(", ")
    found = {name: word for name, word in zip(CONFIGURATIONS, results, strict=True) if word != NOT_RUN}
    options = {name: word in words for word, name in NEEDED.items()}
    reasons = {str(i): reason for i, reason in enumerate(REASONS.split(why) if why else ())}
    return Row(name, model, version, found, reasons, **options, seconds=float(seconds))


def summary(rows: Sequence[Row]) -> list[str]:
    verified = [row for row in rows if row.first == VERIFIED]
    further = [row for row in verified if set(FURTHER) <= set(row.results)]
    packages = len({row.package for row in rows})
    parts = [f"{name} {_counted(Counter(row.results[name] for row in further))}" for name in FURTHER]
    return [
        "",
        f"{len(rows)} models of {packages} packages: {_counted(Counter(row.first for row in rows))}. Of the "
        f"{len(further)} verified ones that were run with micro-batches: {'; '.join(parts)}; "
        f"both {_counted(Counter(row.second for row in further))}.",
    ]


def _counted(found: Counter[str]) -> str:
    total = max(sum(found.values()), 1)
    return ", ".join(f"{n} {word} ({100 * n / total:.3g} %)" for word, n in found.most_common()) or "none"


if __name__ == "__main__":
    main()
