"""Slices of sequences under masks that are tensors: what is causal in them is found or checked, the rest is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from refusals import line_of
from shares import in_turns
from test_compare_masks import MASKS, ROWS, TIME, WIDTH, Attending, causal, sdpa
from test_slices import HINT, sliced
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.errors import BatchError, LayoutError
from autopar.passes.collectives.carried import sees_before
from autopar.runtime.attention import compared_blocks

# That hide from each query what lies behind it; of the others some may be causal, but nobody knows.
CAUSAL = ["window", "chunks", "padding", "padding of both", "documents", "documents, window and padding", "triangle",
          "added", "added triangle", "turned"]  # fmt: skip
OTHERS = ["window both ways", "prefix", "prefix of each", "documents by cumsum", "triangle above"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 4)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Values, where padding is not, and documents."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, TIME, WIDTH, generator=draw)
    documents = torch.randint(0, 3, (ROWS, TIME), generator=draw).sort(1).values
    return x, torch.rand(ROWS, TIME, generator=draw) > 0.3, documents


class Masked(nn.Module):
    """A stage before the attention."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.attend = nn.Linear(WIDTH, WIDTH), Attending(mask)

    def forward(self, x: Tensor, seen: Tensor, document: Tensor) -> Tensor:
        found: Tensor = self.attend(self.before(x), seen, document)
        return found


@pytest.mark.parametrize("slices", [4, [10, 6, 5, 3]])
@pytest.mark.parametrize("name", CAUSAL)
def test_what_is_causal_is_that_of_one_device(name: str, slices: Any) -> None:
    verified(Masked(MASKS[name][0]), ["pp=2"], None, inputs(), **sliced(slices))


@pytest.mark.parametrize("mesh", ["pp=2,cp=2", "tp=2,pp=2"])
def test_with_other_axes(mesh: str) -> None:
    name = "documents, window and padding"
    verified(Masked(MASKS[name][0]), [mesh], None, inputs(), attention="gather", **sliced([16, 8], recompute="full"))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_causal_is_refused(name: str) -> None:
    with pytest.raises(LayoutError) as found:
        autopar.compile(Masked(MASKS[name][0]), "pp=2", batch=inputs(), **sliced(2))
    text = str(found.value)
    assert "op 'autopar.compared_attention.default'" in text and text.endswith(HINT), text
    assert f"test_compare_masks.py:{line_of(Attending.forward, 'sdpa(')}" in text, text


class Gated(nn.Module):
    """A mask of which the keys' part is computed by a stage: slices keep it beside the keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        own = torch.arange(TIME)[:, None] == torch.arange(TIME)
        mask = causal() & ((x[..., 0] > 0)[:, None, None] | own)
        return sdpa(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2).square().mean()


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,cp=2"])
def test_what_is_known_of_keys_is_kept_with_them(mesh: str) -> None:
    ((_, found),) = verified(Gated(), [mesh], None, inputs()[:1], attention="gather", **sliced([16, 8]))
    kept = {str(node.args[-1]) for node in found.program.calls() if "earlier" in str(node.target)}
    assert kept == {"attention.k", "attention.v", "attention.c1"}


def test_the_work_of_a_window_does_not_grow() -> None:
    for name, grows in (("window", False), ("documents", True)):
        found = autopar.compile(Masked(MASKS[name][0]), "pp=2", batch=inputs(), **sliced(2))
        attends = [node for node in found.program.calls() if "compared_attention" in str(node.target)]
        assert attends and {sees_before(node) for node in attends} == {grows}


# What only the batch tells to be causal, or what no vectors stand for: a mask of (what comes with the batch, dtype).


def seen_by_each() -> Tensor:
    """Causal, with holes, and of each query its own key: [rows, 1, queries, keys]."""
    holes = torch.ones(ROWS, TIME, dtype=torch.bool)
    holes[0, 17:], holes[1, 5:9], holes[2, 1::3] = False, False, False
    return causal() & holes[:, None, None] | torch.eye(TIME, dtype=torch.bool)


def numbers(hidden: float) -> Tensor:
    return torch.zeros(ROWS, 1, TIME, TIME, dtype=torch.float64).masked_fill(~seen_by_each(), hidden)


def positions() -> Tensor:
    """Of documents that are packed into a row, from 0 in each."""
    return torch.cat([torch.arange(10), torch.arange(8), torch.arange(6)]).repeat(ROWS, 1)


def slope(dtype: torch.dtype) -> Tensor:
    place = torch.arange(TIME)
    return (place - place[:, None]).abs() * torch.arange(1, 5, dtype=dtype)[:, None, None] / -10


def before(x: Tensor) -> Tensor:
    return x[:, None, :, None] >= x[:, None, None]


def alike(x: Tensor) -> Tensor:
    return x[:, None, :, None] == x[:, None, None]


GIVEN: dict[str, tuple[Any, Any]] = {
    "bools of each sample": (lambda m, t: m, seen_by_each()),
    "bools of all": (lambda m, t: m, causal()),
    "numbers": (lambda m, t: m.to(t), numbers(-math.inf)),
    "numbers that are finite": (lambda m, t: m.to(t), numbers(torch.finfo(torch.float64).min)),
    "numbers, as bools": (lambda m, t: m > -1, numbers(-math.inf)),
    "positions": (lambda m, t: before(m), torch.arange(TIME).repeat(ROWS, 1)),
    "positions of all": (lambda m, t: m[:, None] >= m, torch.arange(TIME)),
    "packed positions": (lambda m, t: before(m) & alike((m == 0).cumsum(-1)), positions()),
    "a bias": (lambda m, t: slope(t).masked_fill(~causal(), -math.inf), torch.zeros(ROWS)),
    "a bias and numbers": (lambda m, t: slope(t) + m.to(t), numbers(-1e38)),
}


class Given(nn.Module):
    """Attention under a mask made of what comes with the batch, behind a stage."""

    def __init__(self, mask: Any, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.dropout = mask, dropout
        self.before, self.project = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in self.project(self.before(x)).chunk(3, -1))
        found = sdpa(q, k, v, attn_mask=self.mask(given, x.dtype), dropout_p=self.dropout)
        return found.transpose(1, 2).flatten(2).square().mean()


GIVEN_MESHES: dict[str, dict[str, Any]] = {
    "pp=2": sliced([10, 6, 5, 3]),
    "dp=2,pp=2": sliced(2, zero=3, recompute="full"),
    "pp=2,tp=2": sliced([16, 8], schedule="gpipe"),
    "pp=2,cp=2": sliced(2, attention="gather"),
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("name", "meshes"), list(in_turns(GIVEN, list(GIVEN_MESHES), every=4)))
def test_what_the_batch_tells_is_that_of_one_device(name: str, meshes: tuple[str, ...], dropout: float) -> None:
    mask, given = GIVEN[name]
    for mesh in meshes:
        verified(Given(mask, dropout), [mesh], None, (inputs()[0], given), **GIVEN_MESHES[mesh])


def test_what_is_known_to_be_causal_is_not_checked() -> None:
    """Dropout keeps a mask a tensor; a bias hangs on no input."""
    for name, mask, given in (
        ("padding", lambda m, t: causal() & m, seen_by_each()[:, :, -1:]),
        ("a bias", *GIVEN["a bias"]),
    ):
        found = autopar.compile(Given(mask, 0.3), "pp=2", batch=(inputs()[0], given), **sliced(2))
        assert not [node for node in found.program.calls() if "checked_causal" in str(node.target)], name


def changed(x: Tensor, *at: int, to: Any) -> Tensor:
    """One element is another."""
    return x.index_put(tuple(map(torch.tensor, at)), torch.tensor(to))


# What shows a query a later key: in which sample of a micro-batch, the query and the key that are named.
LATER: dict[str, tuple[Any, Any, tuple[int, int, int]]] = {
    "bools": (GIVEN["bools of each sample"][0], changed(seen_by_each(), 1, 0, 2, 3, to=True), (1, 2, 3)),
    "a later slice": (GIVEN["bools of all"][0], changed(causal(), 13, 20, to=True), (0, 13, 20)),
    "nothing seen": (GIVEN["numbers"][0], numbers(-1e38).index_fill(2, torch.tensor(4), -1e38), (0, 4, 5)),
    "positions": (GIVEN["positions"][0], positions(), (0, 0, 10)),
    "one sample": (GIVEN["positions"][0], changed(torch.arange(TIME).repeat(ROWS, 1), 1, 9, to=2), (1, 2, 9)),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_key_is_an_error(name: str) -> None:
    mask, given, (sample, query, key) = LATER[name]
    with pytest.raises(BatchError) as found:
        autopar.verify(Given(mask).double(), "pp=2", batch=(inputs()[0].double(), given), **sliced([12, 12]))
    said = (
        f"in sample {sample} of those here the mask lets the query at position {query} see the key at position {key}, "
        "but slices compute a sequence in order, so that what lies behind is not there. Give a causal mask, or "
        "slices=1.\n  In %checked = autopar.checked_causal"
    )
    assert str(found.value).startswith(said) and "test_sliced_masks.py:" in str(found.value), found.value
