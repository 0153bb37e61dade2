"""The wheel that an sdist gives holds the whole package, and runs in an environment where nothing else of it is."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("autopar", "passes", "runtime")
ENDINGS = ("py", "html", "css", "js", "toml")
TEXTS = ("pyproject.toml", "README.md", "LICENSE")

IMPORTS = """
import sys, pkgutil, importlib
import autopar, autopar.passes, autopar.runtime
where = sys.argv[1]
for package in (autopar, autopar.passes, autopar.runtime):
    assert package.__file__.startswith(where), package.__file__
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name.startswith("autopar.integrations."):  # wants another library: imported where that is
            continue
        if not module.name.endswith("__main__"):
            assert importlib.import_module(module.name).__file__.startswith(where), module.name
"""

JOB = """
import torch
import autopar

def job() -> autopar.Job:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    batch = (torch.randn(4, 4), torch.randn(4, 2))
    return autopar.Job(model, lambda model, x, y: (model(x) - y).square().mean(), batch)
"""

TYPED = """
import torch
import autopar

reveal_type(autopar.parallelize(torch.nn.Linear(2, 2), "dp=2"))
autopar.parallelize(torch.nn.Linear(2, 2), "dp=2", zero="three")
autopar.paralelize
"""


@dataclass(frozen=True)
class Environment:
    """A venv with autopar out of the wheel; what it imports beside it lies where this process has it."""

    folder: Path
    wheel: Path
    sdist: Path

    @property
    def site(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *command: str, cwd: Path) -> str:
        return run(str(self.folder / "bin" / command[0]), *command[1:], cwd=cwd)


def run(*command: str, cwd: Path, code: int = 0) -> str:
    """Run a command outside the checkout, which ends with a code; its output, or a failure that shows it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Sources, sdist, wheel, environment. They are built from a copy: stale files in build/ would hide faults."""
    folder = tmp_path_factory.mktemp("wheel")
    source, environment = folder / "source", folder / "environment"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in TEXTS:
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, str(folder), cwd=source)
    (sdist,) = folder.glob("autopar-*.tar.gz")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sdist), cwd=folder)
    (wheel,) = folder.glob("autopar-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=folder)
    made = Environment(environment, wheel, sdist)
    # No network: torch and the like come from here. A folder named in a .pth file has its own .pth files unread, so
    # that an autopar which is installed there from a checkout is not seen.
    modules = ("torch", "numpy", "typer", "safetensors", "scipy", "networkx", "rich", "sympy")
    places = {str(Path(str(importlib.import_module(name).__file__)).parents[1]) for name in modules}
    (made.site / "away.pth").write_text("\n".join(sorted(places)))
    run(*pip, "--python", str(environment), "install", "-q", "--no-deps", "--no-index", str(wheel), cwd=folder)
    return made


def test_every_module_is_in_the_sdist_and_in_the_wheel(installed: Environment):
    held = set(zipfile.ZipFile(installed.wheel).namelist())
    with tarfile.open(installed.sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for folder in SOURCES:
        for file in (
            file for ending in ("py", "html", "css", "js", "toml") for file in (ROOT / folder).rglob(f"*.{ending}")
        ):
            path = file.relative_to(ROOT).as_posix()
            assert path in packed and (path if folder == "autopar" else f"autopar/{path}") in held, path
    tops = {name.split("/")[0] for name in held if ".dist-info" not in name}
    assert tops == {"autopar"}, f"the wheel takes other names: {tops}"
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert {"autopar/py.typed"} <= held and {"autopar/py.typed", *TEXTS} <= packed


def test_its_command_runs_in_an_environment_of_its_own(installed: Environment, tmp_path: Path):
    installed.run("python", "-I", "-c", IMPORTS, str(installed.site), cwd=tmp_path)
    assert installed.run("autopar", "--version", cwd=tmp_path).startswith("autopar 0.1.0, torch ")
    said = installed.run("autopar", "--help", cwd=tmp_path)
    for command in ("run", "compile", "inspect", "explain", "verify", "estimate", "plan"):
        assert command in said
    (tmp_path / "small.py").write_text(JOB)
    assert "all equal" in installed.run("autopar", "verify", "small.py:job", "--mesh", "dp=2,tp=2", cwd=tmp_path)


def check_out(folder: Path) -> None:
    """Copy the sources, with what Python made of them, and write a job beside them."""
    (folder / "small.py").write_text(JOB)
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name)


def test_it_runs_in_the_folder_of_a_checkout(installed: Environment, tmp_path: Path):
    """As after `pip install ./autopar` and `cd autopar`: `python -m autopar` finds the sources there, `autopar run` the
    installed ones, and every rank those of its launcher."""
    check_out(tmp_path)
    job = ("run", "small.py:job", "--mesh", "dp=2", "--steps", "1")
    assert "step 1/1" in installed.run("python", "-m", "autopar", *job, cwd=tmp_path)
    (tmp_path / "autopar" / "cli" / "launched.py").write_text("raise SystemExit('a rank of the checkout')")
    assert "step 1/1" in installed.run("autopar", *job, cwd=tmp_path)
    run(str(installed.folder / "bin" / "python"), "-m", "autopar", *job, cwd=tmp_path, code=1)


def test_a_checkout_that_is_not_installed_runs(installed: Environment, tmp_path: Path):
    check_out(tmp_path)
    bare = Environment(tmp_path / "bare", installed.wheel, installed.sdist)
    run(sys.executable, "-m", "venv", "--without-pip", str(bare.folder), cwd=tmp_path)
    shutil.copy(installed.site / "away.pth", bare.site)
    run(str(bare.folder / "bin" / "python"), "-I", "-c", "import autopar", cwd=tmp_path, code=1)
    job = ("run", "small.py:job", "--mesh", "dp=2", "--steps", "1")
    assert "step 1/1" in bare.run("python", "-m", "autopar", *job, cwd=tmp_path)


def test_a_type_checker_finds_its_types(installed: Environment, tmp_path: Path):
    pytest.importorskip("mypy", reason="types are read by mypy: pip install mypy")
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")  # reading torch takes minutes
    there = ("--python-executable", str(installed.folder / "bin" / "python"))
    said = run(sys.executable, "-m", "mypy", *there, "--cache-dir", "cache", "typed.py", cwd=tmp_path, code=1)
    assert "Found 2 errors in 1 file" in said, said
    assert 'Revealed type is "autopar.parallel.module.ParallelModule"' in said, said
    assert 'Module has no attribute "paralelize"' in said, said
    assert 'No overload variant of "parallelize" matches' in said, said
