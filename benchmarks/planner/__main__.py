"""Print each way's predicted and measured step; see the package's docstring."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import torch

import benchmarks.planner
from autopar.ir.ops.measure import human
from autopar.machines import Machine, read_machine
from autopar.planning.price.step_report import time_text
from benchmarks.planner.configurations import RANKS, configurations
from benchmarks.planner.measure import Row, rows_of
from benchmarks.records import Figure, Records, record_option

MEASURING_S = 60
WIDTH = 62


def main() -> int:
    parser = argparse.ArgumentParser(
        description=benchmarks.planner.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="ways whose text has this in it; several by commas")
    parser.add_argument("--seconds", type=float, default=120, help="of steps, for each model")
    parser.add_argument(
        "--machine", type=Path, help="a file that `autopar machine measure --ranks 2` wrote; else it is measured"
    )
    parser.add_argument("--parts", action="store_true", help="also what each predicted step is made of")
    record_option(parser)
    args = parser.parse_args()
    records = Records("planner", args.record)
    begun = time.perf_counter()
    where = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{date.today()}  torch {torch.__version__}, {where}")
    print(f"python -m benchmarks.planner {' '.join(sys.argv[1:])}", flush=True)
    machine = read_machine(args.machine) if args.machine else measured_machine()
    wanted = [part.strip() for part in args.only.split(",")]
    chosen = [one for one in configurations() if any(part in str(one) for part in wanted)]
    times, memory = f"{'measured':>9} {'predicted':>9} {'error':>7}", f"{'memory':>9} {'error':>7} {'scratch':>8}"
    print(f"  {'':<{WIDTH}} {times} {memory}  steps")
    rows = []
    for model in dict.fromkeys(one.model for one in chosen):
        found = rows_of([one for one in chosen if one.model == model], machine, args.seconds)
        print("\n".join(line for row in found for line in lines(row, args.parts)), flush=True)
        rows += found
    print("\n".join(summary(rows)))
    records.add(*figures(rows))
    print(f"{time.perf_counter() - begun:.0f} s")
    return 0


def measured_machine() -> Machine:
    """This machine, as `autopar machine measure` finds it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "this.toml")
        command = [sys.executable, "-m", "autopar", "machine", "measure", "--out", str(path), "--device", "cpu"]
        command += ["--ranks", str(RANKS), "--seconds", str(MEASURING_S)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip(), flush=True)
        return read_machine(path)


def lines(row: Row, parts: bool) -> Iterator[str]:
    if row.refused:
        yield f"  {row.name:<{WIDTH}} refused: {row.refused}"
        return
    times = f"{time_text(row.measured * 1e6):>9} {time_text(row.predicted * 1e6):>9} {row.error:>+7.1%}"
    memory = f"{human(row.held[1]):>9} {row.memory_error:>+7.2%} {human(row.scratch):>8}"
    yield f"  {row.name:<{WIDTH}} {times} {memory}  {row.steps}"
    if parts and row.parts is not None:
        yield from (f"    {line}" for line in str(row.parts).splitlines()[1:])
        yield f"      measured: optimizer {time_text(row.optimizer * 1e6)}"


def figures(rows: Sequence[Row]) -> Iterator[Figure]:
    """What `summary` says, as it is recorded."""
    ran = [row for row in rows if not row.refused]
    if not ran:
        return
    case, errors = f"{len(ran)} ways on two Gloo ranks", [abs(row.error) for row in ran]
    yield Figure(case, "step time, mean error", "%", 100 * sum(errors) / len(errors), goal="<=10")
    yield Figure(case, "step time, largest error", "%", 100 * max(errors), goal="<=25")
    yield Figure(case, "memory, largest error", "%", 100 * max(abs(row.memory_error) for row in ran), goal="<=1")
    for model in dict.fromkeys(row.model for row in ran):
        yield Figure(f"{model}: the way that is chosen", "regret", "%", 100 * regret(ran, model), goal="<=3")


def regret(ran: Sequence[Row], model: str) -> float:
    """How much longer the way takes that is predicted fastest than the fastest measured one, as a part of that."""
    own = [row for row in ran if row.model == model]
    return min(own, key=lambda row: row.predicted).measured / min(row.measured for row in own) - 1


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Errors of all ways together, and the regret of the choice for each model."""
    ran = [row for row in rows if not row.refused]
    if not ran:
        yield "nothing was run"
        return
    errors = [abs(row.error) for row in ran]
    worst = max(ran, key=lambda row: abs(row.error))
    memory = max(abs(row.memory_error) for row in ran)
    yield (f"{len(ran)} ways, {len(rows) - len(ran)} refused: step time mean error {sum(errors) / len(errors):.1%}, "
           f"largest {max(errors):.1%} ({worst.name}); memory largest {memory:.2%}")  # fmt: skip
    for model in dict.fromkeys(row.model for row in ran):
        own = [row for row in ran if row.model == model]
        choice, best = min(own, key=lambda row: row.predicted), min(own, key=lambda row: row.measured)
        yield (f"{model}: the choice is '{choice.name}', the fastest '{best.name}': "
               f"regret {regret(ran, model):.1%}")  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
