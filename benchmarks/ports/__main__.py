"""Public trainers as small scripts of our own, in plain PyTorch (`plain/`) and with autopar (`diffs/`): how many lines
change, and are losses, metrics and checkpoints then those of one device?

    timeout 3600 .venv/bin/python -m benchmarks.ports [NAME ...] [--meshes "dp=2" "dp=2,tp=2" "pp=2"] [--out FILE]

A port is the plain script with its diff applied; its mesh "dp=2" is replaced by that of each column. Errors are the
largest of all losses, metrics and checkpoints, relative to the largest element of each. `--write NAME FILE` makes the
diff of a port that was written as a whole.
"""

from __future__ import annotations

import argparse
import math
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.ports.differences import applied, changed, difference
from benchmarks.ports.ranks import Run, run

HERE = Path(__file__).resolve().parent
MESHES = ("dp=2", "dp=2,tp=2", "pp=2")
FLOAT64, FLOAT32 = 1e-9, 1e-4  # the largest error of a model that computes in one of them, whatever its weights are


@dataclass(frozen=True, slots=True)
class Port:
    """What a port needs said. tolerance: of a run in float64. draws: numbers are drawn in the model, where masks of
    autopar are not those of torch's generator, and a mesh of one rank is compared with. pp: what the mesh `pp=2` needs
    beside it. apart: patterns of what one device writes another number of times."""

    tolerance: float = FLOAT64
    draws: bool = False
    pp: str = ""
    apart: tuple[str, ...] = ()


PORTS = {
    # transformers computes norms and losses in float32, of a model in float64 too
    **dict.fromkeys(("dpo", "peft_lora", "run_clm", "trainer"), Port(FLOAT32)),
    "vae": Port(draws=True),
    "imagenet": Port(pp=", microbatches=1"),  # BatchNorm of the whole batch
    # The discriminator's step and the generator's both run the generator, in plain PyTorch one pass serves both.
    "dcgan": Port(pp=", microbatches=1", apart=("*/G/*.running_*", "*/G/*.num_batches_tracked")),
}  # fmt: skip
PACKAGES = ("transformers", "lightning", "timm", "diffusers", "peft", "sentence-transformers", "accelerate")


@dataclass(slots=True)
class Row:
    """errors: the largest of numbers and checkpoint by mesh. faults: what was said instead."""

    name: str
    lines: int
    errors: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    cpu_s: float = 0.0


def names() -> list[str]:
    return sorted(path.stem for path in (HERE / "plain").glob("*.py"))


def texts(name: str) -> tuple[str, str]:
    """The plain script, and the diff that makes it the port."""
    return (HERE / "plain" / f"{name}.py").read_text(), (HERE / "diffs" / f"{name}.diff").read_text()


def measure(name: str, meshes: Sequence[str], folder: Path, dtype: torch.dtype) -> Row:
    """Run a script, and its port on each mesh, and compare."""
    plain, diff = texts(name)
    port, row, how = applied(plain, diff), Row(name, changed(diff)), PORTS.get(name, Port())
    wanted = run(on_mesh(port, "dp=1") if how.draws else plain, name, 1, folder / name / "plain", dtype)
    row.cpu_s = wanted.cpu_s
    for mesh in meshes:
        size = math.prod(int(part.split("=")[1]) for part in mesh.split(","))
        found = wanted
        if not (wanted.fault or wanted.missing):
            found = run(on_mesh(port, mesh, how.pp if "pp" in mesh else ""), name, size, folder / name / mesh, dtype)
            row.cpu_s += found.cpu_s
        fault = found.fault or (f"skipped: {found.missing} is not installed" if found.missing else "")
        if fault:
            row.faults[mesh] = fault
        else:
            row.errors[mesh], row.faults[mesh] = compared(wanted, found, how.apart)
    return row


def on_mesh(port: str, mesh: str, options: str = "") -> str:
    """The port with another mesh, and what is to be said beside it."""
    if '"dp=2"' not in port:
        raise ValueError('a port names its mesh as "dp=2"')
    return port.replace('"dp=2"', f'"{mesh}"{options}')


def compared(wanted: Run, found: Run, apart: Sequence[str] = ()) -> tuple[float, str]:
    """The largest relative error, and what is missing or wrong by most. apart: patterns of what is not compared."""
    assert wanted.weights is not None and found.weights is not None
    if len(wanted.numbers) != len(found.numbers):
        return math.inf, f"{len(wanted.numbers)} numbers became {len(found.numbers)}"
    if wanted.weights.keys() != found.weights.keys():
        return math.inf, f"names of the checkpoint differ: {sorted(wanted.weights.keys() ^ found.weights.keys())[:4]}"
    pairs = {
        f"number {i}": (torch.tensor(a), torch.tensor(b))
        for i, (a, b) in enumerate(zip(wanted.numbers, found.numbers, strict=True))
    }
    pairs |= {
        name: (wanted.weights[name], found.weights[name])
        for name in wanted.weights
        if not any(fnmatch(name, each) for each in apart)
    }
    errors = {name: _error(*pair) for name, pair in pairs.items()}
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst


def _error(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference beside the largest element of what is wanted."""
    if wanted.shape != found.shape:
        return math.inf
    if not wanted.numel():
        return 0.0
    a, b = wanted.double(), found.double()
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-3)) if bool(torch.isfinite(b).all()) else math.inf


def is_right(row: Row, mesh: str, dtype: torch.dtype) -> bool:
    """Whether the numbers of a mesh are those of one device, within what the model's own floats allow."""
    tolerance = PORTS.get(row.name, Port()).tolerance if dtype == torch.float64 else 1e-2
    return row.errors.get(mesh, math.inf) <= tolerance


def line(row: Row, meshes: Sequence[str], dtype: torch.dtype) -> str:
    """A row of the table."""
    cells = []
    for mesh in meshes:
        good = is_right(row, mesh, dtype)
        cells.append(
            f"{row.errors[mesh]:.0e}"
            if good
            else f"**{row.faults[mesh]}** {row.errors.get(mesh, '')}".replace("|", "/")
        )
    return f"| {row.name} | {row.lines} | {' | '.join(cells)} | {row.cpu_s:.0f} |"


def header(meshes: Sequence[str]) -> list[str]:
    return [f"| trainer | lines | {' | '.join(meshes)} | CPU s |", "|---" * (len(meshes) + 3) + "|"]


def versions() -> str:
    found = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="; ".join(names()))
    parser.add_argument("--meshes", nargs="+", default=MESHES)
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for scripts, checkpoints and tracebacks")
    parser.add_argument("--write", nargs=2, metavar=("NAME", "FILE"), help="make the diff of a whole port")
    options = parser.parse_args()
    if options.write:
        name, file = options.write
        plain = (HERE / "plain" / f"{name}.py").read_text()
        (HERE / "diffs" / f"{name}.diff").write_text(difference(name, plain, Path(file).read_text()))
        return
    unknown = sorted(set(options.names) - set(names()))
    if unknown:
        parser.error(f"no port is called {', '.join(unknown)}; there are {', '.join(names())}")
    dtype = getattr(torch, options.dtype)
    lines = [f"{date.today()}, {options.dtype}, {versions()}", "", *header(options.meshes)]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names or names():
            row = measure(name, options.meshes, options.keep or Path(scratch), dtype)
            lines.append(line(row, options.meshes, dtype))
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
