"""Every architecture of the table on dp=2,tp=2 and dp=3, in float64, beside one device.

    timeout 3600 .venv/bin/python -m benchmarks.coverage [NAME ...] [--jobs 2] [--out FILE]

A row is a model: seconds of CPU to capture and to search, the largest relative error of loss, gradients and weights
after two AdamW steps on each mesh, the share of matrix operations that tp and dp divide and of parameter bytes that tp
splits, ops without a rule, collectives of a step. Each runs in a process of its own; what fails stands there with why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.coverage import architectures, plain
from benchmarks.coverage.measure import MESHES, Row, measure
from benchmarks.records import Figure, Records, record_option

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", action="store_true", help="measure one model here and print its row as JSON")
    record_option(parser)
    options = parser.parse_args()
    records = Records("coverage", options.record and not options.names)
    if options.row:
        print(json.dumps(asdict(measure(options.names[0]))))
        return
    everyone = [*architectures.names(), *plain.MODELS]
    wanted = options.names or everyone
    unknown = sorted(set(wanted) - set(everyone))
    if unknown:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(everyone)}")
    lines = [*header()]
    print("\n".join(lines), flush=True)
    good = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(measured, wanted):
            ok = row.ok(row.name not in plain.MODELS and is_transformer(row.name))
            good += ok
            lines.append(line(row, ok))
            print(lines[-1], flush=True)
    lines.append(f"\n{good} of {len(wanted)} are covered.")
    print(lines[-1])
    records.add(Figure(f"{len(wanted)} models", "covered", "models", good, goal=">="))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def is_transformer(name: str) -> bool:
    """False for networks without attention or with little of it: tp need not divide all of their products."""
    return architectures.names()[name][1] not in architectures.NOT_TRANSFORMERS


def measured(name: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.coverage", "--row", name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Row(name, fault=f"took more than {SECONDS} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Row(name, fault=f"the process ended with {done.returncode}: {last}")
    return Row(**json.loads(done.stdout.strip().splitlines()[-1]))


def header() -> Iterator[str]:
    names = ("model", "capture s", "search s", *(f"error {mesh}" for mesh in MESHES), "% FLOPs by tp", "% FLOPs by dp",
             "% bytes by tp", "collectives", "without rule", "fault")  # fmt: skip
    yield f"| | {' | '.join(names)} |"
    yield f"|{'---|' * (len(names) + 1)}"


def line(row: Row, ok: bool) -> str:
    errors = [f"{row.errors[mesh]:.0e}" if mesh in row.errors else "-" for mesh in MESHES]
    shares = [f"{share:.0f}" if share == share else "-" for share in (row.tp_flops, row.dp_flops, row.tp_bytes)]
    cells = ["ok" if ok else "NO", row.name, f"{row.capture_s:.1f}", f"{row.search_s:.1f}", *errors, *shares,
             str(row.collectives), "; ".join(row.without_rule), row.fault.replace("|", "/")]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
