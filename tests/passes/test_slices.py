"""Slices of sequences through a pipeline: a step is that of one device, and what cannot be sliced is refused."""

from __future__ import annotations

import functools
from typing import Any

import gpt
import pytest
import torch
import torch.nn.functional as F
from models import Llama, token_loss
from refusals import line_of, refused
from torch import Tensor, nn
from verified import Once, verified

import autopar
from autopar.compiled import Compiled
from autopar.errors import BatchError, LayoutError, PlanError, ScheduleError
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.runtime.pipeline import slices as runtime_slices

ROWS, TIME, WIDTH, VOCABULARY = 4, 24, 32, 40


def llama(layers: int = 2, kv_heads: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Llama(layers, WIDTH, 4, kv_heads, 48, VOCABULARY, TIME)


def tokens() -> tuple[Tensor, Tensor]:
    """Ignored labels lie unevenly over rows and positions, so that no two slices weigh the same."""
    x, y = torch.randint(VOCABULARY, (2, ROWS, TIME), generator=torch.Generator().manual_seed(1))
    y[0, 3:9], y[2, :20] = -100, -100
    return x, y


@functools.cache
def once(layers: int = 2) -> Once:
    """It, captured once for all meshes and slices."""
    return Once.of(llama(layers), token_loss, tokens())


def sliced(slices: Any, microbatches: int = 2, schedule: str = "seq1f1b", **more: Any) -> dict[str, Any]:
    return {"slices": slices, "microbatches": microbatches, "schedule": schedule, **more}


MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("pp=2", sliced(2)),
    "four": ("pp=2", sliced(4)),
    "one micro-batch": ("pp=2", sliced(4, 1)),
    "many": ("pp=2", sliced(8, 4)),
    "gpipe": ("pp=2", sliced(4, schedule="gpipe")),
    "stages on each rank": ("pp=2", sliced(2, schedule="gpipe", chunks=2)),
    "four stages": ("pp=4", sliced(2)),
    "four stages, four slices": ("pp=4", sliced(4, 4)),
    "dp": ("dp=2,pp=2", sliced(2)),
    "tp": ("pp=2,tp=2", sliced(4)),
    "tp first": ("tp=2,dp=2,pp=2", sliced(2)),
    "sequence parallel": ("pp=2,tp=2", sliced(3, sequence_parallel=True)),
    "cp": ("pp=2,cp=2", sliced(2, attention="gather")),
    "heads of cp": ("pp=2,cp=2", sliced(2, attention="ulysses")),
    "zero": ("dp=2,pp=2", sliced(2, zero=3)),
    "zero of cp": ("cp=2,pp=2", sliced(2, zero=2)),
    "recompute": ("pp=2", sliced(4, recompute="full")),
    "budget": ("pp=2", sliced(4, recompute=0.6)),
}


@pytest.mark.parametrize("name", MATRIX)
def test_a_step_is_that_of_one_device(name: str) -> None:
    """Loss, every gradient and the weights after two steps of AdamW, in float64."""
    mesh, options = MATRIX[name]
    layers = 4 if "pp=4" in mesh or "chunks" in options else 2
    _, found = once(layers).right(mesh, **options)
    assert {str(record(node).layouts[0]) for node in calls(found, "attention")} <= {
        layout for layout in layouts_of(found) if "sl" in layout
    }
    assert not found.notes


def calls(found: Compiled, op: str) -> list[Any]:
    return [node for node in found.program.calls() if str(node.target) == f"autopar.{op}.default"]


def layouts_of(found: Compiled) -> set[str]:
    return {str(record(node).layouts[0]) for node in calls(found, "attention")}


def tied(context: int, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    config = gpt.GPTConfig(vocabulary=12, context=context, layers=2, heads=2, width=8, dropout=dropout)
    return gpt.GPT(config)


def nll(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)


def words(time: int = 8) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(0, 12, (2, 8, time), generator=torch.Generator().manual_seed(2))
    y[:3, 2:] = -1
    return x, y


@functools.cache
def tied_once(context: int) -> Once:
    return Once.of(tied(context), nll, words(context))


@pytest.mark.parametrize("slices", [2, 4, 8])
def test_dropout_is_that_of_one_device(slices: int) -> None:
    """Of a GPT with tied weights and positions of its own, in attention too; down to a position a slice."""
    tied_once(8).right("pp=2", **sliced(slices))


def test_what_leaves_beside_the_loss() -> None:
    """Values of positions, of sequences, and what the batch alone gives."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = model(x)
        return nll(model, x, y), logits, logits.square().sum((1, 2)), (y >= 0).sum(1), logits.flatten(0, 1)

    verified(tied(8, 0.0), ["pp=2", "dp=2,pp=2"], loss_fn, words(), **sliced(2))


def test_labels_that_the_loss_shifts_are_divided() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    ((_, found),) = verified(tied(8), ["pp=2"], loss_fn, words()[:1], **sliced(4))
    assert not found.notes


def test_a_loss_that_weighs_each_sequence() -> None:
    """Each by the number of its labels: a count of the batch alone, which no slice waits for."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-1, reduction="none")
        return (each.sum(1) / (y >= 0).sum(1)).mean()

    verified(tied(8), ["pp=2"], loss_fn, words(), **sliced(2))


def test_a_short_float() -> None:
    """No further off than twice what autocast is on one device; gradients of keys are added up in float32."""
    report = autopar.verify(llama(), "pp=2", loss_fn=token_loss, batch=tokens(), precision="bf16", **sliced(4))
    assert report.ok, report


def test_keys_that_several_layers_read() -> None:
    """Each attention keeps the slices of its own operands, on the stage where it is."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv = nn.Linear(WIDTH, 2 * WIDTH)
            self.q = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.kv(x).chunk(2, -1))
            for layer in self.q:
                q = layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
                x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            return x.square().mean()

    torch.manual_seed(0)
    verified(Shared(), ["pp=2", "pp=3"], None, (torch.randn(ROWS, TIME, WIDTH),), **sliced(4))


@pytest.mark.parametrize("mesh", ["pp=2", "cp=2,pp=2"])
def test_a_cut_through_attention(mesh: str) -> None:
    """What slices keep lies where attention is, whatever stage makes it and however it is called there."""
    first = "tokens, blocks.0.attn_norm, blocks.0.k, blocks.0.v"
    rest = "blocks.0.q, blocks.0.o, blocks.0.mlp_norm, blocks.0.gate, blocks.0.up, blocks.0.down, blocks.1, norm, head"
    for recompute in ("none", "full"):
        options = sliced(2, attention="gather", stages=[first, rest], recompute=recompute)
        _, found = once().right(mesh, **options)
        assert found.pipeline is not None
        kept = [key for key, graph in found.pipeline.graphs.items() for node in graph.calls() if "earlier" in node.name]
        assert kept and all(stage == 1 for stage, _ in kept)


def test_one_tensor_as_queries_keys_and_values() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(x).unflatten(-1, (4, -1)).transpose(1, 2)
                x = x + F.scaled_dot_product_attention(h, h, h, is_causal=True).transpose(1, 2).flatten(2)
            return x.square().mean()

    torch.manual_seed(0)
    verified(Plain(), ["pp=2"], None, (torch.randn(ROWS, TIME, WIDTH),), **sliced(4, recompute="full"))


def test_frozen_layers_have_no_backward_pass() -> None:
    """The keys of a stage that only runs forwards are dropped with the last slice."""
    model = llama(4)
    for part in (model.tokens, *model.blocks[:3]):
        part.requires_grad_(False)
    verified(model, ["pp=2", "pp=4"], token_loss, tokens(), **sliced(4))


def test_a_last_batch_that_does_not_divide_is_not_cut() -> None:
    x, y = (each[:, :23] for each in tokens())
    ((_, found),) = verified(llama(), ["pp=2"], token_loss, (x, y), fixed=Fixed(uneven=True), **sliced(4))
    assert found.plan.slices == 1


# -- refused -----------------------------------------------------------------------------------------------------------

HINT = (
    "A slice sees the slices before it in causal attention alone (scaled_dot_product_attention with is_causal=True or "
    "a causal mask; of transformers with attn_implementation='sdpa'), and not in attention that is spelled out, nor in "
    "what pools, adds up or mixes positions. Use slices=1."
)


class Mixing(nn.Module):
    """What slices cannot do, behind a projection: the op of `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner, self.outer = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.conv = nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        heads = h.unflatten(-1, (4, -1)).transpose(1, 2)
        if self.kind == "attention":
            h = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)  # attention
        elif self.kind == "mean":
            h = h - h.mean(1, keepdim=True)  # mean
        elif self.kind == "norm":
            h = self.norm(h.flatten(0, 1)).view_as(h)  # norm
        elif self.kind == "cumsum":
            h = h.cumsum(1)  # cumsum
        elif self.kind == "conv":
            h = self.conv(h.mT).mT  # conv
        return self.outer(h).square().mean()


@pytest.mark.parametrize(
    ("kind", "op"),
    [
        ("attention", "autopar.attention.default"),
        ("mean", "aten.sum.dim_IntList"),
        ("norm", "aten.sum"),
        ("cumsum", "aten.cumsum.default"),
        ("conv", "aten.convolution.default"),
    ],
)
def test_what_mixes_positions_is_refused(kind: str, op: str) -> None:
    with pytest.raises(LayoutError) as found:
        autopar.compile(Mixing(kind), "pp=2", batch=(torch.randn(ROWS, TIME, WIDTH),), **sliced(2))
    text = str(found.value)
    assert text.startswith("the slices of a sequence cannot be computed one after another: op '" + op), text
    assert text.endswith(HINT) and f"test_slices.py:{line_of(Mixing.forward, f'# {kind}')}" in text, text


def test_errors() -> None:
    def compiled(mesh: str = "pp=2", **options: Any) -> Compiled:
        return autopar.compile(tied(8), mesh, loss_fn=nll, batch=words(), **options)

    refused(
        ScheduleError,
        "slices=2: schedule '1f1b' does not run the slices of a sequence in its order, and back in reverse. Use "
        "schedule gpipe or seq1f1b, slices=1, or an order of your own.",
        lambda: compiled(slices=2),
    )
    refused(
        PlanError,
        "slices=2 fill a pipeline, but mesh 'dp=2' has none. Add pp to it, e.g. 'dp=2,pp=2', or leave slices out: cp "
        "splits a sequence over ranks.",
        lambda: compiled("dp=2", **sliced(2)),
    )
    refused(
        BatchError,
        "slices=3 does not divide the 8 positions (dim 1 of batch tensor 0): pad to 9, or use slices of 1, 2, 4 or 8.",
        lambda: compiled(**sliced(3)),
    )
    refused(
        BatchError,
        'slices=0: write a number of 1 or more, the positions of each: [1024, 512], or "auto".',
        lambda: StepOptions(slices=0),
    )
    parts_of_b = "0F0,0F1,0I1,0I0,0W1,0W0\n1F0,1F1,1B1,1B0\n"
    refused(
        ScheduleError,
        "slices=2: schedule 'table' runs the gradients of weights (W) apart from those of inputs (I). Give the "
        "slices of a sequence whole backward actions (B).",
        lambda: compiled(**sliced(2, 1, parts_of_b)),
    )


def test_a_model_without_a_sequence_is_refused() -> None:
    def compiled() -> Compiled:
        model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        return autopar.compile(model, "pp=2", loss_fn=lambda m, x: m(x).sum(), batch=torch.arange(4), **sliced(2))

    with pytest.raises(LayoutError, match=r"slices=2 divides no product: 100 % of the work is done again for each"):
        compiled()


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0\n", "it takes over .* of the slice that 0F0 computes, which runs later"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "it takes over .* of the slice that 1B1 computes, which runs later"),
    ],
)
def test_slices_out_of_order_are_refused(table: str, text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        autopar.compile(tied(8), "pp=2", loss_fn=nll, batch=words(), **sliced(2, 1, table))


def test_an_order_of_ones_own() -> None:
    table = "0F0,0F1,0B1,0F2,0F3,0B0,0B3,0B2\n1F0,1F1,1B1,1B0,1F2,1F3,1B3,1B2\n"
    tied_once(8).right("pp=2", **sliced(2, 2, table))


# -- found -------------------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_dropped_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What later slices give to the keys of earlier ones."""
    later = runtime_slices.Carried.later

    def forgets(self: Any, x: Tensor, dim: int, key: str, microbatch: int, owned: bool) -> Tensor:
        self.rests.clear()
        return later(self, x, dim, key, microbatch, owned)

    monkeypatch.setattr(runtime_slices.Carried, "later", forgets)
    report = once().report(once().compiled("pp=2", **sliced(4)))
    assert not report.ok and any("blocks.0.k.weight" in str(row) for row in report.rows if not row.ok)


def test_keys_in_a_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = runtime_slices.Carried.earlier

    def turned(self: Any, x: Tensor, dim: int, key: str, microbatch: int) -> Tensor:
        return torch.cat(list(reversed(earlier(self, x, dim, key, microbatch).chunk(microbatch % 4 + 1, dim))), dim)

    monkeypatch.setattr(runtime_slices.Carried, "earlier", turned)
    assert not once().report(once().compiled("pp=2", **sliced(4))).ok


def test_nothing_is_kept_at_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[runtime_slices.Carried] = []
    first = runtime_slices.Carried.__init__

    def watched(self: Any, *args: Any) -> None:
        first(self, *args)
        made.append(self)

    monkeypatch.setattr(runtime_slices.Carried, "__init__", watched)
    once().right("pp=2", **sliced(4))
    assert made and not any(one.pieces or one.rests for one in made)


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_activations_are_those_of_the_formula() -> None:
    """Stage i holds (p - i + k - 1) / k micro-batches, keys and values within them once. At the peak the last slice may
    be under way, so that it is less."""
    torch.manual_seed(0)
    batch = tuple(torch.randint(VOCABULARY, (2, 4, 64)))
    given = Once.of(Llama(4, WIDTH, 4, 2, 48, VOCABULARY, 64), token_loss, batch, torch.float32)

    def kept(**options: Any) -> list[int]:
        stages = ["tokens, blocks.0", "blocks.1", "blocks.2", "blocks.3, norm, head"]
        found = given.compiled("pp=4", stages=stages, **options)
        return [found.memory(rank).categories["saved activations"] for rank in range(3)]  # the last has the loss

    whole = kept(microbatches=4, schedule="1f1b")
    for slices in (2, 4):
        for stage, (now, before) in enumerate(zip(kept(**sliced(slices, 4)), whole, strict=True)):
            expected = (4 - stage + slices - 1) / slices / (4 - stage)
            assert 0.75 * expected < now / before < 1.02 * expected, (slices, stage)


def test_the_graph_does_not_grow_with_the_slices() -> None:
    sizes = set()
    for slices in (2, 8):
        found = once().compiled("pp=2", **sliced(slices))
        assert found.pipeline is not None
        sizes.add(sum(len(graph.nodes) for graph in found.pipeline.graphs.values()))
        assert len(calls(found, "earlier")) == 2 * 2 * 2 and len(calls(found, "later")) == 2 * 2
    assert len(sizes) == 1


def test_it_is_saved_and_loaded(tmp_path: Any) -> None:
    found = once().compiled("pp=2", **sliced(4))
    found.save(tmp_path)
    again = autopar.load(tmp_path)
    assert again.pipeline is not None and found.pipeline is not None
    assert again.pipeline.flow == found.pipeline.flow and again.pipeline.costs == found.pipeline.costs
    assert again.pipeline.reductions == found.pipeline.reductions and again.pipeline.time == found.pipeline.time
    assert again.lines() == found.lines()


@pytest.mark.parametrize("recompute", ["stage", "stage+full", "full"])
def test_what_is_computed_again_is_where_it_was(recompute: str) -> None:
    """Red before, but for "full": of equal calls (where a piece begins) a clone had the first as its original, those
    behind it had none, and all attention went back on the first stage, which has no keys of the second one."""
    pipeline = once().right("cp=2,pp=2", recompute=recompute, **sliced(2))[1].pipeline
    assert pipeline is not None
    for stage in range(2):
        names = [str(node.target) for node in pipeline.graphs[stage, "B"].graph.nodes]
        assert names.count("autopar.attention_backward.default") == 1, (stage, names)
