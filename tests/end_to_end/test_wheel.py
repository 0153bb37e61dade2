"""The wheel holds the whole package and runs where the checkout is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("autopar", "passes", "runtime")

PROGRAM = """
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

import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
batch = (torch.randn(4, 4), torch.randn(4, 2))
loss_fn = lambda model, x, y: (model(x) - y).square().mean()
report = autopar.verify(model, "dp=2,tp=2", loss_fn=loss_fn, batch=batch, steps=1)
assert report.ok, report
print("right on", "dp=2,tp=2")

import runpy
sys.argv = ["autopar", "--help"]
runpy.run_module("autopar", run_name="__main__")
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command outside the checkout; its output, or a failure that shows it."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel is installed. It is built from a copy: stale files in build/ would hide faults."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source), cwd=folder)
    (wheel,) = folder.glob("autopar-*.whl")
    run(*pip, "install", "-q", "--no-deps", "--target", str(folder / "site"), str(wheel), cwd=folder)
    return folder / "site"


def test_every_module_is_in_the_wheel(installed: Path):
    (wheel,) = installed.parent.glob("autopar-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for folder in SOURCES:
        for file in (file for ending in ("py", "html", "css", "js") for file in (ROOT / folder).rglob(f"*.{ending}")):
            path = file.relative_to(ROOT).as_posix()
            assert (path if folder == "autopar" else f"autopar/{path}") in held, path
    tops = {name.split("/")[0] for name in held if ".dist-info" not in name}
    assert tops == {"autopar"}, f"the wheel takes other names: {tops}"
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert "autopar/py.typed" in held


def test_it_and_its_command_run_outside_the_checkout(installed: Path, tmp_path: Path):
    out = run(sys.executable, "-P", "-c", PROGRAM, str(installed), cwd=tmp_path, PYTHONPATH=str(installed))
    assert "right on dp=2,tp=2" in out
    for command in ("run", "compile", "inspect", "explain", "verify"):
        assert command in out
