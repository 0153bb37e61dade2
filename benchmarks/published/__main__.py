"""Print each row's measured and predicted step; see the package's docstring."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.stats import spearmanr

import benchmarks.published
from autopar.compiler.compile import compile_step
from autopar.compiler.meshes import mesh_of
from autopar.compiler.options import options_of
from autopar.errors import AutoparError
from autopar.ir.plan import Fixed
from autopar.planning import StepTime, step_time
from benchmarks.published.kernels import register
from benchmarks.published.models import token_loss
from benchmarks.published.rows import Case, cases


@dataclass(frozen=True, slots=True)
class Predicted:
    case: Case
    step: StepTime

    @property
    def seconds(self) -> float:
        return self.step.total / 1e6

    @property
    def error(self) -> float:
        return self.seconds / self.case.measured - 1


def predict(case: Case, options: dict[str, object]) -> Predicted:
    """The step of a case, simulated. Raises AutoparError where its programs cannot be emitted."""
    with torch.device("meta"):
        model = case.model()
    chosen = options_of(**{**case.options, **options})
    made = compile_step(
        model, token_loss, case.batch(), {}, mesh_of(case.mesh), chosen, fixed=Fixed(machine=case.machine)
    )  # fmt: skip
    return Predicted(case, step_time(made[1]))


def table(path: Path, options: dict[str, object], chosen: str, parts: bool) -> list[Predicted]:
    """Print the rows of a file as they are found."""
    print(f"{path.name}\n  {'':<44} {'measured':>9} {'predicted':>9} {'error':>7}")
    found = []
    for case in cases(path):
        if chosen not in case.name:
            continue
        begun = time.process_time()
        try:
            row = predict(case, options)
        except AutoparError as error:
            print(f"  {case.name:<44} {case.measured:>8.2f}s refused: {str(error).splitlines()[0]}")
            continue
        spent = time.process_time() - begun
        print(
            f"  {case.name:<44} {case.measured:>8.2f}s {row.seconds:>8.2f}s {row.error:>+7.1%}   ({spent:.0f} s CPU)",
            flush=True,
        )
        if parts:
            print("\n".join(f"    {line}" for line in str(row.step).splitlines()[1:]))
        found.append(row)
    return found


def summary(found: Sequence[Predicted]) -> str:
    """Mean and largest error, and the rank correlation."""
    errors = [abs(row.error) for row in found]
    text = f"  {len(found)} rows: mean error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}"
    if len(found) > 2:
        rank = spearmanr([row.case.measured for row in found], [row.seconds for row in found]).statistic
        text += f", Spearman {rank:.2f}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=benchmarks.published.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(__file__).resolve().parents[3] / "shared" / "published"
    parser.add_argument("files", nargs="*", type=Path, default=sorted(folder.glob("*.csv")), metavar="FILE.csv")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--parts", action="store_true", help="also what each step is made of")
    parser.add_argument("--compile", choices=["triton"], help="with pointwise calls fused")
    args = parser.parse_args()
    options = {"compile": args.compile} if args.compile else {}
    register()
    for path in args.files:
        found = table(path, options, args.only, args.parts)
        if found:
            print(summary(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
