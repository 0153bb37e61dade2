"""The benchmark of other people's packages: its table and its extra name the same ones, and a row is what it says."""

from __future__ import annotations

import tomllib

import torch
from conftest import ROOT
from torch import Tensor, nn

from benchmarks.libraries.__main__ import line, summary
from benchmarks.libraries.case import Case
from benchmarks.libraries.measure import BROKEN, REFUSED, VERIFIED, measure
from benchmarks.libraries.models import TABLE


def test_the_extra_names_the_packages_of_the_table() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["libraries"]
    assert sorted(extra) == sorted(set(TABLE) - {"torch"})
    assert len(extra) >= 30 and sum(len(models) for models in TABLE.values()) >= 300


def test_a_verified_row() -> None:
    row = measure("torch", "vae")
    assert (row.first, row.second) == (VERIFIED, VERIFIED), row.reasons
    assert "verified" in line(row) and "1 verified (100 %)" in summary([row])[1]


class Counting(nn.Module):
    """What no program can hold: as many rows as the weights say."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        return inner[inner[:, 0] > 0].cumsum(0)


def _counting() -> Case:
    return Case(Counting(), (torch.randn(12, 8),))


def _absent() -> Case:
    raise ImportError("no such package")


def test_refused_and_broken_rows() -> None:
    table = {"torch": {"counting": _counting, "absent": _absent}}
    refused, broken = (measure("torch", name, table) for name in ("counting", "absent"))
    assert refused.first == REFUSED and all("CaptureError" in why for why in refused.reasons.values())
    assert broken.first == BROKEN and "ImportError: no such package" in line(broken)
