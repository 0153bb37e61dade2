"""Plan files: what is written is read again, and what is wrong in one is said with its file and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.errors import AutoparError, MeshError, PlanError
from autopar.ir.options import PLANNED
from autopar.planning.space.candidates import Model, Space
from autopar.planning.space.decisions import read_plan, write_plan

WRONG = {
    'mesh = "dp=2"\nzeor = 1': "plan 'FILE': nobody knows 'zeor'. The nearest key is 'zero'.",
    'msh = "dp=2"': "plan 'FILE': nobody knows 'msh'. The nearest key is 'mesh'.",
    "zero = 1": "plan 'FILE': it needs a mesh, e.g. mesh = \"dp=4,tp=2\".",
    "mesh = 4": "plan 'FILE': it needs a mesh",
    'mesh = "dq=2"': "plan 'FILE': mesh 'dq=2': axis 'dq' has no meaning; known axes are",
    'mesh = "dp=-1"': "plan 'FILE': mesh 'dp=-1': 'dp=-1' needs the number of ranks",
    'mesh = "dp=2"\nzero = 7': "plan 'FILE': zero=7: write 0, 1 ",
    'mesh = "tp=2"\nzero = 1': "plan 'FILE': zero = 1 splits states over the ranks of dp, fsdp, ep, cp or ulysses",
    'mesh = "fsdp=2"\nzero = 0': "plan 'FILE': zero = 0 splits no states, and axis 'fsdp' of mesh 'fsdp=2'",
    'mesh = "dp=2"\nzero = 1\nreshard_after_forward = false': "plan 'FILE': reshard_after_forward = false "
    "keeps what zero = 3 gathered, and the plan has zero = 1,",
    'mesh = "dp=2"\nschedule = "1f1b"': "plan 'FILE': schedule = \"1f1b\" is of a pipeline, and mesh 'dp=2' has 1 rank",
    'mesh = "dp=2"\nchunks = 2': "plan 'FILE': chunks = 2 is of a pipeline, and mesh 'dp=2' has 1 rank on axis 'pp'",
    'mesh = "dp=2"\nsequence_parallel = true': "plan 'FILE': sequence_parallel = true splits over tp, and mesh 'dp=2'",
    'mesh = "pp=2"\nschedule = "2f2b"': "plan 'FILE': schedule '2f2b' is unknown.",
    "mesh = dp": "plan 'FILE' is no TOML: ",
    "\udcff": "plan 'FILE' is no text in UTF-8: ",
    None: "plan 'FILE': No such file or directory.",
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=str)
def test_what_is_wrong_in_a_plan(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    if text is not None:
        file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(AutoparError) as raised:
        read_plan(file)
    assert str(raised.value).startswith(WRONG[text].replace("FILE", str(file))), str(raised.value)
    assert isinstance(raised.value, PlanError) or "mesh" in WRONG[text] or "schedule '" in WRONG[text]


def test_every_candidate_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    some = list(Space(8, 16, 8, Model(8), {}).candidates())[::7]
    some += list(Space(8, 16, 8, Model(8), {"reshard_after_forward": False}).candidates())[::50]
    assert {each.pp > 1 for each in some} == {each.dp > 1 for each in some} == {True, False}
    for candidate in some:
        write_plan(file, candidate.mesh, candidate.options(), ["a note"])
        found = read_plan(file)
        assert str(found.mesh) == candidate.mesh and found.step == {**PLANNED, **candidate.options()}
    assert file.read_text().startswith("# a note\nmesh = ")


def test_all_kinds_of_values(tmp_path: Path) -> None:
    said = {"recompute": {"blocks.0-3": "full", "*": 0.5}, "slices": [512, 256], "schedule": "seq1f1b", "chunks": 1}
    said |= {"zero": 3, "reshard_after_forward": False}
    write_plan(tmp_path / "plan.toml", "pp=2,dp=2", {**said, "reduce_dtype": torch.bfloat16})
    found = read_plan(tmp_path / "plan.toml")
    assert found.said == {**said, "reduce_dtype": torch.bfloat16}


def test_a_plan_for_another_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autopar.cli.ranks import running_mesh

    write_plan(tmp_path / "plan.toml", "dp=4,tp=2", {})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match=r"mesh 'dp=4,tp=2' has 8 ranks, but 2 are running\. Start 8"):
        running_mesh(str(read_plan(tmp_path / "plan.toml").mesh))


def test_a_plan_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write it: No such file or directory"):
        write_plan(tmp_path / "no" / "plan.toml", "dp=2", {})
