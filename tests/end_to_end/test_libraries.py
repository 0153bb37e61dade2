"""The benchmark of other people's packages: its table and its extra name the same ones, and a row is what it says."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import torch
from conftest import ROOT
from torch import Tensor, nn

from benchmarks.libraries.__main__ import header, joined, kept, line, parsed, summary
from benchmarks.libraries.case import Case
from benchmarks.libraries.measure import (
    BROKEN,
    CONFIGURATIONS,
    FURTHER,
    MESHES,
    REFUSED,
    UNDECIDED,
    VERIFIED,
    Row,
    measure,
)
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


class Turning(nn.Module):
    """What rounding alone changes wholly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))  # tp divides its sums
        self.outer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer((1e14 * self.inner(x)).sin())


def _turning() -> Case:
    return Case(Turning(), (torch.randn(12, 8),))


def _absent() -> Case:
    raise ImportError("no such package")


def test_rows_that_are_not_verified() -> None:
    table = {"torch": {"counting": _counting, "absent": _absent, "turning": _turning}}
    refused, broken = (measure("torch", name, table) for name in ("counting", "absent"))
    assert refused.first == REFUSED and all("CaptureError" in why for why in refused.reasons.values())
    assert broken.first == BROKEN and "ImportError: no such package" in line(broken)
    open_ = measure("torch", "turning", table)
    assert open_.first == UNDECIDED and "| undecided |" in line(open_)
    assert "rounding alone" in line(open_) and "1 undecided (100 %)" in summary([open_])[1]


def test_a_line_of_the_page_is_read_as_its_row() -> None:
    reasons = {"zero=3": "CoupledError: a; b | c, of x", "pp=2,dp=2": "LayoutError: 2 stages"}
    results = {"dp=2,tp=2": VERIFIED, "dp=3": VERIFIED, "zero=3": REFUSED, "pp=2,dp=2": REFUSED}
    row = Row("torch", "vae", "2.13.0", results, reasons, specialize=True, run_once=True, seconds=12.0)
    read = parsed(line(row))
    assert (read.results, read.specialize, read.run_once, read.statistics) == (results, True, True, False)
    installed = Row("timm", "vit", reasons={"dp=3": "OSError: at /v/lib/site-packages/timm/vit.py:3"})
    assert line(installed).endswith("| OSError: at timm/vit.py:3 |")
    for each in (row, Row("timm", "metaformer:caformer_s18"), Row("lpips", "alex", "0.1", {"dp=3": BROKEN})):
        assert line(parsed(line(each))) == line(each)


def test_a_page_keeps_what_was_not_run(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    before = Row("torch", "vae", "1.0", {"dp=2,tp=2": VERIFIED, "dp=3": VERIFIED}, specialize=True, seconds=3.0)
    page.write_text("# Libraries\n\nWords.\n\n" + "\n".join((*header(), line(before))) + "\n")
    (old,) = kept(None, page).values()
    now = measure("torch", "vae", only=["zero=3"])
    assert now.results == {"zero=3": VERIFIED}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(asdict(now)) + "\n")
    (row,) = kept(file, page).values()
    assert row == joined(old, now)
    assert row.results == {**before.results, **now.results} and row.specialize
    assert "0 verified ones that were run with micro-batches" in summary([row])[1]


def test_a_row_whose_run_failed_takes_no_old_reasons() -> None:
    results = {**dict.fromkeys(MESHES, VERIFIED), **dict.fromkeys(FURTHER, REFUSED)}
    before = Row("torch", "vae", "1.0", results, {"0": "old"})
    now = Row("torch", "vae", "2.0", dict.fromkeys(FURTHER, BROKEN), dict.fromkeys(FURTHER, "too slow"))
    row = joined(before, now)
    assert (row.first, row.second, set(row.reasons.values())) == (VERIFIED, BROKEN, {"too slow"})
    assert joined(before, Row("torch", "vae", "2.0", dict.fromkeys(CONFIGURATIONS, VERIFIED))).reasons == {}
