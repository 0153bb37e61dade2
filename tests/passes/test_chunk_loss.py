"""chunk_loss: the head, its loss and both gradients some tokens at a time, whatever the loss is made of."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compiled import Compiled
from autopar.ir.ops.ops import op
from autopar.ir.program import record

WORDS, WIDTH, LENGTH = 96, 16, 12


class Model(nn.Module):
    """Embedding, a layer, a head; `kind` says what is done to weights and logits."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.layer = kind, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=kind == "bias")
        if kind == "tied":
            self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5)) if kind == "scale" else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x)
        logits: Tensor = self.head(self.norm(hidden + self.layer(hidden).tanh()))
        if self.kind == "cap":
            logits = 30 * torch.tanh(logits / 30)
        return logits if self.scale is None else logits * self.scale


def loss_of(kind: str) -> Callable[..., Any]:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        z, t = (logits[:, :-1], y[:, 1:]) if kind == "shift" else (logits, y)
        z, t = z.flatten(0, 1), t.flatten()
        weight = torch.arange(1, WORDS + 1).to(z.dtype) / WORDS if kind == "weight" else None
        smoothing, how = 0.1 if kind == "smooth" else 0.0, "sum" if kind == "sum" else "mean"
        found = F.cross_entropy(z, t, weight, label_smoothing=smoothing, reduction=how)
        if kind == "log softmax":
            found = F.nll_loss(F.log_softmax(z, -1), t)
        if kind == "z loss":
            found = found + 1e-2 * torch.logsumexp(z, -1).square().mean()
        if kind == "distill":
            teacher = F.softmax(z.detach() * 0.5 + 0.1, -1)
            found = found + F.kl_div(F.log_softmax(z, -1), teacher, reduction="batchmean")
        if kind == "top":
            found = found + z.max(-1).values.mean()
        if kind == "across":
            found = found * (1 + z.square().mean()).log()
        if kind == "counted":
            return found, (z > 0).sum()
        if kind == "measured":  # a second head without a gradient
            with torch.no_grad():
                other = F.cross_entropy(model.head(model.table(x)).flatten(0, 1), t)
            return found + other
        if kind == "right":
            return found, (z.argmax(-1) == t).sum()
        return (found, logits) if kind == "logits" else found

    return loss


def batch() -> tuple[Tensor, Tensor]:
    """Ignored labels are spread unevenly."""
    random = torch.Generator().manual_seed(3)
    x, y = torch.randint(WORDS, (2, 4, LENGTH), generator=random)
    y[0, 3:9], y[2, :10] = -100, -100
    return x, y


def compiled(kind: str, mesh: str, **options: Any) -> Compiled:
    torch.manual_seed(0)
    options.setdefault("chunked_loss", True)
    return autopar.compile(Model(kind), mesh, loss_fn=loss_of(kind), batch=batch(), **options)


def heads(found: Compiled) -> int:
    """The number of chunks."""
    return sum(node.target is op("einsum") and "_chunk" in node.name for node in found.program.calls()) // 3


def check(kind: str, mesh: str, **options: Any) -> None:
    torch.manual_seed(0)
    options.setdefault("chunked_loss", True)
    report = autopar.verify(Model(kind), mesh, loss_fn=loss_of(kind), batch=batch(), **options)
    assert report.ok, str(report.mismatch)
    assert options.get("precision") or report.max_error < 1e-10


KINDS = (
    "plain",
    "bias",
    "tied",
    "cap",
    "scale",
    "smooth",
    "weight",
    "sum",
    "z loss",
    "log softmax",
    "distill",
    "right",
)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_loss_is_made_of(kind: str) -> None:
    found = compiled(kind, "dp=2,tp=2")
    assert heads(found) == 12 and not found.notes
    check(kind, "dp=2,tp=2")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=1", {}),
        ("dp=4", {"zero": 2}),
        ("dp=2,tp=3", {"zero": 3}),
        ("fsdp=2,tp=2", {"sequence_parallel": True, "recompute": "full"}),
        ("cp=2", {}),
        ("cp=2,tp=2", {"sequence_parallel": True}),
        ("dp=2", {"microbatches": 2}),
        ("pp=2,dp=2", {"microbatches": 2, "stages": ["table,layer", "norm,head"]}),
        ("tp=2", {"precision": "bf16"}),
        ("dp=2", {"chunked_loss": 1000}),
    ],
)  # fmt: skip
def test_with_the_other_options(mesh: str, options: dict[str, Any]) -> None:
    assert heads(compiled("plain", mesh, **options)) > 1 or "pp" in mesh
    check("plain", mesh, **options)


def test_integers_are_counted_as_integers() -> None:
    found = compiled("counted", "dp=2")
    totals = [record(node).type.dtype for node in found.program.calls() if node.name.startswith("total")]
    assert torch.int64 in totals and not any("cast" in node.name for node in found.program.calls())
    check("counted", "dp=2")


def test_sums_of_chunks_are_at_least_float32() -> None:
    """Each chunk adds a rounding: of a short float the twelve parts would lose digits that the whole has."""
    found = compiled("plain", "dp=2", precision="bf16")
    totals = {record(node).type.dtype for node in found.program.calls() if node.name.startswith("total")}
    assert totals and torch.bfloat16 not in totals


def test_a_head_without_a_gradient_is_cut_once() -> None:
    found = compiled("measured", "dp=2")
    names = [node.name for node in found.program.calls() if node.target is op("einsum")]
    assert sum("_chunk" in name for name in names) == 4 * 12 and not any(name.count("_chunk") > 1 for name in names)
    check("measured", "dp=2")


def test_a_running_sum_along_the_tokens_is_not_cut_there() -> None:
    """Its pieces need those before: chunks are cut from the rows of the batch."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return model(x).cumsum(1).square().mean()

    for mesh in ("dp=1", "cp=2"):
        report = autopar.verify(Model("plain"), mesh, loss_fn=loss, batch=batch(), chunked_loss=True)
        assert report.ok and report.max_error < 1e-10, str(report)


def test_a_weight_that_zero_splits_is_gathered_once_for_both_products() -> None:
    def gathers(chunked: bool) -> int:
        rows = compiled("plain", "dp=2", zero=3, chunked_loss=chunked).collectives
        return sum(row.op == "all_gather" and "head" in row.value for row in rows)

    assert (gathers(False), gathers(True)) == (2, 1)


def test_chunks_are_cut_where_they_can_be() -> None:
    """A shifted sequence is 11 of 12 positions, a rank of dp=2 has 2 rows; without a shift it has 12 positions."""
    assert heads(compiled("shift", "dp=2")) == 2 and heads(compiled("plain", "dp=2")) == 12
    check("shift", "dp=2")
    whole = 2 * LENGTH * WORDS * 4
    assert [heads(compiled("plain", "dp=2", chunked_loss=whole // n)) for n in (2, 3, 5)] == [2, 3, 6]


def test_the_bytes_of_a_chunk() -> None:
    """No value has a number for each word and more tokens than fit."""
    found = compiled("plain", "dp=1", chunked_loss=3000)
    made = [record(node).type for node in found.program.calls() if record(node).is_tensor]
    logits = [type_.bytes_ for type_ in made if len(type_.shape) > 1 and type_.shape[-1] == WORDS]
    assert logits and max(logits) <= 3000 and heads(found) == 12


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("logits", r"stays whole, since %\w+ at test_chunk_loss.py:\d+ takes them whole|they leave the step"),
        ("top", r"%max_\d+ at test_chunk_loss.py:\d+ has several results"),
        ("across", r"their gradient hangs on %\w+ at test_chunk_loss.py:\d+, and that on all tokens"),
    ],
)
def test_a_note_says_why_not(kind: str, why: str) -> None:
    found = compiled(kind, "dp=2")
    (note,) = found.notes
    assert note.startswith("chunked_loss: %einsum_1 of head at test_chunk_loss.py:")
    assert re.search(why, note), note
    assert heads(found) == 0 and not compiled(kind, "dp=2", chunked_loss="auto").notes
    check(kind, "dp=2")


def test_auto_leaves_small_logits_whole() -> None:
    assert heads(compiled("plain", "dp=2", chunked_loss="auto")) == 0


def test_the_logits_of_a_large_vocabulary_are_gone() -> None:
    """Llama's vocabulary, 8,192 tokens: the peak of a step falls by 85 % of logits and more."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(128_256, 64), nn.Linear(64, 128_256, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.table(x))
            return out

    def peak(chunked: bool) -> int:
        with torch.device("meta"):
            model, tokens = Small(), torch.empty(1, 8192, dtype=torch.int64)
        found = autopar.compile(
            model, "dp=1", loss_fn=loss_of("plain"), batch=(tokens, tokens), chunked_loss=chunked
        )  # fmt: skip
        return found.memory().peak

    whole, chunked = peak(False), peak(True)
    assert whole - chunked > 0.85 * 8192 * 128_256 * 4


def test_a_dropped_chunk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the tester: a sum over chunks that forgets one."""
    chunks = importlib.import_module("autopar.passes.chunked_loss.chunk_loss")._Chunks
    whole = chunks._sum

    def forgetful(self: Any, node: Any, total: Any, part: Any, i: int) -> Any:
        return total if i == 1 else whole(self, node, total, part, i)

    monkeypatch.setattr(chunks, "_sum", forgetful)
    report = autopar.verify(Model("plain"), "dp=2", loss_fn=loss_of("plain"), batch=batch(), chunked_loss=True)
    assert not report.ok and "made by pass 'chunk_loss', head" in str(report.mismatch)
