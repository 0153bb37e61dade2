"""Saved programs: whole round trip; nothing damaged, foreign or malicious is loaded."""

from __future__ import annotations

import ast
import json
import resource
import time
from pathlib import Path

import pytest
from test_text import MLP, same

from autopar.errors import ArtifactError
from autopar.ir.mesh import Mesh, parse_mesh
from autopar.ir.text.text import parse_program
from autopar.report.artifact import artifact as artifact_module
from autopar.report.artifact.artifact import INDEX, Artifact, load_programs, save_programs
from autopar.report.artifact.readable import parse_ranges, rank_ranges

JSON, PYTHON = "program_0_step.json", "program_0_step.py"


def sample() -> Artifact:
    program = parse_program(MLP)
    other = parse_program(MLP.replace("aten.mm.default(%x, %w)", "aten.matmul.default(%x, %w)"))
    return Artifact(
        parse_mesh("dp=2,tp=2"),
        (((0, 1, 3), {"step": program, "evaluate": other}), ((2,), {"step": other})),
        {"model": "GPT", "note": "é\n"},
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_programs(tmp_path / "out", sample())
    return tmp_path / "out"


def reseal(folder: Path) -> None:
    """Make every digest right again, as an attacker would."""
    index = json.loads((folder / INDEX).read_text())
    for name in index["files"]:
        index["files"][name] = artifact_module.hashlib.sha256((folder / name).read_bytes()).hexdigest()
    index["sha256"] = artifact_module._digest(index)
    (folder / INDEX).write_text(json.dumps(index))


def test_round_trip(saved: Path):
    expected, loaded = sample(), load_programs(saved)
    assert (loaded.mesh, loaded.meta) == (expected.mesh, expected.meta)
    assert [ranks for ranks, _ in loaded.programs] == [(0, 1, 3), (2,)]
    for (_, got), (_, want) in zip(loaded.programs, expected.programs, strict=True):
        assert list(got) == list(want)
        for name in want:
            same(got[name], want[name])


def test_files_are_the_same_each_time(saved: Path, tmp_path: Path):
    save_programs(tmp_path / "again", load_programs(saved))
    assert {p.name: p.read_bytes() for p in saved.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()
    }


def test_saving_again_replaces_all(saved: Path):
    one = Artifact(Mesh(()), (((0,), {"step": parse_program("CAPTURED program\n")}),), {})
    save_programs(saved, one)
    assert sorted(p.name for p in saved.iterdir()) == [INDEX, JSON, PYTHON]
    assert load_programs(saved).mesh == Mesh(())


def test_the_python_is_readable(saved: Path):
    text = (saved / PYTHON).read_text()
    ast.parse(text)
    assert "Graph 'step' of rank 0-1,3 on mesh dp=2,tp=2" in text
    assert '    w,  # parameter "up.weight", "down.weight": f32[16,32] of [16,64] [-,tp]\n' in text
    assert "    mm = aten.mm.default(x, w)  # f32[4,32] of [8,64] [dp,tp]  up  gpt.py:41\n" in text
    assert "    split = aten.split.Tensor(mm, 32, dim=1)  # (f32[4,16] of [8,32] [dp,tp], " in text
    assert '    # a sum, over tp\n    all_reduce = autopar.all_reduce.default(sum_1, "tp", "sum")' in text.replace(
        "'", '"'
    )
    assert "        all_reduce,  # loss" in text and '        None,  # gradient "frozen"' in text


def test_a_reason_cannot_leave_its_comment(tmp_path: Path):
    text = MLP.replace("why: a sum, over tp", r'why: "x\nimport os\u2028os.abort()\r"')
    save_programs(tmp_path, Artifact(parse_mesh("dp=2,tp=2"), (((0,), {"step": parse_program(text)}),), {}))
    body = ast.parse((tmp_path / PYTHON).read_text())
    assert not [n for n in ast.walk(body) if isinstance(n, ast.Attribute) and n.attr == "abort"]


def test_loading_runs_nothing(saved: Path, tmp_path: Path):
    """Code in the readable files is never run, even if all digests are right."""
    (saved / PYTHON).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    reseal(saved)
    load_programs(saved)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "builtins.exec", "torch.load", "operator.call", "aten.__class__.mro", "aten.from_file.default", "x"],
)
def test_ops_outside_the_list_are_refused(saved: Path, name: str):
    path = saved / JSON
    path.write_text(path.read_text().replace("aten.mm.default", name))
    reseal(saved)
    with pytest.raises(ArtifactError, match=rf"{JSON}': program text, line 5: '{name}' is not an op that a program"):
        load_programs(saved)


@pytest.mark.parametrize("name", [JSON, PYTHON, "program_1_step.json"])
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b.replace(b"41", b"42")])
def test_a_changed_file_is_named(saved: Path, name: str, damage):
    (saved / name).write_bytes(damage((saved / name).read_bytes()))
    with pytest.raises(ArtifactError, match=f"is not intact: '{name}' was changed or damaged"):
        load_programs(saved)


def test_all_faults_at_once(saved: Path):
    (saved / JSON).unlink()
    (saved / PYTHON).write_text("")
    with pytest.raises(ArtifactError) as error:
        load_programs(saved)
    assert f"'{JSON}' is missing" in str(error.value) and f"'{PYTHON}' was changed" in str(error.value)


def test_truncated_index(saved: Path):
    text = (saved / INDEX).read_text()
    (saved / INDEX).write_text(text[: len(text) // 2])
    with pytest.raises(ArtifactError, match=r"index.json' is damaged or not a file of autopar: it is not JSON"):
        load_programs(saved)


def test_changed_index(saved: Path):
    (saved / INDEX).write_text((saved / INDEX).read_text().replace("dp=2,tp=2", "dp=4,tp=1"))
    with pytest.raises(ArtifactError, match=r"index.json' was changed after it was saved"):
        load_programs(saved)


def test_wrong_version(saved: Path):
    text = (saved / INDEX).read_text()
    (saved / INDEX).write_text(text.replace('"version": 4', '"version": 7'))
    with pytest.raises(ArtifactError, match="written in version 7 of the format; this autopar reads version 4"):
        load_programs(saved)


def test_a_directory_of_something_else(tmp_path: Path):
    with pytest.raises(ArtifactError, match="there is no such directory"):
        load_programs(tmp_path / "nothing")
    with pytest.raises(ArtifactError, match=r"it has no index\.json"):
        load_programs(tmp_path)
    (tmp_path / INDEX).write_text('{"pages": []}')
    with pytest.raises(ArtifactError, match="its format is not 'autopar artifact'"):
        load_programs(tmp_path)
    (tmp_path / INDEX).write_bytes(b"\x80\x02pickle")
    with pytest.raises(ArtifactError, match="is not JSON"):
        load_programs(tmp_path)


def test_other_files_are_never_overwritten(tmp_path: Path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"it holds other files \('thesis.txt'\)"):
        save_programs(tmp_path, sample())
    (tmp_path / "thesis.txt").unlink()
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ArtifactError, match="is not the index of saved programs"):
        save_programs(tmp_path, sample())
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="it is not a directory"):
        save_programs(tmp_path / "file", sample())


@pytest.mark.parametrize("name", ["../program_0_step.json", "/etc/passwd", "program_0_step.pkl"])
def test_no_file_outside_is_read(saved: Path, name: str):
    index = json.loads((saved / INDEX).read_text())
    index["files"][name] = "0"
    index["sha256"] = artifact_module._digest(index)
    (saved / INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match="is not a name of a file of saved programs"):
        load_programs(saved)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("programs", [{"ranks": "0-9", "graphs": []}], "'0-9' is not among the ranks of mesh"),
        ("programs", [{"ranks": "0", "graphs": []}, {"ranks": "0", "graphs": []}], "gives a rank two programs"),
        (
            "programs",
            [{"ranks": "0", "graphs": ["other"]}],
            "names graph 'other', but has no file 'program_0_other.json' of it",
        ),
        ("programs", [], "holds no program"),
        ("programs", 7, "has a wrong entry"),
        ("mesh", "dp=4", r"is a program for mesh 'dp=2,tp=2', but the index says 'dp=4'"),
    ],
)
def test_an_index_that_lies(saved: Path, key: str, value: object, message: str):
    index = json.loads((saved / INDEX).read_text())
    index[key] = value
    index["sha256"] = artifact_module._digest(index)
    (saved / INDEX).write_text(json.dumps(index))
    with pytest.raises(ArtifactError, match=message):
        load_programs(saved)


def test_ranges():
    assert rank_ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert parse_ranges("0-2,5,7-8", parse_mesh("dp=9")) == (0, 1, 2, 5, 7, 8)
    assert rank_ranges(tuple(range(4096))) == "0-4095"


def test_a_large_program_is_saved_quickly(tmp_path: Path):
    lines = MLP.splitlines()
    body = [lines[4].replace("%mm:", f"%mm_{i}:") for i in range(1, 15_000)]
    program = parse_program("\n".join([*lines[:4], *body, 'return loss "" = %mm_7']))
    start, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    save_programs(tmp_path, Artifact(program.mesh, ((tuple(range(4)), {"step": program}),), {}))
    assert time.process_time() - start < 6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000
