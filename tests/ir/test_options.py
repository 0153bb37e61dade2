"""The options of a step: each is told once, in autopar/ir/options.py, for the API, `Job`, the CLI and docs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from conftest import ROOT
from torch import nn

import autopar
from autopar.cli.arguments.command_options import FLAGS
from autopar.compiler.check_options import options_of
from autopar.errors import AutoparError
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepKeywords, StepOptions, option_texts, short_text
from autopar.ir.plan import Plan
from autopar.job import Job
from autopar.passes.schedules import SCHEDULES

NAMES = [each.name for each in fields(StepOptions)]


def test_the_keywords_of_type_checkers_are_the_options() -> None:
    given = {each.name: each.type for each in fields(StepOptions)}
    assert {name: kind.__forward_arg__ for name, kind in StepKeywords.__annotations__.items()} == given


def test_tools_that_read_annotations_find_types() -> None:
    assert get_type_hints(StepOptions).keys() == set(NAMES)
    assert get_type_hints(Job)["model"] is torch.nn.Module


def test_every_option_is_explained() -> None:
    assert sorted(option_texts()) == sorted(NAMES)
    assert [name for name in NAMES if not 10 < len(short_text(name)) < 200] == []
    assert short_text("zero").endswith("over a data axis (arXiv 1910.02054)"), "a point within a number ends nothing"
    for name, kind, _ in FLAGS:
        assert kind.__metadata__[0].help.startswith(("do not ", short_text(name) or kind.__metadata__[0].help)), name


def test_every_schedule_is_named() -> None:
    assert [name for name in SCHEDULES if name not in short_text("schedule")] == []


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("sequence_parallel", ("yes", None), (True, "auto")),
        ("microbatches", (0, True, 1.0), (3, None)),
        ("schedule", ("1f2b",), ("zb-v", lambda *_: ())),
        ("stages", ("a,b", [1], 3), (["a", "b"], ("a",), None)),
        ("chunks", (0, "2"), (2, None)),
        ("stage_memory", (-1,), (1 << 30, None)),
        ("zero", (4, True, {"*": 1}), (0, 3, None)),
        (
            "recompute",
            ("all", None, True, 1.5, -1, {"*": 2.0}, {"a": "stage"}),
            ("full", "stage", "stage+full", 10**9, 1.0, {"a": 0.5, "*": "none"}),
        ),
        ("precision", ("fp8",), ("bf16", None)),
        ("reduce_dtype", (torch.float64, "bf16", None), (torch.bfloat16,)),
        ("bucket_bytes", (0, 1.5), (1, None)),
        ("compile", ("gcc", True, "", None), ("auto", "executor", "inductor", "triton")),
        ("experts", (1, ["dp"], True), ("dp", "dp:cp", None)),
        ("expert_rows", (0, 0.99, True, "2", float("inf"), float("nan")), (1, 1.0, 1.25, None)),
        ("batch_dims", (True, "x", [1, "2"], {"x": 1.0}), (1, (0, None), [(1,)], {"x": 0, "y": (1, None)})),
        ("slices", (0, [], "many", [3, 0], [True], True), (1, [3, 1], (2,), "auto")),
        ("memory", (0, 0.0, 1.01, -1, "GB", "7 TB", "0.5"), (1, 1.0, 0.5, "60GiB", "70 GB", "1.5MB", "1000", None)),
        (
            "offload",
            (
                "states",
                [],
                {"optimizer": 1.5},
                {"activations": True},
                {"parameters": 0.5},
                {"optimizer": 1},
                {"x": 1.0},
            ),
            (
                "optimizer",
                ["activations", "parameters"],
                {"activations": 3, "optimizer": 0.5},
                {"parameters": 1.0},
                {"optimizer": 0.0, "activations": 1.0},
                None,
            ),
        ),
        ("chunked_loss", (0.5, "yes", None, -1), (True, False, "auto", 10**6)),
    ],
)
def test_what_an_option_may_be(name: str, wrong: tuple[Any, ...], right: tuple[Any, ...]) -> None:
    """A wrong value is named with its option; `Job` says so where it is made."""
    for value in wrong:
        with pytest.raises(AutoparError, match=name):
            options_of(**{name: value})
    for value in right:
        options_of(**{name: value})


def test_options_are_the_callers_no_longer() -> None:
    stages, shard = ["a", "b"], {"*.weight": "[tp,-]"}
    chosen = options_of(stages=stages, shard=shard)
    stages.append("c")
    shard["*.bias"] = "[tp]"
    assert chosen.stages == ("a", "b") and chosen.shard == {"*.weight": "[tp,-]"}
    with pytest.raises(TypeError, match="there is no option 'parking'; there is shard, "):
        options_of(parking=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("function", [autopar.parallelize, autopar.compile, autopar.verify])
def test_a_name_that_is_near_is_asked_for(function: Any) -> None:
    """Red before: the options of the step alone were named."""
    given = {} if function is autopar.parallelize else {"batch": torch.randn(2, 2)}
    for name, near in (
        ("loss_function", "loss_fn"),
        ("micro_batches", "microbatches"),
        ("mixed_precision", "precision"),
    ):
        with pytest.raises(TypeError, match=rf"no option '{name}' \(did you mean '{near}'.*; there is model, mesh"):
            function(nn.Linear(2, 2), "dp=1", **{name: 2}, **given)


def test_ranks_tell_a_function_by_its_name() -> None:
    """Its address would be another on each rank."""
    lines = options_of(schedule=lambda *_: (), zero=2).lines
    assert "zero=2" in lines and not any(" at 0x" in line for line in lines)


# -- a new option touches one file ----------------------------------------------------------------------------------

ENTRY = "    bucket_bytes: of gradients"
FIELD = "    bucket_bytes: int | None = option("
KEYWORD = "    bucket_bytes: int | None\n"
ADDED = {
    ENTRY: "    parking: states that lie on the host. A sentence more.\n" + ENTRY,
    FIELD: '    parking: int | None = option(None, Valid(_is_count, _COUNT), Flag(int, "N"))\n' + FIELD,
    KEYWORD: "    parking: int | None\n" + KEYWORD,
}
USER = """
import inspect, sys
import torch, autopar
from autopar.cli import commands
from autopar.ir.options import option_texts

job = lambda: autopar.Job(torch.nn.Linear(4, 4), lambda m, x: m(x).sum(), torch.ones(4, 4), parking=3)
if __name__ == "__main__":
    made = autopar.compile(job().model, "dp=2", loss_fn=job().loss_fn, batch=job().batch, **job().step)
    assert made.plan.options.parking == 3
    assert autopar.parallelize(job().model, "dp=1", loss_fn=job().loss_fn, parking=5)
    try:
        autopar.Job(torch.nn.Linear(4, 4), parking=0)
    except autopar.AutoparError as error:
        assert str(error) == "parking=0: write a number of 1 or more.", error
    assert commands.CommandOptions(parking=7).job(f"{__file__}:job").parking == 7
    assert commands.CommandOptions(parking=7).arguments()[-2:] == ["--parking", "7"]
    assert option_texts()["parking"] == "states that lie on the host. A sentence more."
    assert "parking: states that lie on the host." in inspect.getdoc(autopar.StepOptions)
    sys.argv = ["autopar", "verify", "--help"]
    commands.main()
"""


def _package_with(folder: Path, changes: dict[str, str]) -> None:
    """Copy our package with what Python has compiled of it, and changes in ir/options.py alone."""
    package = folder / "autopar"
    for name, place in (("autopar", package), ("passes", package / "passes"), ("runtime", package / "runtime")):
        shutil.copytree(ROOT / name, place)
    options = package / "ir" / "options.py"
    text = options.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    options.write_text(text)


def test_a_new_option_touches_one_file(tmp_path: Path) -> None:
    _package_with(tmp_path, ADDED)
    (tmp_path / "user.py").write_text(USER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "160"}
    found = subprocess.run(
        [sys.executable, str(tmp_path / "user.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert "--parking" in found.stdout and "states that lie on the host" in found.stdout


@pytest.mark.parametrize(
    ("mesh", "asked", "stage"), [("dp=2,fsdp=2", None, 3), ("dp=2", None, 0), ("fsdp=2", 0, 0), ("dp=2", 2, 2)]
)
def test_an_axis_of_shards_asks_for_zero_3(mesh: str, asked: int | None, stage: int) -> None:
    assert Plan(parse_mesh(mesh), {}, options=StepOptions(zero=asked)).zero == stage
