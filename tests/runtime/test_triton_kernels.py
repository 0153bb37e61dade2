"""The kernels written from fused groups: right in Triton's interpreter, and as machine code for GPUs not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SUPPORT = ROOT / "tests" / "support"
Ways = tuple[str, ...]


def _run(*what: str, **environment: str) -> str:
    """The interpreter is chosen when Triton is imported, so each way needs a process."""
    pytest.importorskip("triton", reason="Triton has no package for this machine")
    paths = os.pathsep.join((str(SUPPORT), str(ROOT / "examples")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "triton_fused_case.py"), *what],
        env=os.environ | {"PYTHONPATH": paths} | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


EVERY = pytest.mark.parametrize("every", [(), pytest.param(("every",), marks=pytest.mark.slow)], ids=str)


@EVERY
def test_kernels_are_right_in_the_interpreter_at_odd_shapes_strided_in_place_and_in_any_order(every: Ways) -> None:
    assert _run("interpret", *every, TRITON_INTERPRET="1").endswith("kernels right\n")


@EVERY
def test_kernels_of_real_programs_are_right_in_the_interpreter(every: Ways) -> None:
    assert _run("programs", *every, TRITON_INTERPRET="1").endswith("kernels right\n")


def test_exact_kernels_have_the_bits_of_eager(tmp_path: Path) -> None:
    """AUTOPAR_EXACT_KERNELS reaches the kernels of a module; without it a chain rounds once, and has other bits."""
    said = _run("exact", TRITON_INTERPRET="1", AUTOPAR_KERNELS=str(tmp_path))
    assert said == "output True gradient True\noutput False gradient False\n"


def test_exact_kernels_have_the_same_bits_where_activations_wait_on_the_host(tmp_path: Path) -> None:
    said = _run("offload", TRITON_INTERPRET="1", AUTOPAR_KERNELS=str(tmp_path))
    assert said == "exact True\nrounded once False\n"


def test_a_training_step_runs_its_groups_as_kernels(tmp_path: Path) -> None:
    assert _run("step", TRITON_INTERPRET="1", AUTOPAR_KERNELS=str(tmp_path)).endswith("a step of kernels\n")
    texts = [path.read_text() for path in tmp_path.glob("kernels_*.py")]  # one, and those for operands of other strides
    assert any(text.count("@triton.jit") >= 5 and "gpt.py:" in text for text in texts)


def test_faults_in_kernels_are_seen() -> None:
    assert _run("faults", TRITON_INTERPRET="1").endswith("faults seen\n")


@EVERY
def test_kernels_compile_without_spills_and_with_128_bit_accesses(tmp_path: Path, every: Ways) -> None:
    assert _run("compile", *every, TRITON_CACHE_DIR=str(tmp_path)).endswith("compiled\n")
