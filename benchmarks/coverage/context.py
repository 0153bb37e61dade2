"""Every architecture of the table on cp=2, in float64, beside one device: how much of it a split sequence divides; or
every mixture of experts on ep=2: how much of its parameters lies split with the experts.

    timeout 3600 .venv/bin/python -m benchmarks.coverage.context [NAME ...] [--jobs 2] [--mesh cp=2] [--out FILE]

A row is a model: the largest relative error of loss, gradients and weights after two AdamW steps, the share of the
matrix operations that cp divides, or of the parameters' bytes that ep splits, and what the compiler says of the rest.
What the axis cannot divide is refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.coverage import architectures, plain
from benchmarks.coverage.__main__ import ROOT, SECONDS
from benchmarks.coverage.measure import bytes_split, captured_model, flops_split, quiet

DIVIDED = 95.0  # per cent of the matrix operations: a row counts from here
EXACT = 1e-10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--mesh", default="cp=2")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", action="store_true", help="measure one model here and print its row as JSON")
    options = parser.parse_args()
    if options.row:
        print(json.dumps(row_of(options.names[0], options.mesh)))
        return
    axis, is_experts = options.mesh.partition("=")[0], options.mesh.startswith("ep=")
    everyone = [*architectures.names(), *plain.MODELS]
    if is_experts:
        everyone = [*sorted(architectures.MIXTURES), *architectures.FURTHER[2].split()]
    wanted = options.names or everyone
    what = "bytes of parameters" if is_experts else "FLOPs"
    lines = [f"| | model | error {options.mesh} | % {what} by {axis} | notes |", "|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    good = right = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, row in zip(wanted, pool.map(lambda name: _measured(name, options.mesh), wanted), strict=True):
            is_right = row["error"] is not None and row["error"] <= EXACT
            counts = is_right and ("leaves experts whole" not in row["said"] if is_experts else row["share"] >= DIVIDED)
            good, right = good + counts, right + is_right
            error = "-" if row["error"] is None else f"{row['error']:.0e}"
            share = "-" if row["share"] is None else f"{row['share']:.0f}"
            cells = (
                "ok" if counts else "right" if is_right else "NO",
                name,
                error,
                share,
                row["said"].replace("|", "/"),
            )
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    divided = "have all their experts divided" if is_experts else f"are divided by {DIVIDED:.0f} % or more"
    lines.append(f"\n{good} of {len(wanted)} {divided}; {right} are right.")
    print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


def _measured(name: str, mesh: str) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.coverage.context", "--row", "--mesh", mesh, name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": None, "share": None, "said": f"took more than {SECONDS} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": None, "share": None, "said": f"the process ended with {done.returncode}: {last}"}
    found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def row_of(name: str, mesh: str) -> dict[str, object]:
    """error and share, None where the compiler refuses the model; said: its notes, or why."""
    from autopar.compiler.compile import lower
    from autopar.ir.mesh import parse_mesh
    from autopar.verification.verify import verify_compiled

    quiet()
    try:
        model, loss_fn, batch, captured = captured_model(name)
        compiled = lower(captured, parse_mesh(mesh))
        report = verify_compiled(model, captured, compiled, loss_fn=loss_fn, batch=batch)
    except Exception as error:
        return {"error": None, "share": None, "said": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    said = "" if report.mismatch is None else " ".join(str(report.mismatch).split())[:300]
    axis = mesh.partition("=")[0]
    notes = "; ".join(note for note in compiled.notes if f"'{axis}'" in note)[:400]
    share = (bytes_split if axis == "ep" else flops_split)(compiled, axis)
    return {"error": report.max_error, "share": share, "said": said or notes}


if __name__ == "__main__":
    main()
