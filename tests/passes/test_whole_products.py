"""What an axis leaves undivided is never left unsaid: products that every rank computes are in the notes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from experts import experts_case
from models import mlp, square_loss
from torch import Tensor, nn

import autopar
from autopar.compiled import Compiled

WEIGHTS = {"buffer": "[tp,-]", "constant": "[tp,-]", "where": "[tp,-]", "drawn": "[tp,-]", "batch": "[-,-]"}


class Masked(nn.Module):
    """Two products with weights that are masked: by a buffer, a constant, a condition, at random, or by the batch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up = nn.Parameter(torch.randn(8, 6))
        self.down = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("mask", torch.tensor([1.0, 0.5] * 24).view(8, 6))
        self.constant = torch.tensor([1.0, 0.0, 0.5] * 16).view(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.masked(x)).relu(), self.down if self.way != "batch" else self.down * x.mean())

    def masked(self, x: Tensor) -> Tensor:
        if self.way == "batch":
            return self.up * x.mean()
        if self.way == "where":
            return torch.where(self.mask > 0.7, self.up, 0.0)
        if self.way == "drawn":
            return F.dropout(self.up, 0.5)
        return self.up * (self.mask if self.way == "buffer" else self.constant)


def compiled(model: nn.Module, mesh: str, *batch: Tensor) -> Compiled:
    return autopar.compile(model, mesh, loss_fn=square_loss, batch=batch)


@pytest.mark.parametrize("way", WEIGHTS)
def test_a_masked_weight_is_split(way: str) -> None:
    """But for one that each batch masks anew: then the note says what that costs."""
    torch.manual_seed(2)
    model, x, y = Masked(way), torch.randn(6, 6), torch.randn(6, 4)
    found = compiled(model, "tp=2", x, y)
    assert str(found.layouts["up"]) == WEIGHTS[way]
    if way != "batch":
        assert found.notes == ()
        assert autopar.verify(model, "dp=3,tp=2", loss_fn=square_loss, batch=(x, y)).ok
        return
    (note,) = found.notes
    assert note.startswith("axis 'tp' (size 2) divides no product: 100 % of the work is done by each of its 2 ranks: ")
    assert " at test_whole_products.py:" in note and " and 2 more" in note


def test_a_product_that_one_axis_cannot_divide() -> None:
    """Sorted rows mix ranks: over dp the products of the experts stay replicated; their share and place are said."""
    model, batch = experts_case("running")
    notes = [note for note in compiled(model, "dp=2,tp=2", *batch).notes if note.startswith("axis 'dp'")]
    (note,) = notes
    assert note.startswith("axis 'dp' (size 2) leaves 6 of 12 products replicated: ")
    assert "of the work is done by each of its 2 ranks: %expert_mm" in note and " at experts.py:" in note


def test_nothing_is_said_where_all_is_divided() -> None:
    model, loss, batch = mlp()
    assert autopar.compile(model, "dp=2,tp=2", loss_fn=loss, batch=batch, microbatches=2).notes == ()


def test_the_notes_are_what_inspect_shows(capsys: pytest.CaptureFixture[str]) -> None:
    from autopar.cli.show import show_notes

    found = compiled(Masked("batch"), "tp=2", torch.randn(6, 6), torch.randn(6, 4))
    show_notes(found)
    assert "note: axis 'tp' (size 2) divides no product: 100 %" in capsys.readouterr().out


def test_an_axis_that_finds_nothing_to_divide() -> None:
    class Cheap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    found = compiled(Cheap(), "tp=2", torch.randn(6, 4), torch.randn(6, 4))
    assert found.notes == ("axis 'tp' (size 2) divides nothing: all work is done by each of its 2 ranks",)


class Mixing(nn.Module):
    """Layers behind an op that mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(self.norm(x).sort(0)[0])))


@pytest.mark.parametrize("zero", [0, 3])
def test_micro_batches_that_divide_little_say_so(zero: int) -> None:
    """Red before: the whole batch was computed at once, and nothing was said."""
    found = autopar.compile(
        Mixing(), "dp=1", loss_fn=lambda model, x: model(x).square().mean(), batch=(torch.randn(6, 6),),
        microbatches=2, zero=zero,
    )  # fmt: skip
    (note,) = found.notes
    assert note.startswith(
        "microbatches=2 divide little: 100 % of the work is done at once, for the whole batch, and what it keeps is "
        "kept whole: %einsum"
    )
    assert " at test_whole_products.py:" in note
    assert note.endswith(" and 3 more. What stands before it mixes samples, or has none")
