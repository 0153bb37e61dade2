"""The page of a pipeline: its stages, its collectives by graph, its timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import gpt
from test_html import browser, embedded, shown  # noqa: F401  one is a fixture

import autopar
from autopar.compiled import Compiled
from autopar.report.inspection_pipeline import memory_of_rank
from autopar.report.page import page_text


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    model, loss_fn, batch = gpt()
    return autopar.compile(
        model, "pp=2,tp=2", loss_fn=loss_fn, batch=batch, microbatches=4, schedule="interleaved-1f1b"
    )


def test_the_data_are_those_of_the_pipeline(compiled: Compiled):
    data, pipeline = embedded(page_text(compiled, "gpt")), compiled.pipeline
    assert pipeline is not None
    assert data["ranks"] == 4 and ["pp", 2] in data["mesh"] and ["mb", 4] in data["mesh"]
    assert [row["rank"] for row in data["pipeline"]["rows"]] == list(pipeline.flow.ranks) == [0, 1, 0, 1]
    rows = data["collectives"]
    assert [(row["graph"], row["times"], row["bytes"]) for row in rows] == [
        (row.graph, row.times, row.bytes * row.times) for row in compiled.collectives
    ]
    assert {row["axis"] for row in rows} == {"tp"}, "what micro-batches add up to is no collective"
    stage_of = {node[0]: node[10] for node in data["nodes"]}
    for (stage, kind), graph in pipeline.graphs.items():
        if kind in "FB":
            products = [node.name for node in graph.calls() if "einsum" in node.name]
            assert {stage_of[name] for name in products} <= {stage}
    held = [memory_of_rank(compiled, place) for place in range(2)]
    assert data["memory"]["activations"] == held[data["fullest"]].activations


def test_a_person_looks_at_a_stage(browser: Any, compiled: Compiled, tmp_path: Path):  # noqa: F811
    one = shown(browser, compiled, tmp_path)
    page = one.page
    assert one.count(".stages button") == 5
    everything = one.count("#tree .row")
    page.locator(".stages button", has_text="stage 3").click()
    assert 0 < one.count("#tree .row") < everything
    assert page.locator(".stages button[aria-pressed=true]").inner_text().startswith("stage 3")
    assert one.finds("tokens.weight") == "tokens.weight", "what is looked for is shown, on whatever stage it is"
    assert "all stages" in page.locator(".stages button[aria-pressed=true]").inner_text()
    assert "0, on pp=0" in page.inner_text("#detail")
    page.click("#tab-collectives")
    assert one.count("#collectives tbody tr") == len(compiled.collectives)
    assert "4x" in page.locator("#collectives tbody tr").first.inner_text()
    page.click("#tab-schedule")
    assert one.count("#schedule rect.b") > 2 * 2 * 4 * 2 and page.locator("#schedule svg").is_visible()
    page.locator("#schedule rect.b.m2").first.hover()
    assert "micro-batch 2" in page.inner_text(".t-tip")
    wide = page.evaluate(
        "[document.querySelector('#schedule svg').clientWidth, document.querySelector('.t-scroll').clientWidth]"
    )
    assert abs(wide[0] - wide[1]) <= 2, "it fits"
    assert not one.faults and len(one.requests) == 1


def test_a_loaded_pipeline_has_the_same_page(compiled: Compiled, tmp_path: Path):
    compiled.save(tmp_path / "saved")
    one, other = (embedded(page_text(c, "x")) for c in (compiled, autopar.load(tmp_path / "saved")))
    assert {**one, "passes": []} == {**other, "passes": []}
