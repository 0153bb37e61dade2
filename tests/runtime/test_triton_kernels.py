"""The kernels written from fused groups: right in Triton's interpreter, and as machine code for GPUs not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SUPPORT = ROOT / "tests" / "support"
Ways = dict[str, str]


def _run(*what: str, **environment: str) -> str:
    """The interpreter is chosen when Triton is imported, so it needs a process. `every` behind a way: all of it."""
    pytest.importorskip("triton", reason="Triton has no package for this machine")
    paths = os.pathsep.join((str(SUPPORT), str(ROOT / "examples")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "triton_fused_case.py"), *what],
        env=os.environ | {"PYTHONPATH": paths} | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ways, list[str]]:
    """What the ways that train have said, by way, one after another in a process; the files of their kernels."""
    folder = tmp_path_factory.mktemp("kernels")
    said = _run("step,exact,offload", TRITON_INTERPRET="1", AUTOPAR_KERNELS=str(folder))
    return _by_way(said), [path.read_text() for path in folder.glob("kernels_*.py")]


@pytest.fixture(scope="module")
def interpreted() -> Ways:
    """What the ways that interpret kernels have said, by way, one after another in a process."""
    return _by_way(_run("interpret,programs,faults", TRITON_INTERPRET="1"))


def _by_way(said: str) -> Ways:
    return {way: lines for way, _, lines in (part.partition("\n") for part in said.split("== ")[1:])}


EVERY = pytest.mark.parametrize("every", [(), pytest.param(("every",), marks=pytest.mark.slow)], ids=str)


def test_kernels_are_right_in_the_interpreter_at_odd_shapes_strided_in_place_and_in_any_order(
    interpreted: Ways,
) -> None:
    assert interpreted["interpret"].endswith("kernels right\n")


def test_kernels_of_real_programs_are_right_in_the_interpreter(interpreted: Ways) -> None:
    assert interpreted["programs"].endswith("kernels right\n")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["interpret", "programs"])
def test_every_combination_is_right_in_the_interpreter(way: str) -> None:
    assert _run(way, "every", TRITON_INTERPRET="1").endswith("kernels right\n")


def test_exact_kernels_have_the_bits_of_eager(steps: tuple[Ways, list[str]]) -> None:
    """AUTOPAR_EXACT_KERNELS reaches the kernels of a module; without it a chain rounds once, and has other bits."""
    assert steps[0]["exact"] == "output True gradient True\noutput False gradient False\n"


def test_exact_kernels_have_the_same_bits_where_activations_wait_on_the_host(steps: tuple[Ways, list[str]]) -> None:
    assert steps[0]["offload"] == "exact True\nrounded once False\n"


def test_a_training_step_runs_its_groups_as_kernels(steps: tuple[Ways, list[str]]) -> None:
    said, texts = steps  # of kernels: one, and those for operands of other strides
    assert said["step"].endswith("a step of kernels\n")
    assert any(text.count("@triton.jit") >= 5 and "gpt.py:" in text for text in texts)


def test_faults_in_kernels_are_seen(interpreted: Ways) -> None:
    assert interpreted["faults"].endswith("faults seen\n")


@EVERY
def test_kernels_compile_without_spills_and_with_128_bit_accesses(tmp_path: Path, every: tuple[str, ...]) -> None:
    assert _run("compile", *every, TRITON_CACHE_DIR=str(tmp_path)).endswith("compiled\n")
