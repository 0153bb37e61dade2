"""docs/techniques.md: every command that it prints says what it shows, and the bytes are those of its formulas."""

from __future__ import annotations

import importlib.util
import math
import re
import shlex
from collections import Counter
from functools import cache
from typing import Any

import pytest
from conftest import ROOT
from typer.testing import CliRunner

import autopar
from autopar.cli.commands import app

PAGE = (ROOT / "docs" / "techniques.md").read_text()
SHOWN = [tuple(block.splitlines()) for block in re.findall(r"^```text\n\$ autopar (.*?)^```", PAGE, re.M | re.S)]
SIMULATED = re.findall(r"^\| `([\w-]+)` \| .*?([\d.]+) %( at most)? \|.*\| ([\d.]+) % \|$", PAGE, re.M)

P = 8 * 8 * 256**2
LAYERS, ROWS, LENGTH, WIDTH = 2, 24, 48, 128  # of examples/train_gpt.py
TOKENS = ROWS * LENGTH * WIDTH
GPT = (128 + LENGTH) * WIDTH + LAYERS * (12 * WIDTH**2 + 13 * WIDTH) + 2 * WIDTH  # its parameters


@cache
def output(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command), env={"COLUMNS": "400", "TERM": "dumb"})
    error = result.exception
    return result.output + (f"{type(error).__name__}: {error}" if isinstance(error, autopar.AutoparError) else "")


def words(line: str) -> str:
    return " ".join(line.split())


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown[0])
def test_a_command_says_what_the_page_shows(shown: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, *lines = shown
    said = [words(line) for line in output(command).splitlines()]
    assert lines and [line for line in lines if not any(one.startswith(words(line)) for one in said)] == []


@pytest.mark.parametrize(("schedule", "formula", "at_most", "simulated"), SIMULATED)
def test_bubbles(schedule: str, formula: str, at_most: str, simulated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    chunks = "--chunks 2 " if schedule == "interleaved-1f1b" else ""
    command = f"inspect docs/techniques.py:wide --mesh pp=4 --microbatches 8 --schedule {schedule} {chunks}--timeline"
    (idle,) = re.findall(r"simulated: .* idle ([\d.]+)%", output(command))
    assert abs(float(idle) - float(simulated)) < 0.2  # the page is up to date
    beyond = float(idle) - float(formula)
    assert beyond <= 0 if at_most else abs(beyond) < 3  # and below its bound, or near its formula


def test_the_page_was_read() -> None:
    assert len(SHOWN) >= 14 and len(SIMULATED) == 6


def moved(target: str, mesh: str, **options: Any) -> dict[str, int]:
    """The elements that take part in the collectives of a step, by kind and axis; those below 1,500 left out."""
    compiled = autopar.compile(**_step(target), mesh=mesh, **options)
    total: Counter[str] = Counter()
    for row in compiled.collectives:
        if math.prod(row.shape) >= 1500:
            total[f"{row.op} {row.axis}"] += (row.times or 1) * row.bytes // 4
    return dict(total)


def _step(target: str) -> dict[str, Any]:
    path, name = target.split(":")
    spec = importlib.util.spec_from_file_location("techniques_job", ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    job = getattr(module, name)()
    return {"model": job.model, "loss_fn": job.loss_fn, "batch": job.batch}


FORMULAS: list[tuple[str, str, dict[str, Any], dict[str, int]]] = [
    ("stack", "dp=4", {}, {"all_reduce dp": P}),
    ("stack", "dp=4", {"microbatches": 4}, {"all_reduce dp": P}),
    ("stack", "dp=4", {"zero": 1}, {"all_gather dp": P, "reduce_scatter dp": P}),
    ("stack", "dp=4", {"zero": 1, "microbatches": 4}, {"all_gather dp": P, "reduce_scatter dp": P}),
    ("stack", "dp=4", {"zero": 2, "microbatches": 4}, {"all_gather dp": P, "reduce_scatter dp": 4 * P}),
    # the first of 16 weights is not needed in the backward pass: no gradient of the input
    ("stack", "dp=4", {"zero": 3}, {"all_gather dp": 2 * P - P // 16, "reduce_scatter dp": P}),
    ("stack", "dp=4", {"zero": 3, "microbatches": 4},
     {"all_gather dp": 4 * (2 * P - P // 16), "reduce_scatter dp": 4 * P}),
    ("stack", "dp=4", {"zero": 3, "reshard_after_forward": False}, {"all_gather dp": P, "reduce_scatter dp": P}),
    ("stack", "dp=2,fsdp=4", {},
     {"all_gather fsdp": 2 * P - P // 16, "reduce_scatter fsdp": P, "all_reduce dp": P // 4}),
    ("stack", "tp=4", {}, {"all_reduce tp": (8 + 7) * 64 * 256}),
    ("gpt", "tp=4", {}, {"all_reduce tp": (4 * LAYERS + 2) * TOKENS}),
    ("gpt", "tp=4", {"sequence_parallel": True},
     {"reduce_scatter tp": (4 * LAYERS + 2) * TOKENS, "all_gather tp": (6 * LAYERS + 3) * TOKENS,
      "all_to_all tp": LENGTH * WIDTH // 4}),
    # keys and values of each layer forward and backward, and their gradients
    ("gpt", "cp=4", {"attention": "gather"},
     {"all_gather cp": 4 * LAYERS * TOKENS, "reduce_scatter cp": 2 * LAYERS * TOKENS, "all_reduce cp": GPT}),
    # a quarter of keys and values, three times forward and three times backward, and as often their gradients
    ("gpt", "cp=4", {"attention": "ring"}, {"shift cp": 3 * 3 * 2 * LAYERS * TOKENS // 4, "all_reduce cp": GPT}),
    # queries, keys, values and the output of each layer, a rank's quarter of each, forward and backward
    ("gpt", "cp=4", {"attention": "ulysses"}, {"all_to_all cp": 8 * LAYERS * TOKENS // 4, "all_reduce cp": GPT}),
    ("experts", "dp=4", {}, {"all_reduce dp": 2 * 8 * 256 * 512 + 8 * 256}),
]  # fmt: skip


@pytest.mark.parametrize(("target", "mesh", "options", "expected"), FORMULAS)
def test_bytes(target: str, mesh: str, options: dict[str, Any], expected: dict[str, int]) -> None:
    path = "examples/train_gpt.py:job" if target == "gpt" else f"docs/techniques.py:{target}"
    assert moved(path, mesh, **options) == expected
