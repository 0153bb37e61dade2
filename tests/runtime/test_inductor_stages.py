"""`compile="inductor"` of pipelines and micro-batches: loss, every gradient and two AdamW steps of one device, in
float64, from graphs that Inductor wrote and the list of instructions runs."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from processes import Ranks

import autopar
from autopar.runtime.inductor_stages import InductorGraph
from autopar.torch_compat import has_cpp_compiler
from autopar.verification.distributed import verify_on_ranks

needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler (apt install g++)")
SLICED = {"slices": 2, "schedule": "seq1f1b"}
ZB_V = {"schedule": "zb-v", "chunks": 2, "microbatches": 4}


def gpt() -> models.Case:
    """With dropout, and labels of which each rank and each micro-batch counts another number."""
    torch.manual_seed(2)
    config = models.GPTConfig(models.VOCABULARY, models.TIME, layers=2, heads=4, width=32, dropout=0.1)
    return models.uneven(models.GPT(config)), models.token_loss, (models.tokens(), models.labels())


def llama() -> models.Case:
    """RMSNorm, rotary positions, grouped heads, SwiGLU; the head is the table of the tokens."""
    torch.manual_seed(3)
    model = models.uneven(models.Llama(2, 32, 4, 2, 48, models.VOCABULARY, 2 * models.TIME))
    model.head.weight = model.tokens.weight
    return model, models.token_loss, (models.tokens(), models.labels())


MAKE = {"mlp": models.mlp, "gpt": gpt, "llama": llama}


def _verify(rank: int, name: str, mesh: str, options: dict[str, Any]) -> str | None:
    """What is wrong, as rank 0 found it."""
    model, loss_fn, batch = MAKE[name]()
    job = autopar.Job(model, loss_fn, batch, compile="inductor", **{"microbatches": 3, **options})
    report = verify_on_ranks(job, mesh, steps=2, seed=5)
    return None if report is None or report.ok else str(report)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@needs_compiler
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("mlp", "pp=2", {}),  # Inductor's C++ takes the time: a GPT has many more kernels
        ("mlp", "dp=2", {"zero": 2}),
        slow("gpt", "pp=2", {}),
        slow("llama", "pp=2", {"schedule": "zb-h1"}),
        slow("gpt", "pp=2", ZB_V),
        slow("llama", "pp=2", {"schedule": "interleaved-1f1b", "chunks": 2, "stages": None, "microbatches": 4}),
        slow("gpt", "pp=2", SLICED),
        slow("llama", "pp=2", {**SLICED, "recompute": "full"}),
        slow("gpt", "pp=2", {"recompute": "full", "chunked_loss": True}),
        slow("llama", "pp=2", {"precision": "bf16"}),
        slow("gpt", "dp=2", {"zero": 1}),
        slow("gpt", "dp=2", {"zero": 3, "recompute": "selective"}),
        slow("llama", "tp=2", {"sequence_parallel": True}),
        slow("llama", "cp=2", {"attention": "ring"}),
    ],
    ids=str,
)
def test_two_ranks(two: Ranks, name: str, mesh: str, options: dict[str, Any]) -> None:
    assert [found for found in two.run(_verify, name, mesh, options, timeout=500) if found] == []


@pytest.mark.slow
@needs_compiler
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("llama", "pp=2,tp=2", {"sequence_parallel": True}),
        ("gpt", "pp=2,tp=2", {"schedule": "zb-h1"}),
        ("gpt", "pp=2,dp=2", {"zero": 3}),
        ("llama", "pp=2,fsdp=2", {"precision": "bf16", "recompute": "full"}),
        ("llama", "pp=2,cp=2", {"attention": "ring", "zero": 1}),
    ],
    ids=str,
)
def test_four_ranks(four: Ranks, name: str, mesh: str, options: dict[str, Any]) -> None:
    assert [found for found in four.run(_verify, name, mesh, options, timeout=580) if found] == []
