"""What `python -m benchmarks.published` reads, and what it says of its rows."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.compiler.check_options import options_of
from autopar.compiler.meshes import mesh_of
from autopar.errors import TargetError
from benchmarks.published.__main__ import lines
from benchmarks.published.case import BACKWARD, FORWARD, MEMORY, STEP, Case, stages
from benchmarks.published.predict import Predicted
from benchmarks.published.rows import cases
from benchmarks.published.summary import regret, summary

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "published"
OURS = sorted(HERE.glob("*.csv"))
VTRAIN = """# a source
params_B,gpus,gbs,mbs,hidden,heads,layers,seq,tp,dp,pp,iter_ms
39.1,512,1536,2,8192,64,48,2048,2,32,8,21890.4
39.1,512,1536,2,8192,64,48,2048,4,32,4,13875.5
39.1,512,1536,4,8192,64,48,2048,8,32,2,14757.3
3.6,64,512,64,3072,32,30,2048,8,8,1,9838.9
"""


@pytest.fixture
def vtrain(tmp_path: Path) -> list[Case]:
    path = tmp_path / "vtrain_some.csv"
    path.write_text(VTRAIN)
    return list(cases(path))


def test_a_row_is_a_model_a_plan_and_a_time(vtrain: list[Case]) -> None:
    first, *_, last = vtrain
    assert (first.mesh, first.rows, first.length) == ("pp=8,dp=32,tp=2", 1536, 2048)
    assert first.measured == {STEP: pytest.approx(21.8904)}
    assert first.options["microbatches"] == 24 and first.options["schedule"] == "1f1b"
    assert first.options["stages"][0] == "tokens, positions, blocks.0-5"
    assert first.options["stages"][-1] == "blocks.42-47, norm, head"
    assert first.group == vtrain[1].group != last.group
    assert last.is_outlier and not first.is_outlier


def test_the_columns_of_a_file_say_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("\ufeff" + VTRAIN.removeprefix("# a source\n"))
    assert len(list(cases(path))) == 4, "whatever its name, and with the mark of a spreadsheet"
    path.write_text("gpus,watts\n8,700\n")
    with pytest.raises(
        TargetError, match=r"other\.csv: its columns are gpus, watts; a file has those of one kind: chu"
    ):
        list(cases(path))


@pytest.mark.parametrize(
    ("cell", "other", "said"),
    [
        ("7b,512", "8x7b,512", "line 2: model is 8x7b; MPT has 125m, "),
        ("7b,512", "7b,many", "line 2: invalid literal for int"),
    ],
)
def test_a_row_that_cannot_be_read(tmp_path: Path, cell: str, other: str, said: str) -> None:
    path = tmp_path / "some.csv"
    row = "7b,512,8,2,1,16,FS,-,40,40,9000\n"
    path.write_text("model,seq,gpus,mbs,ga,gbs,sharding,ac,mfu,hfu,tok_s_gpu\n" + row.replace(cell, other))
    with pytest.raises(TargetError, match=re.escape(said)):
        list(cases(path))


def test_layers_that_stages_do_not_divide_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    path.write_text(VTRAIN.splitlines()[1] + "\n2.9,40,64,2,3072,32,30,2048,1,5,8,1000\n")
    (case,) = cases(path)
    named = [word for stage in case.options["stages"] for word in stage.split(", ") if word.startswith("blocks")]
    ends = [int(word.split("-")[-1].removeprefix("blocks.")) for word in named]
    assert len(case.options["stages"]) == 8 and ends[-1] == 29 and max(b - a for a, b in pairwise([-1, *ends])) == 4


def test_stages_without_blocks() -> None:
    assert stages([0, 1, 2, 0], "tokens", "head") == ["tokens", "blocks.0", "blocks.1-2", "head"]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_our_files_say_their_source_and_can_be_asked_for(path: Path) -> None:
    assert path.read_text().startswith("# ")
    found = list(cases(path))
    assert len(found) >= 2 and len({case.name for case in found}) == len(found)
    for case in found:
        options = options_of(**case.options)
        ranks, data = mesh_of(case.mesh), dict(mesh_of(case.mesh).axes).get("dp", 1)
        assert ranks.size > 1 and case.rows % (data * (options.microbatches or 1)) == 0
        assert set(case.measured) in ({STEP}, {MEMORY}, {FORWARD, BACKWARD}) and all(case.measured.values())


def test_regret_and_errors(vtrain: list[Case]) -> None:
    """The second is predicted to take 20 s, the third, which took 6 % longer, 14 s; the outlier half of its time."""
    times = (21.8904, 20.0, 14.0, 4.91945)
    rows = [Predicted(case, {STEP: time}) for case, time in zip(vtrain, times, strict=True)]
    assert regret(rows[:3]) == pytest.approx(14.7573 / 13.8755 - 1)
    assert list(summary(rows)) == [
        "step: 4 rows, mean error 24.8%, largest 50.0%, Spearman 0.80",
        "step without 1 outliers: 3 rows, mean error 16.4%, largest 44.1%, Spearman 0.50",
        "regret of choosing in 1 groups: mean 6.4%, worst 6.4% (39.1B 512 1536)",
    ]
    best = [*rows[:2], replace(rows[2], values={STEP: 30.0}), rows[3]]
    assert list(summary(best))[-1].startswith("regret of choosing in 1 groups: mean 0.0%")


def test_a_line_for_each_quantity() -> None:
    case = next(cases(HERE / "korthikanti_layers_a100.csv"))
    forward, backward = lines(Predicted(case, {FORWARD: 7.7e-3, BACKWARD: 11.9e-3 * 1.1}), 2.0)
    assert forward.split()[-4:] == ["+0.0%", "(2", "s", "CPU)"]
    assert "backward" in backward and "13.09 ms" in backward and backward.endswith("+10.0%")
