"""Lookups in which each row has an index of its own: split by rows where that is proven, and nowhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from verified import Once, verified

from autopar.capture import capture
from autopar.compiler.meshes import mesh_of
from autopar.ir.plan import Plan
from autopar.ir.program import record
from autopar.ir.text.text import print_program
from autopar.passes.masks.rowwise import Known, rowwise

Model = Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]


class TextTower(nn.Module):
    """The pooling of CLIP (open_clip/transformer.py, transformers): the token of the largest id."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 12)
        self.mix = nn.Linear(12, 12)
        self.projection = nn.Parameter(torch.randn(12, 6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.tokens(ids))
        return (x[torch.arange(x.shape[0]), ids.argmax(dim=-1)] @ self.projection).square().mean()


class PatchDropout(nn.Module):
    """As in open_clip and timm: a few patches of each image, drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(12, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, _ = x.shape
        cls, x = x[:, :1], self.embed(x)
        keep = torch.randn(batch, count).topk(3, dim=-1).indices
        x = torch.cat((cls, x[torch.arange(batch)[..., None], keep]), dim=1)
        return self.head(x).square().mean()


class MaskedAutoencoder(nn.Module):
    """As in vit-pytorch: rows are looked up, and written, by the patches that are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decode = nn.Linear(12, 12), nn.Linear(12, 12)
        self.mask = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        order = torch.rand(batch, count).argsort(dim=-1)
        masked, kept = order[:, :3], order[:, 3:]
        rows = torch.arange(batch)[:, None]
        seen = self.embed(x[rows, kept])
        y = torch.zeros(batch, count, width, dtype=x.dtype)
        y[rows, kept] = seen
        y[rows, masked] = self.mask
        return (self.decode(y)[rows, masked] - x[rows, masked]).square().mean()


class MaskedAutoencoderByGather(nn.Module):
    """As in facebookresearch/mae and transformers' ViTMAE."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decode = nn.Linear(12, 12), nn.Linear(12, 12)
        self.mask = nn.Parameter(torch.randn(1, 1, 12))

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        shuffle = torch.argsort(torch.rand(batch, count), dim=1)
        restore, keep = torch.argsort(shuffle, dim=1), shuffle[:, :4]
        seen = self.embed(torch.gather(x, dim=1, index=keep.unsqueeze(-1).repeat(1, 1, width)))
        y = torch.cat([seen, self.mask.repeat(batch, count - 4, 1)], dim=1)
        y = torch.gather(y, dim=1, index=restore.unsqueeze(-1).repeat(1, 1, width))
        hidden = torch.ones(batch, count, dtype=x.dtype)
        hidden[:, :4] = 0
        hidden = torch.gather(hidden, dim=1, index=restore)
        return ((self.decode(y) - x).square().mean(-1) * hidden).sum() / hidden.sum()


class Positions(nn.Module):
    """As in transformers' Whisper: a row has as many tokens as the table has positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Parameter(torch.randn(5, 12)), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1]).unsqueeze(0).repeat(len(x), 1)
        return (self.up(x) + self.table[at]).square().mean()


class Lookup(nn.Module):
    """One lookup in what a layer gives."""

    def __init__(self, look: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.look = nn.Linear(12, 12), look

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.look(self.up(x), index).square().mean()


def looked_up(look: Callable[[Tensor, Tensor], Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Lookup(look), (torch.randn(6, 5, 12), torch.randint(0, 5, (6, 4)))


def rows_of(x: Tensor) -> Tensor:
    return torch.arange(len(x))


# As libraries write it; every one is looked up row by row.
ROWWISE: dict[str, Model] = {
    "clip": lambda: (TextTower(), (torch.randint(0, 20, (6, 5)),)),
    "patch dropout": lambda: (PatchDropout(), (torch.randn(6, 5, 12),)),
    "masked autoencoder": lambda: (MaskedAutoencoder(), (torch.randn(6, 6, 12),)),
    "masked autoencoder, gather": lambda: (MaskedAutoencoderByGather(), (torch.randn(6, 6, 12),)),
    "duplicates in a row": lambda: looked_up(lambda x, i: x[rows_of(x)[:, None], torch.cat([i, i], 1)]),
    "negative columns": lambda: looked_up(lambda x, i: x[rows_of(x)[:, None], i - 5]),
    "a list": lambda: looked_up(lambda x, i: x[list(range(len(x))), i[:, 0]]),
    "a range": lambda: looked_up(lambda x, i: x[range(len(x)), i[:, 0]]),
    "one column": lambda: looked_up(lambda x, _: x[rows_of(x), -1]),
    "expanded": lambda: looked_up(lambda x, i: x[rows_of(x).view(-1, 1).expand(6, 4), i]),
    "rows second": lambda: looked_up(lambda x, i: x.transpose(0, 1)[i.t(), rows_of(x)]),
    "rows and channels": lambda: looked_up(
        lambda x, i: x[rows_of(x)[:, None, None], i[:, :, None], torch.arange(12)]
    ),
    "counted": lambda: looked_up(lambda x, i: x[torch.ones(6, dtype=torch.int64).cumsum(0) - 1, i[:, 1]]),
    "a channel of each": lambda: looked_up(lambda x, i: x[rows_of(x)[:, None], :, i]),
    "all of them": lambda: looked_up(lambda x, _: x[rows_of(x)]),
    "each four times": lambda: looked_up(lambda x, _: x[rows_of(x)[:, None].expand(6, 4)]),
    "each four times, of a column": lambda: looked_up(lambda x, i: x[rows_of(x)[:, None].expand(6, 4), i[:, :1]]),
    "each four times, apart": lambda: looked_up(lambda x, i: x[rows_of(x)[:, None].expand(6, 4), :, i[:, :1]]),
    "each four times, behind": lambda: looked_up(
        lambda x, i: x.transpose(0, 1)[:, rows_of(x).expand(3, 6), i[None, :, 0]]
    ),
    "added more than once": lambda: looked_up(
        lambda x, i: x.index_put((rows_of(x)[:, None].expand(6, 4), i[:, :1]), x[:, :4] * 2, accumulate=True)
    ),
    "a number, added more than once": lambda: looked_up(
        lambda x, i: x.index_put((rows_of(x)[:, None].expand(6, 4), i[:, :1]), x.new_ones(()), accumulate=True)
    ),
    "positions of each token": lambda: (Positions(), (torch.randn(6, 5, 12),)),
    "added": lambda: looked_up(lambda x, i: x.index_put((rows_of(x)[:, None], i), x[:, :4] * 2, accumulate=True)),
}  # fmt: skip

# What looks like it and is not: rows must not be split, nor the numbers differ.
OTHERS: dict[str, Model] = {
    "another length": lambda: looked_up(lambda x, i: x[torch.arange(3)[:, None], i[:3]]),
    "shifted by one": lambda: looked_up(lambda x, i: x[(rows_of(x)[:, None] + 1) % 6, i]),
    "shifted, from one on": lambda: looked_up(lambda x, i: x[torch.arange(1, 7)[:, None] % 6, i]),
    "the same row twice": lambda: looked_up(lambda x, i: x[torch.tensor([0, 1, 2, 3, 4, 4])[:, None], i]),
    "two at a time": lambda: looked_up(lambda x, i: x[torch.arange(0, 12, 2)[:, None] % 6, i]),
    "backwards": lambda: looked_up(lambda x, i: x[torch.arange(5, -1, -1)[:, None], i]),
    "negative": lambda: looked_up(lambda x, i: x[(rows_of(x) - 6)[:, None], i]),
    "of the batch": lambda: looked_up(lambda x, i: x[(rows_of(x) + i[:, 0] * 0)[:, None], i]),
    "repeated": lambda: looked_up(lambda x, i: x[rows_of(x).repeat_interleave(4), i.flatten()]),
}  # fmt: skip


def made(model: Model) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return model()


@functools.cache
def once(name: str) -> Once:
    module, batch = made((ROWWISE | OTHERS)[name])
    return Once.of(module, None, batch)


@pytest.mark.parametrize("name", [*ROWWISE, *OTHERS])
def test_the_numbers_are_those_of_one_device(name: str) -> None:
    for mesh in ("dp=2,tp=2", "dp=3", "dp=2,tp=3"):
        once(name).right(mesh)


@pytest.mark.parametrize("name", ROWWISE)
def test_micro_batches_and_no_activation_is_gathered(name: str) -> None:
    found = once(name).compiled("dp=3,tp=2")
    assert [row for row in found.collectives if row.op in ("all_gather", "all_to_all") and row.axis == "dp"] == []
    once(name).right("dp=2,tp=2", microbatches=3)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_row_number_stays(name: str) -> None:
    module, batch = made(OTHERS[name])
    program = capture(module, None, batch, {}).program
    assert rowwise(program, Plan(mesh_of("dp=2"), {})) is program


def test_what_is_written_more_than_once_stays() -> None:
    """Which of several values is there in the end is not said."""
    module, batch = made(
        lambda: looked_up(lambda x, i: x.index_put((rows_of(x)[:, None].expand(6, 4), i[:, :1]), x[:, :1] * 2))
    )
    made_of = rowwise(capture(module, None, batch, {}).program, Plan(mesh_of("dp=2"), {}))
    assert "aten.index_put.default" in print_program(made_of)
    verified(module, ("dp=2,tp=2", "dp=3"), None, batch)


def test_a_square_index_counts_along_the_dim_that_it_counts() -> None:
    """As many columns as rows: the shape alone would not tell them apart."""
    for rows in (lambda x: rows_of(x)[:, None], lambda x: rows_of(x)[None]):
        look = lambda x, i, rows=rows: x[rows(x), torch.cat([i, i[:, :2]], 1)]  # noqa: E731
        module, batch = made(lambda look=look: looked_up(look))
        verified(module, ("dp=2,tp=2", "dp=3"), None, batch)


def test_a_tensor_of_the_users_is_no_number() -> None:
    """A global tensor is read at each step: it may count today, and not tomorrow."""
    rows = torch.arange(6)
    module, batch = made(lambda: looked_up(lambda x, i: x[rows, i[:, 0]]))
    program = capture(module, None, batch, {}).program
    assert rowwise(program, Plan(mesh_of("dp=2"), {})) is program


def test_a_wrong_proof_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the tester: with any index of the right size taken for row numbers, these numbers are others."""
    monkeypatch.setattr(Known, "counts", lambda _, node, size: -2 if record(node).type.shape == (size, 1) else 0)
    for name in ("shifted by one", "backwards", "the same row twice"):
        module, batch = made(OTHERS[name])
        with pytest.raises(AssertionError):
            verified(module, ("dp=2",), None, batch)


def test_values_are_computed_of_constants_alone() -> None:
    module, batch = made(lambda: looked_up(lambda x, i: x[rows_of(x)[:, None], i]))
    program = capture(module, None, batch, {}).program
    known = Known()
    values = {node.name: known.value(node) for node in program.calls()}
    assert torch.equal(values["arange"], torch.arange(6))  # type: ignore[arg-type]
    assert all(known.value(node) is None for node in program.placeholders)
