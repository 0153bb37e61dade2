"""A class token before the patches makes an odd length inside of the model: it gets rows until cp divides it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from verified import verified

import autopar
import autopar.passes.lengths.lengthen as lengthening
from autopar.compiled import Compiled
from autopar.ir.program import record
from autopar.runtime.attention import compared_blocks

ROWS, PIXELS, WIDTH = 4, 16, 32
lengthen_pass = sys.modules["autopar.passes.lengths.lengthen"]  # in the package the name is that of the function


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 4)


class Block(nn.Module):
    def __init__(self, causal: bool, dropout: float) -> None:
        super().__init__()
        self.causal, self.dropout = causal, nn.Dropout(dropout)
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.project(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(x / x.norm(dim=-1, keepdim=True)))))


class ViT(nn.Module):
    """Patches of an image behind `tokens` class tokens. The division has no epsilon: a row of zeros would be NaN."""

    def __init__(self, end: Any, tokens: int = 1, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.end, self.patches = end, nn.Conv2d(3, WIDTH, 4, 4)
        self.tokens = nn.Parameter(torch.randn(1, tokens, WIDTH))
        self.places = nn.Parameter(torch.randn(1, tokens + (PIXELS // 4) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block(causal, dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.tokens.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.end(x))


ENDS: dict[str, Any] = {
    "class token": lambda x: x[:, 0],
    "mean of the patches": lambda x: x[:, 1:].mean(1),
    "mean of all": lambda x: x.mean(1),
    "largest": lambda x: x.amax(1),
    "last two": lambda x: x[:, -2:].flatten(1)[:, :WIDTH],
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator), torch.randint(5, (ROWS,), generator=generator)


def loss(model: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(image), label)


def made(end: str = "class token", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return ViT(ENDS[end], **options)


def layouts(found: Compiled) -> set[str]:
    """Those of the attentions, with their lengths."""
    nodes = [node for node in found.program.calls() if str(node.target).endswith("attention.default")]
    return {f"{record(node).types[0].shape[2]} {record(node).layouts[0]}" for node in nodes}  # type: ignore[union-attr]


@pytest.mark.parametrize("end", ENDS)
def test_a_class_token(end: str) -> None:
    """Of 17 rows 18 are computed on two ranks, 20 on four; and what reads the rows in the end is given the 17."""
    meshes = ("cp=2", "cp=4", "dp=2,cp=2", "cp=2,tp=2")
    lengths = [
        layouts(found) for _, found in verified(made(end), meshes, loss, batch(), attention="gather")
    ]  # fmt: skip
    assert lengths == [{f"{n} {layout}"} for n, layout in zip(
        (18, 20, 18, 18), ("[-,-,cp,-]", "[-,-,cp,-]", "[dp,-,cp,-]", "[-,tp,cp,-]"), strict=True
    )]  # fmt: skip


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads": ("cp=2", {"attention": "ulysses"}),
    "hybrid": ("cp=2,ulysses=2", {}),
    "pipeline": ("cp=2,pp=2", {"microbatches": 2}),
    "micro-batches": ("dp=2,cp=2", {"microbatches": 2}),
    "zero": ("dp=2,cp=2", {"zero": 3}),
    "recompute": ("cp=2", {"recompute": "full"}),
    "sequence parallel": ("cp=2,tp=2", {"sequence_parallel": True}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_with_the_other_options(name: str) -> None:
    mesh, options = OPTIONS[name]
    ((_, found),) = verified(made(), (mesh,), loss, batch(), **options)
    length = {layout.split()[0] for layout in layouts(found)}
    assert length == {"20" if "ulysses=2" in mesh or "sequence_parallel" in options else "18"}


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_several_tokens(tokens: int) -> None:
    meshes = ("cp=4",) if tokens == 3 else ("cp=3", "cp=4")
    for _, found in verified(made(tokens=tokens), meshes, loss, batch(), attention="gather"):
        n = found.mesh.size
        assert layouts(found) == {f"{-(-(tokens + 16) // n) * n} [-,-,cp,-]"}


@pytest.mark.parametrize("options", [{"causal": True}, {"dropout": 0.3}], ids=str)
def test_what_is_not_known_is_computed_whole(options: dict[str, Any]) -> None:
    """Causal attention, and dropout, whose mask is drawn for the elements of the whole."""
    verified(made(**options), ("cp=2",), loss, batch())


def test_a_length_that_cp_divides_stays() -> None:
    ((_, found),) = verified(made(tokens=4), ("cp=4",), loss, batch(), attention="gather")
    assert layouts(found) == {"20 [-,-,cp,-]"}
    assert not any(record(node).made_by == "lengthen" for node in found.program.calls())


def test_a_key_that_was_added_and_is_seen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(lengthen_pass._Lengthen):  # type: ignore[name-defined, misc]
        def _column(self, user: Any) -> Any:
            found = super()._column(user)
            found.all_input_nodes[0].args = (found.all_input_nodes[0].args[0], self.longer)
            return found

    monkeypatch.setattr(lengthen_pass, "_Lengthen", Seen)
    report = autopar.verify(made(), "cp=2", loss_fn=loss, batch=batch())
    assert not report.ok


def test_rows_that_are_not_zero_in_a_sum_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a largest element are no zeros in a row that is there twice."""
    monkeypatch.setattr(lengthening, "_stays_zero", lambda *_: True)
    report = autopar.verify(made("largest"), "cp=2", loss_fn=loss, batch=batch())
    assert not report.ok
