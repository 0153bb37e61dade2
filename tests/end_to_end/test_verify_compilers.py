"""`verify` of programs that a compiler runs: what one process can run, and in what words it sends the rest away."""

from __future__ import annotations

import importlib.util
from typing import Any

import models
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CompileError


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp=2,tp=2", {}), ("pp=2,dp=2", {"microbatches": 3, "zero": 2})], ids=str
)
def test_groups_run_on_the_virtual_mesh(mesh: str, options: dict[str, Any]) -> None:
    model, loss_fn, batch = models.short_gpt()
    report = autopar.verify(model, mesh, loss_fn=loss_fn, batch=batch, steps=1, compile="triton", **options)
    assert report.ok, report


def test_inductor_is_sent_to_processes() -> None:
    with pytest.raises(CompileError, match="autopar verify TARGET --mesh MESH --backend gloo --compile inductor"):
        autopar.verify(nn.Linear(4, 4), "dp=1", batch=torch.ones(4, 4), compile="inductor")


def test_kernels_that_are_interpreted_need_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest)
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CompileError, match=r"TRITON_INTERPRET=1 needs Triton 3\.6 or newer, which is not installed"):
        autopar.verify(nn.Linear(4, 4), "dp=1", batch=torch.ones(4, 4), compile="triton")
