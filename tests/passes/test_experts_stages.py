"""Stages of mixtures: rows that lie at their experts, whose number only the data say, are sent to no other stage."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.errors import LayoutError
from autopar.ir.program import record
from benchmarks.mixtures import MODELS

ROWS = 6


def asked(name: str) -> dict[str, Any]:
    model, loss_fn, batch = MODELS[name]()
    return {"model": model, "loss_fn": loss_fn, "batch": tuple(tensor[:ROWS] for tensor in batch), "microbatches": 3}


@pytest.mark.parametrize(("name", "ranks"), [("listed", 3), ("listed", 4), ("mixtral", 3)])
def test_no_cut_lies_between_a_router_and_the_sum_of_its_experts(name: str, ranks: int) -> None:
    """Red before: a stage waited for as many rows as go to experts on average, and other ones came."""
    given = asked(name)
    model = given.pop("model")
    given |= {"precision": "bf16", "recompute": "stage+full"}
    pipeline = autopar.compile(model, f"ep=2,pp={ranks}", **given).pipeline
    assert pipeline is not None
    calls = {node.name: record(node) for graph in pipeline.graphs.values() for node in graph.calls()}
    owned = {name for name, known in calls.items() if any(one and one.owned for one in known.layouts)}
    sent = [str(each) for of_rank in pipeline.lists for each in of_rank if "SEND" in str(each)]
    assert owned and sent
    assert not [text for text in sent if owned & {*text.partition(": ")[2].replace("%", "").split(", ")}]
    assert autopar.verify(model, f"ep=2,pp={ranks}", **given).ok


def test_a_cut_of_the_users_is_refused_there() -> None:
    given = asked("mixtral")
    model = given.pop("model")
    before = "tokens, qkv.0, dense.0, mixed.0.router, mixed.0.experts.0.gate"
    leaves = [name for name, part in model.named_modules() if name and not [*part.children()]]
    behind = ", ".join(name for name in leaves if name not in before.split(", "))
    with pytest.raises(LayoutError, match=r"rows that lie at their experts in stage 0 .* are one stage's"):
        autopar.compile(model, "ep=2,pp=2", stages=[before, behind], **given)
