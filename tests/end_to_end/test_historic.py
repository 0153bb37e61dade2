"""The bugs that `benchmarks.historic` plants stand in our source as it is, and one of them is seen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.historic import BUGS, Historic
from benchmarks.mutants import ROOT, judged


def test_each_bug_can_be_planted():
    assert len(BUGS) >= 25 and len({bug.what for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        assert ast.dump(bug.tree()) != ast.dump(ast.parse((ROOT / bug.path).read_text())), bug.what
        assert bug.seen and all(Path(test).is_file() for test in bug.tests()), bug.what


def test_a_bug_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"here: autopar/ema\.py has 0 times: no such line"):
        Historic("here", "nothing", "autopar/ema.py", "no such line", "", ()).tree()


def test_a_planted_bug_is_seen():
    bug = next(bug for bug in BUGS if bug.path == "autopar/ema.py")
    assert judged(bug) == "killed"
