"""Saved pipelines: the whole round trip, on the virtual mesh too; no schedule that was changed by hand is loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gpt
from test_artifact import reseal

import autopar
from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import lower
from autopar.errors import ArtifactError
from autopar.ir.mesh import parse_mesh
from autopar.ir.text.text import print_program
from autopar.report.artifact.pipeline_json import parse_instruction, print_instruction
from autopar.verification.verify import cast, descent
from autopar.verification.virtual_side import Virtual

PIPELINE = "pipeline.json"


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    model, loss_fn, batch = gpt()
    return autopar.compile(
        model, "pp=2,dp=3", loss_fn=loss_fn, batch=batch, microbatches=4, schedule="zb-v", shard=None
    )


@pytest.fixture
def saved(compiled: Compiled, tmp_path: Path) -> Path:
    compiled.save(tmp_path / "out")
    return tmp_path / "out"


def test_each_program_is_stored_once(saved: Path):
    index = json.loads((saved / "index.json").read_text())
    assert [entry["ranks"] for entry in index["programs"]] == ["0-2", "3-5"]
    assert "forward_0" in index["programs"][0]["graphs"] and "forward_1" in index["programs"][1]["graphs"]
    stems = [path.stem for path in saved.glob("*.json")]
    assert len(stems) == len(set(stems)) == 3 + sum(len(entry["graphs"]) for entry in index["programs"])
    assert "Graph 'forward_1' of rank 3-5 on mesh" in (saved / "program_1_forward_1.py").read_text()
    lists = json.loads((saved / PIPELINE).read_text())["instructions"]
    assert any(line.startswith("SEND 0F0 to rank 1: %") for line in lists["0"])


def test_round_trip(compiled: Compiled, saved: Path):
    loaded = autopar.load(saved)
    before, after = compiled.pipeline, loaded.pipeline
    assert before is not None and after is not None
    for name in ("mesh", "flow", "reductions", "owners", "costs", "schedule", "lists"):
        assert getattr(after, name) == getattr(before, name), name
    assert list(after.graphs) == list(before.graphs)
    for key, graph in before.graphs.items():
        assert print_program(after.graphs[key]) == print_program(graph)
    assert print_program(loaded.program) == print_program(compiled.program)
    assert [rank.instructions for rank in loaded.ranks] == [rank.instructions for rank in compiled.ranks]
    assert loaded.collectives == compiled.collectives
    assert (loaded.plan.microbatches, loaded.plan.options.schedule) == (4, "zb-v")


def test_files_are_the_same_each_time(saved: Path, tmp_path: Path):
    autopar.load(saved).save(tmp_path / "again")
    both = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in (saved, tmp_path / "again")]
    assert both[0] == both[1]


@pytest.mark.parametrize(("mesh", "schedule"), [("pp=2,tp=2", "1f1b"), ("dp=2", "gpipe"), ("pp=3", "interleaved-1f1b")])
def test_it_runs_with_the_same_numbers(mesh: str, schedule: str, tmp_path: Path):
    model, loss_fn, batch = gpt()
    model = model.double()
    batch = tuple(cast(leaf, torch.float64) for leaf in batch)
    captured = capture(model, loss_fn, batch, {}, lift=torch.float64)
    choices = options_of(microbatches=3, schedule=schedule)
    made = Compiled.of(lower(captured, parse_mesh(mesh), choices))
    made.save(tmp_path / "out")
    found = []
    for one in (made, autopar.load(tmp_path / "out")):
        found.append(Virtual(copy.deepcopy(model), captured, one, descent).step(batch, {}, torch.tensor([0, 0])))
    assert found[0].keys() == found[1].keys() and found[0]
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_instructions_read_as_they_are_written(compiled: Compiled):
    assert compiled.pipeline is not None
    for lines in compiled.pipeline.lists:
        for line in lines:
            assert parse_instruction(print_instruction(line), compiled.pipeline.flow) == line


Change = Callable[[dict[str, Any]], None]


def _swap(content: dict[str, Any]) -> None:
    lines = content["instructions"]["0"]
    place = next(i for i, line in enumerate(lines) if line.startswith("0F1"))
    lines.insert(0, lines.pop(place))


def _drop(content: dict[str, Any]) -> None:
    lines = content["instructions"]["1"]
    del lines[next(i for i, line in enumerate(lines) if line.startswith("SEND"))]


def _first(text: str) -> Change:
    return lambda content: content["instructions"]["0"].__setitem__(0, text)


CHANGES: dict[str, tuple[Change, str]] = {
    "order": (_swap, "these lists of instructions are wrong: rank 0, instruction 0"),
    "message": (_drop, "these lists of instructions are wrong: rank"),
    "action": (_first("0X1"), "'0X1' is not an action such as 0F3"),
    "code": (_first("__import__('os').abort()"), "is not an action such as 0F3"),
    "value": (_first("SEND 0F0 to rank 1: %none"), "'%none' has no type"),
    "stage": (lambda content: content["stages"].append(7), "has a wrong entry|are wrong|there is no graph"),
    "flow": (lambda content: content["flow"]["0F"].pop("writes"), "the flow of 0F has"),
    "graph": (lambda content: content["graphs"].remove("0F"), "no action runs the graph 'forward_0' of rank 0"),
    "missing": (lambda content: content.pop("flow"), "it has a wrong entry: KeyError 'flow'"),
    "type": (lambda content: content["types"].update(x="f31[2]"), r"'f31\[2\]' is not a type such as"),
    "ranks": (lambda content: content["instructions"].pop("1"), "there are lists for 1 ranks and graphs for 2"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_changed_by_hand_is_refused(case: str, saved: Path):
    change, message = CHANGES[case]
    content = json.loads((saved / PIPELINE).read_text())
    change(content)
    (saved / PIPELINE).write_text(json.dumps(content))
    with pytest.raises(ArtifactError, match=r"'pipeline\.json' was changed or damaged"):
        autopar.load(saved)
    reseal(saved)
    with pytest.raises(ArtifactError, match=rf"{PIPELINE}': (.|\n)*({message})"):
        autopar.load(saved)


def test_programs_of_the_wrong_ranks(saved: Path):
    index = json.loads((saved / "index.json").read_text())
    index["programs"][0]["ranks"], index["programs"][1]["ranks"] = "3-5", "0-2"
    (saved / "index.json").write_text(json.dumps(index))
    reseal(saved)
    with pytest.raises(ArtifactError, match="does not give each place on the axis 'pp' its program"):
        autopar.load(saved)
