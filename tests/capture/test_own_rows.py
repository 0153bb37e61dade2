"""Rows that a mask puts in their places: each sample's own, where the data say so, in any spelling; else of all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.errors import AutoparError, CoupledError

IMAGE, VIDEO, WIDTH = 5, 4, 8
Put = Callable[[Tensor, Tensor, Tensor], Tensor]


def expanded(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    return h.masked_scatter((ids == IMAGE).unsqueeze(-1).expand_as(h).to(h.device), rows.to(h.device, h.dtype))


def broadcast(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    return torch.masked_scatter(h, (ids == IMAGE)[..., None], rows)


def repeated(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """A mask of elements, of which nothing says that a row has one value."""
    return h.masked_scatter((ids == IMAGE)[..., None].repeat(1, 1, WIDTH), rows)


def flat(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    return h.flatten(0, 1).masked_scatter((ids.flatten() == IMAGE)[:, None], rows).view_as(h)


def in_place(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    h = h * 2
    h.masked_scatter_((ids == IMAGE)[..., None], rows)
    return h


def written(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    h = h * 2
    h[ids == IMAGE] = rows.reshape(-1, WIDTH)
    return h


def written_flat(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    found = h.reshape(-1, WIDTH).clone()
    found[ids.reshape(-1) == IMAGE] = rows.reshape(-1, WIDTH)
    return found.view(h.shape)


def index_put(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    return h.index_put((ids == IMAGE,), rows.reshape(-1, WIDTH))


def both(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    h = h.masked_scatter((ids == IMAGE)[..., None], rows.view(-1, 3, WIDTH)[:, :2])
    return h.masked_scatter((ids == VIDEO)[..., None], rows.view(-1, 3, WIDTH)[:, 2:] * 2)


def one_by_one(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """As Llava: images in a list."""
    return broadcast(h, ids, torch.cat(list(rows), dim=0))


def again(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    put: Tensor = checkpoint(lambda h, rows: broadcast(h, ids, rows).sin(), h, rows, use_reentrant=False)
    return put


def of_weights(h: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """What a step changes decides the places."""
    return h.masked_scatter((ids == IMAGE)[..., None] & (h[..., :1] > 0), rows)


SPELLINGS = [expanded, broadcast, repeated, flat, in_place, written, written_flat, index_put, both, one_by_one, again]


class Model(nn.Module):
    def __init__(self, put: Put) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.put = put
        self.table, self.image, self.out = nn.Embedding(20, WIDTH), nn.Linear(10, WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        return self.out(torch.tanh(self.put(self.table(ids), ids, self.image(images))))


def loss(model: nn.Module, ids: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids, images).flatten(0, 1), labels.flatten())


def batch(put: Put | None = None, counts: tuple[int, ...] = (3, 3, 3, 3), seed: int = 0, flat: bool = False) -> Any:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, 20, (4, 9), generator=random)
    for sample, count in enumerate(counts):
        places = torch.randperm(9, generator=random)[:count]
        ids[sample, places] = IMAGE
        if put is both:
            ids[sample, places[:1]] = VIDEO
    images = torch.randn(4, 3, 10, dtype=torch.float64, generator=random)
    return ids, images.flatten(0, 1) if flat else images, torch.randint(0, 20, (4, 9), generator=random)


@pytest.mark.parametrize("put", SPELLINGS)
@pytest.mark.parametrize(
    ("mesh", "options"), [("dp=2,tp=2", {}), ("dp=2", {"microbatches": 2}), ("pp=2", {"microbatches": 4})]
)
def test_samples_are_split(put: Put, mesh: str, options: dict[str, Any]) -> None:
    for is_flat in (False, True) if put is broadcast else (False,):
        report = autopar.verify(
            Model(put).double(),
            mesh,
            loss_fn=loss,
            batch=batch(put, flat=is_flat),
            optimizer=torch.optim.SGD,
            **options,
        )
        assert report.ok, report


JOINED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "cat of rows": (lambda x: torch.cat(list(x)), True),
    "stack of rows": (lambda x: torch.stack(x.unbind(), 0), True),
    "cat of parts": (lambda x: torch.cat(x.split(2)), True),
    "cat of unlike parts": (lambda x: torch.cat(torch.split(x, [1, 3]), dim=0), True),
    "another order": (lambda x: torch.cat(list(x)[::-1]), False),
    "some": (lambda x: torch.cat(list(x)[:3]), False),
    "one twice": (lambda x: torch.cat([*x, x[0]]), False),
    "another dim": (lambda x: torch.cat(list(x), 1), False),
    "parts of another dim": (lambda x: torch.cat(x.unbind(1)), False),
    "without a gradient": (lambda x: torch.cat([part.detach() for part in x]) + x.sum(), False),
}


@pytest.mark.parametrize("name", JOINED)
def test_parts_that_are_joined_again(name: str) -> None:
    join, is_whole = JOINED[name]

    def squares(model: nn.Module, x: Tensor) -> Tensor:
        return join(model(x)).pow(3).cos().mean()

    x = torch.randn(4, 2, 6, dtype=torch.float64)
    options = {"microbatches": 2} if is_whole else {}
    torch.manual_seed(0)
    assert autopar.verify(nn.Linear(6, 4).double(), "dp=2", loss_fn=squares, batch=(x,), **options).ok
    step = autopar.compile(nn.Linear(6, 4).double(), "dp=2", loss_fn=squares, batch=(x,))
    joins = [node for node in dict(step.history)["capture"].calls() if str(node.target) in ("aten.cat.default",)]
    assert is_whole == (not joins)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_note_says_what_is_checked(device: str) -> None:
    """Where the batch has no data, it is taken to be so."""
    given = tuple(x.to(device) for x in batch())
    step = autopar.compile(Model(broadcast).double(), "dp=2", loss_fn=loss, batch=given)
    assert not any("masked_scatter" in str(node.target) for node in step.program.graph.nodes)
    (note,) = [note for note in step.notes if "rows" in note]
    assert note == (
        f"equal numbers of rows for all samples at {__file__}:{_line(broadcast)} are taken for granted: its rows are "
        "each sample's own; each step checks it"
    )


def _line(put: Put) -> int:
    """The line of a spelling of one line."""
    return put.__code__.co_firstlineno + 1


@pytest.mark.parametrize("put", [expanded, repeated, of_weights])
def test_rows_of_all_samples(put: Put) -> None:
    """Unlike numbers, or places that weights decide: right, but not with micro-batches."""
    model, given = Model(put).double(), batch(counts=(5, 1, 4, 2))
    assert autopar.verify(copy.deepcopy(model), "dp=2", loss_fn=loss, batch=given).ok
    with pytest.raises(CoupledError, match=r"op 'aten.masked_scatter(_backward)?.default' has no rule") as refused:
        autopar.verify(model, "dp=2", loss_fn=loss, batch=given, microbatches=2)
    said = (
        f"Equal numbers of rows for all samples at {__file__}:{_line(expanded)} are not what this batch has: every "
        "rank takes the rows of all, and micro-batches are refused. Pad samples to as many rows, and places for them, "
        "as the others have, or use microbatches=1."
    )
    assert str(refused.value).endswith(said) == (put is expanded)


def _steps(rank: int) -> list[str]:
    """Errors of steps beside the plain module's, where the numbers of rows are like, and not, and like again."""
    found = []
    for options in ({}, {"microbatches": 2}, {"batch": "local"}, {"batch": "local", "batch_dims": 0}):
        plain = Model(broadcast).double()
        model = autopar.parallelize(copy.deepcopy(plain), "dp=2", loss_fn=loss, **options)
        for step, counts in enumerate(((3, 3, 3, 3), (5, 1, 4, 2), (3, 3, 3, 3))):
            given = batch(counts=counts, seed=step)
            part = tuple(x[2 * rank : 2 * rank + 2] for x in given) if "batch" in options else given
            try:
                plain.zero_grad()
                model.zero_grad()
                want, got = loss(plain, *given), model.forward_backward(*part)
                want.backward()
                gradients = model.full_gradients() or {}
                errors = [
                    (gradients[name] - p.grad).abs().max() for name, p in plain.named_parameters() if name in gradients
                ]
                found.append("right" if max([(want - got).abs(), *errors]) < 1e-12 else "wrong")
            except AutoparError as error:
                found.append(type(error).__name__)
    return found


@pytest.mark.gloo
def test_another_program_where_the_data_say_so(two: Ranks) -> None:
    right, refused = ["right"] * 3, ["right", "{}", "right"]
    expected = [
        *right,
        *(each.format("CoupledError") for each in refused),
        *(each.format("BatchError") for each in refused),
        *right,
    ]
    assert two.run(_steps) == [expected] * 2


def test_a_mask_without_dims_takes_all_rows() -> None:
    class Scattered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return (self.up(x).masked_scatter(torch.tensor(False), x) * x.masked_scatter(torch.tensor(True), -x)).sum()

    assert autopar.verify(Scattered(), "dp=2,tp=2", batch=torch.randn(6, WIDTH)).ok
