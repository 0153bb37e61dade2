"""Random journeys of users around a parallel model, each beside the plain module: what is wrong, and what is refused?

    timeout 1300 .venv/bin/python -m benchmarks.journeys --seconds 1200 --seed 0

A journey is a random model, mesh and options, and 8 to 20 actions: steps, hand-written clips, checkpoints, hooks. After
every action all that both sides hold is compared on every rank, as `verify` does. A failing journey is made short and
printed as a list; `--only N` takes row N alone, `--replay FILE` a printed list.
"""

from __future__ import annotations

import argparse
import ast
import pprint
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path

from benchmarks.journeys.machine import FAILED, Row, replay, run_row
from benchmarks.journeys.pools import Pools
from benchmarks.journeys.sabotage import FAULTS, SABOTAGES
from benchmarks.records import Figure, Records, record_option

ROWS = 400
sys.path += [str(Path(__file__).resolve().parents[2] / "examples")]


def line(number: int, row: Row, seconds: float) -> tuple[str, str]:
    """The verdict on a row, and its text."""
    setup = row.first[0][1]
    is_refused = any("both fail: " not in refusal for refusal in row.refusals)  # else as the plain module
    verdict = row.failure.verdict if row.failure else "refused" if is_refused else "ok"
    told = {key: setup[key] for key in ("batch", "odd", "dtype", "before") if key in setup} | setup["options"]
    options = " ".join(f"{key}={value}" for key, value in told.items())
    model = "+".join([setup["head"], *setup["blocks"]])
    text = (
        f"{verdict:8} {number:4} {setup['mesh']:11} {model:32} {options} {setup['optimizer']} "
        f"{len(row.first) - 1} actions  [{seconds:.1f} s]"
    )
    if row.is_open or row.is_excused:
        text += "  told in float64" if row.is_excused else "  told from elsewhere"
    if row.failure:
        text += f"  {row.failure.text}\n{pprint.pformat(list(row.shortest), width=120, compact=True)}"
    elif row.refusals:
        text += "  " + " | ".join(refusal[:400] for refusal in row.refusals)
    return verdict, text


def _shape(refusal: str) -> str:
    """A refusal without its names and numbers, so that alike ones are counted together."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'...'", " ".join(refusal.split())))[:400]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=ROWS, help="the number of rows")
    parser.add_argument("--only", type=int, action="append", help="the number of a row")
    parser.add_argument("--shrink", type=float, default=20, help="seconds for making a failing journey shorter")
    parser.add_argument("--without", action="append", default=[], help="an action that is not drawn")
    parser.add_argument("--mesh", action="append", default=[], help="one to draw of: dp=2, auto=4, ...")
    parser.add_argument(
        "--sabotage", choices=[*SABOTAGES, *FAULTS], help="a fix that is taken out; ends at the first failure"
    )
    parser.add_argument("--replay", type=Path, help="a file with a printed journey")
    record_option(parser)
    options = parser.parse_args()
    records = Records("journeys", options.record and not options.sabotage)
    pools, found, refused = Pools(options.sabotage), Counter[str](), Counter[str]()
    try:
        if options.replay is not None:
            taken, report = replay(pools, tuple(ast.literal_eval(options.replay.read_text())))
            print(f"{report.verdict} after {taken} actions: {report.text}")
            return
        end = time.monotonic() + options.seconds
        for number in range(options.rows) if options.only is None else options.only:
            start = time.monotonic()
            row = run_row(pools, options.seed, number, options.shrink, options.without, options.mesh)
            verdict, text = line(number, row, time.monotonic() - start)
            found[verdict] += 1
            refused.update(map(_shape, row.refusals.elements()))
            print(text, flush=True)
            if time.monotonic() > end or (options.sabotage and row.failure):
                break
    finally:
        pools.close()
    for refusal, count in refused.most_common():
        print(f"{count:4} x {refusal}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.most_common())
    print(f"{counts} (seed {options.seed}, {peak} MiB)")
    case = f"seed {options.seed}, {found.total()} rows"
    records.add(*(Figure(case, verdict, "rows", count, goal="") for verdict, count in found.most_common()))
    sys.exit(any(found[verdict] for verdict in FAILED))


if __name__ == "__main__":
    main()
