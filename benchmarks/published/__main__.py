"""Print each row's measured and predicted values; see the package's docstring."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmarks.published
from autopar.errors import AutoparError, TargetError
from benchmarks.published.case import UNITS
from benchmarks.published.kernels import register
from benchmarks.published.own import Own, Planner
from benchmarks.published.predict import Predicted, predict
from benchmarks.published.rows import cases
from benchmarks.published.summary import figures, summary
from benchmarks.records import Records, record_option

HERE = Path(__file__).resolve().parent
FILES = (*sorted((HERE.parents[2] / "shared" / "published").glob("*.csv")), *sorted(HERE.glob("*.csv")))
WIDTH = 46


def table(path: Path, options: Mapping[str, Any], chosen: str, parts: bool) -> list[Predicted]:
    """Print the rows of a file as they are found."""
    print(f"{path.name}\n  {'':<{WIDTH}} {'measured':>11} {'predicted':>11} {'error':>7}")
    found = []
    for case in cases(path):
        if chosen not in case.name:
            continue
        begun = time.process_time()
        try:
            row = predict(case.with_options(options))
        except AutoparError as error:
            print(f"  {case.name:<{WIDTH}} refused: {str(error).splitlines()[0]}")
            continue
        print("\n".join(lines(row, time.process_time() - begun)), flush=True)
        if parts and row.step is not None:
            print("\n".join(f"    {line}" for line in str(row.step).splitlines()[1:]))
        found.append(row)
    return found


def lines(row: Predicted, spent: float) -> list[str]:
    """One for each measured quantity. spent: CPU seconds of all of them."""
    made = []
    for what, measured in row.case.measured.items():
        unit, name = UNITS[what]
        label = f"{row.case.name}{'' if len(row.case.measured) == 1 else f' {what}'}"
        made.append(
            f"  {label:<{WIDTH}} {measured / unit:>8.2f} {name:<3}{row.values[what] / unit:>8.2f} {name:<3}"
            f" {row.error(what):>+7.1%}"
        )
    return [f"{made[0]}   ({spent:.0f} s CPU)", *made[1:]]


def own_plans(found: list[Predicted]) -> None:
    """Print what the planner would rather do than each row, and how many of its plans are no slower."""
    planner, made = Planner(), list[tuple[Predicted, Own]]()
    for row in found:
        own = planner.best(row.case)
        made.append((row, own))
        print(
            f"  {row.case.name:<{WIDTH}} {row.step_s:>8.2f} s; own {own.planned.total / 1e6:.2f} s, emitted "
            f"{own.emitted.step_s:.2f} s, {own.planned.memory / 1e9:.1f} GB: {own.planned.candidate}",
            flush=True,
        )
    better = sum(own.emitted.step_s <= row.step_s for row, own in made)
    print(f"  the planner's own best is predicted no slower than the published plan in {better} of {len(made)} rows")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=benchmarks.published.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=FILES, metavar="FILE.csv")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--parts", action="store_true", help="also what each step is made of")
    parser.add_argument("--plan", action="store_true", help="also the planner's own best for each row, in 80 GB")
    parser.add_argument("--compile", choices=["triton"], help="with pointwise calls fused")
    record_option(parser)
    args = parser.parse_args()
    records = Records("published", args.record and not args.only)
    missing = [str(path) for path in args.files if not path.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}. The given ones: {', '.join(map(str, FILES))}")
    options = {"compile": args.compile} if args.compile else {}
    register()
    for path in args.files:
        try:
            found = table(path, options, args.only, args.parts)
        except TargetError as error:
            parser.error(str(error))
        if found:
            print("\n".join(f"  {line}" for line in summary(found)))
            records.add(*figures(path.stem, found))
        if args.plan:
            own_plans([row for row in found if row.step is not None])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
