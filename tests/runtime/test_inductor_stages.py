"""`compile="inductor"` of pipelines and micro-batches: loss, every gradient and two AdamW steps of one device, in
float64, from graphs that Inductor wrote and the list of instructions runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn

import autopar
from autopar.ir.ops.measure import local_type
from autopar.ir.ops.ops import op
from autopar.ir.pipeline import Pipeline
from autopar.runtime.compilers import inductor
from autopar.runtime.compilers.inductor_stages import compile_stages
from autopar.runtime.pipeline.microbatches import GraphTurn, StageGraph
from autopar.runtime.pipeline.run_pipeline import compile_rank
from autopar.runtime.pipeline.slices import Carried
from autopar.torch_compat import has_cpp_compiler
from autopar.verification.verify_ranks import verify_on_ranks

needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler (apt install g++)")
SLICED = {"slices": 2, "schedule": "seq1f1b"}
UNEQUAL = {"slices": [6, 2], "schedule": "seq1f1b"}
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


def beside() -> models.Case:
    """What leaves beside the loss is put together of the micro-batches, side by side in its last dim."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8))  # each kernel is compiled, for 1.7 s
    return model, _loss_and_columns, (torch.randn(models.BATCH, 16), torch.randn(models.BATCH, 8) + 1)


def _loss_and_columns(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    out = model(x)
    return F.mse_loss(out, y), out.t().contiguous()


class Causal(nn.Module):
    """As little as slices of unequal length need: positions, attention, dropout, a second stage."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.qkv, self.out = nn.Embedding(models.TIME, 8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.place(torch.arange(x.shape[1]))
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.out(F.dropout(mixed, 0.3, self.training))


def causal() -> models.Case:
    torch.manual_seed(4)
    return Causal(), models.square_loss, (torch.randn(6, models.TIME, 8), torch.randn(6, models.TIME, 8))


MAKE = {"mlp": models.mlp, "beside": beside, "gpt": gpt, "llama": llama, "causal": causal}


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
        ("beside", "pp=2", {}),  # Inductor's C++ takes the time: a GPT has many more kernels
        slow("causal", "pp=2", UNEQUAL),
        slow("mlp", "dp=2", {"zero": 2}),
        slow("gpt", "pp=2", {}),
        slow("llama", "pp=2", {"schedule": "zb-h1"}),
        slow("gpt", "pp=2", ZB_V),
        slow("llama", "pp=2", {"schedule": "interleaved-1f1b", "chunks": 2, "stages": None, "microbatches": 4}),
        slow("gpt", "pp=2", SLICED),
        slow("llama", "pp=2", {**SLICED, "recompute": "full"}),
        slow("gpt", "pp=2", UNEQUAL),
        slow("gpt", "pp=2", {**UNEQUAL, "schedule": "gpipe", "recompute": "full"}),
        slow("llama", "pp=2", {**UNEQUAL, "precision": "bf16", "chunked_loss": True}),
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


# -- how the graphs are compiled --------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[None]:
    """A test that trains in this process leaves no group behind."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Flat(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@needs_compiler
def test_stages_that_are_alike_are_compiled_once() -> None:
    """Rank 0 of two has the stages 0, 2 and 4 of 6; of 2 and 4 each graph is the same."""
    batch = torch.randn(8, 8), torch.randn(8, 8)
    stages = [f"layers.{i}, layers.{i + 1}" for i in range(0, 12, 2)]
    options: dict[str, Any] = {"chunks": 3, "microbatches": 4, "schedule": "interleaved-1f1b", "stages": stages}
    compiled = autopar.compile(Flat(6), "pp=2", loss_fn=models.square_loss, batch=batch, **options)
    assert compiled.pipeline is not None
    code, _ = compile_stages(compiled.pipeline, 0, {}, torch.device("cpu"))
    functions = {key: graph.variants[0, None].code.function for key, graph in code.graphs.items()}  # type: ignore[attr-defined]
    assert functions[2, "F", 0] is functions[4, "F", 0] and functions[2, "B", 0] is functions[4, "B", 0]
    assert functions[0, "B", 0] is not functions[2, "B", 0]  # that of the batch wants no gradient of its input


def _only_the_first(pipeline: Pipeline) -> None:
    """Let the first micro-batch alone have what the layer gives, as `reshard` does for what is the same in all."""
    graph = pipeline.graphs[0, "F"].graph
    (node,) = (node for node in graph.nodes if node.target is torch.ops.aten.tanh.default)
    with graph.inserting_after(node):
        kept = graph.call_function(op("keep_first"), (node, "mb"))
    kept.meta.update(node.meta)
    node.replace_all_uses_with(kept, lambda user: user is not kept)


@needs_compiler
def test_a_graph_that_is_another_for_each_microbatch() -> None:
    """Code for a number that a trace does not know, where it turns out to need it, is written for each."""
    batch = torch.randn(6, 8), torch.randn(6, 8)
    compiled = autopar.compile(Flat(1), "dp=1", loss_fn=models.square_loss, batch=batch, microbatches=3)
    pipeline, cpu = compiled.pipeline, torch.device("cpu")
    assert pipeline is not None
    _only_the_first(pipeline)
    ours, theirs = (
        code.graphs[0, "F", 0] for code in (compile_rank(pipeline, 0), compile_stages(pipeline, 0, {}, cpu)[0])
    )
    assert set(theirs.variants) == {(0, 0), (0, 1), (0, 2)}  # type: ignore[attr-defined]
    program = pipeline.graphs[0, "F"]
    given = [torch.randn(local_type(node, program.mesh).shape) for node in program.placeholders]
    for microbatch in range(3):
        turn = GraphTurn(microbatch, pipeline.time, Carried((1,)))
        want, got = (_outputs(graph, [*given, *(None for _ in graph.sums)], turn) for graph in (ours, theirs))
        torch.testing.assert_close(got, want)


def _outputs(graph: StageGraph, items: list[Any], turn: GraphTurn) -> tuple[Any, ...]:
    steps = graph.steps(items, turn)
    with pytest.raises(StopIteration) as done:
        next(steps)
    return done.value.value


@pytest.mark.slow
@needs_compiler
def test_graphs_take_values_as_others_give_them(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied into other strides on its way from graph to graph, and what dies is freed by the code."""
    strided, copied = inductor._strided, []

    def watched(value: Tensor, stride: tuple[int, ...]) -> Tensor:
        found = strided(value, stride)
        copied.append(found is not value)
        return found

    monkeypatch.setattr(inductor, "_strided", watched)
    model, loss_fn, batch = models.short_gpt()
    parallel = autopar.parallelize(model, "dp=1", loss_fn=loss_fn, compile="inductor", microbatches=2)
    parallel.forward_backward(*batch)
    assert len(copied) > 50 and not any(copied)


def _one_fails(rank: int) -> None:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    model = autopar.parallelize(Flat(2), "pp=2", loss_fn=models.square_loss, compile="inductor", microbatches=2)
    import torch._inductor.config as config

    nothing = {"cpp.cxx": (None, "/bin/true"), "fx_graph_cache": False}  # "compiles" nothing
    with config.patch(nothing) if rank else nullcontext():
        model.prepare(*batch)


@needs_compiler
@pytest.mark.gloo
def test_a_rank_that_cannot_compile_ends_all(two: Ranks) -> None:
    first, second = two.attempt(_one_fails, timeout=200)
    assert second.error is not None and second.error.startswith("CompileError: Inductor cannot compile graph '")
    assert "of rank 1 on mesh" in second.error
    assert first.error == f"RankError: the compilation failed on some ranks, not on this one:\n  rank 1: {second.error}"


def _forward(rank: int) -> None:
    """A forward pass alone, and a batch of another size, in the same stages."""
    plain, loss_fn, (x, _) = models.mlp()
    with torch.no_grad():
        want = plain(x)
    model = autopar.parallelize(plain, "pp=2", loss_fn=loss_fn, compile="inductor", microbatches=3)
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(x[:5]), want[:5], rtol=1e-5, atol=1e-6)
    assert "async_compile.cpp_pybinding" in str(model.programs[-1].runner.source)


@pytest.mark.slow
@needs_compiler
@pytest.mark.gloo
def test_a_forward_pass_and_another_batch(two: Ranks) -> None:
    two.run(_forward, timeout=200)
