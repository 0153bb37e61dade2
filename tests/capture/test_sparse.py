"""Sparse gradients of embeddings become dense ones; sparse tensors are refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError

PADDED = {"padding_idx": 0}
TABLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(12, 6, sparse=True),
    "with padding": lambda: nn.Embedding(12, 6, sparse=True, **PADDED),
    "by frequency": lambda: nn.Embedding(12, 6, sparse=True, scale_grad_by_freq=True),
    "frozen": lambda: nn.Embedding.from_pretrained(torch.randn(12, 6), sparse=True),
    "bag": lambda: nn.EmbeddingBag(12, 6, mode="sum", sparse=True),
    "bag with padding": lambda: nn.EmbeddingBag(12, 6, sparse=True, **PADDED),
    "bag by offsets": lambda: nn.EmbeddingBag(12, 6, sparse=True),
}


class Lookup(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out, self.has_offsets = TABLES[name](), nn.Linear(6, 3), name == "bag by offsets"

    def forward(self, ids: Tensor) -> Tensor:
        if self.has_offsets:
            return self.out(self.table(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1])))
        found = self.table(ids)
        return self.out(found if found.ndim == 2 else found.mean(1))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


@pytest.mark.parametrize("name", TABLES)
def test_gradients_are_dense(name: str) -> None:
    ids, y = torch.randint(0, 12, (8, 5)), torch.randn(8, 3, dtype=torch.float64)
    for mesh, options in (("dp=2", {"zero": 3}), ("dp=2,tp=2", {})):
        report = autopar.verify(
            Lookup(name).double(), mesh, loss_fn=loss, batch=(ids, y), optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9),
            **options,
        )  # fmt: skip
        assert report.ok, report
    step = autopar.compile(Lookup(name).double(), "dp=2", loss_fn=loss, batch=(ids, y))
    (note,) = [note for note in step.notes if "sparse=True" in note]
    line = Lookup.forward.__code__.co_firstlineno + (2 if name == "bag by offsets" else 3)
    assert note == (
        f"an embedding with sparse=True at {__file__}:{line}: the gradient of its table is dense "
        "(torch.optim.SparseAdam takes no dense one: take torch.optim.Adam)"
    )


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2,tp=3"])
def test_a_table_that_a_lookup_writes_is_written(make: Callable[..., nn.Module], mesh: str) -> None:
    """Only the rows that are looked up, and are too long."""
    model = nn.Sequential(make(30, 6, max_norm=1.5, norm_type=1.0), nn.Linear(6, 3)).double()
    given = torch.randint(0, 12, (8, 5)), torch.randn(3, dtype=torch.float64)
    report = autopar.verify(model, mesh, loss_fn=loss, batch=given, steps=3)
    assert report.ok, report


GLOBAL = torch.eye(5, dtype=torch.float64).to_sparse()
WAYS = (
    "Use a dense one (a.to_dense(), beforehand), or keep its indices and its values: the product a @ x of a matrix is "
    "x.new_zeros(rows, x.shape[1]).index_add(0, row, value[:, None] * x[column])."
)


class Graph(nn.Module):
    """A product with a sparse matrix: a buffer, an attribute, a global or one that is made."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.out = kind, nn.Linear(6, 3)
        if kind == "buffer":
            self.register_buffer("adjacency", GLOBAL.to_sparse_csr())
        if kind == "attribute":
            self.adjacency = GLOBAL

    def forward(self, x: Tensor) -> Tensor:
        matrix = GLOBAL if self.kind == "global" else x.to_sparse() if self.kind == "made" else self.adjacency
        return self.out(torch.sparse.mm(matrix, x))


@pytest.mark.parametrize("kind", ["buffer", "attribute", "global", "made"])
def test_sparse_tensors_are_refused(kind: str) -> None:
    given = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    for ask in (autopar.verify, autopar.compile):
        with pytest.raises(CaptureError) as refused:
            ask(Graph(kind).double(), "dp=1", loss_fn=loss, batch=given)  # type: ignore[operator]
        text = " ".join(str(refused.value).split())
        if kind == "buffer":
            assert text == f"the tensor 'adjacency' of the model is a sparse tensor (torch.sparse_csr). {WAYS}"
        else:
            assert text.startswith(f"the model cannot be captured, at {__file__}:")
            assert text.endswith(f"This line has a sparse tensor. {WAYS}")
