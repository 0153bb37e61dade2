"""Ports of public trainers (benchmarks/ports): few lines change, and two of the cheapest train as on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.ports.__main__ import is_right, measure, names, texts
from benchmarks.ports.differences import applied, changed, difference

GOAL = 6
MORE = {"dcgan": 10}  # three losses of two models


@pytest.mark.parametrize("name", names())
def test_few_lines_change(name: str) -> None:
    plain, diff = texts(name)
    assert changed(diff) <= MORE.get(name, GOAL)
    port = applied(plain, diff)
    assert difference(name, plain, port) == diff  # it is the diff of this script, line numbers too
    compile(port, name, "exec")


def test_a_diff_of_another_script_is_refused() -> None:
    plain, diff = texts("mnist")
    with pytest.raises(
        ValueError, match=r"line 7 of the script is '', and 'from torch\.utils\.data .* write the diff anew"
    ):
        applied(plain.replace("from torch import nn\n", ""), diff)


def test_lines_are_counted_place_by_place() -> None:
    assert changed(difference("x", "a\nb\nc\nd\n", "a\nB\nC\n\nd\ne\n")) == 3  # b and c, and e: empty lines are none
    assert changed(difference("x", '"""One."""\na\nb\nc\n', '"""Two."""\nc\n')) == 2


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["mnist", "nanogpt"])
def test_a_port_trains_as_one_device(name: str, tmp_path: Path) -> None:
    row = measure(name, ("dp=2",), tmp_path, torch.float64)
    assert is_right(row, "dp=2", torch.float64), row
    assert not is_right(measure(name, (), tmp_path, torch.float64), "dp=2", torch.float64)  # nothing run is not right


@pytest.mark.gloo
def test_a_port_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, diff = texts("mnist")
    monkeypatch.setattr(
        "benchmarks.ports.__main__.texts",
        lambda name: (plain, diff.replace("nll_loss(model(x), y)", "nll_loss(model(x), y) * 1.0001")),
    )
    row = measure("mnist", ("dp=2",), tmp_path, torch.float64)
    assert not is_right(row, "dp=2", torch.float64) and row.errors["dp=2"] < 1e-2
