"""Masks that compare vectors over queries and keys: which are known, and that a step is that of one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import in_turns, share
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.compiled import Compiled
from autopar.ir.program import record
from autopar.passes.masks import mask_values
from autopar.runtime.attention import compared_blocks

ROWS, TIME, WIDTH = 4, 24, 32
LEAST = -3e38
sdpa = F.scaled_dot_product_attention


class Attending(nn.Module):
    """One attention with the mask that `mask` makes of the inputs, between projections."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask, self.project, self.out = mask, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.project(x).split((WIDTH, WIDTH // 2, WIDTH // 2), -1)
        q, k, v = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (q, k, v))
        found = sdpa(q, k, v, attn_mask=self.mask(seen, document, x.dtype), enable_gqa=True)
        return self.out(found.transpose(1, 2).flatten(2)).square().mean()


def places() -> Tensor:
    return torch.arange(TIME)


def causal() -> Tensor:
    return places()[:, None] >= places()[None]


def additive(seen: Tensor, dtype: torch.dtype, hidden: float = -math.inf) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, hidden)


def looked_up(x: Tensor, of_keys: int) -> Tensor:
    """What is known of each query or key, by the numbers of samples and positions."""
    return x[torch.arange(ROWS)[:, None, None, None], places() if of_keys else places()[:, None]]


# Each with the condition that it is known by, and whether the op is causal.
MASKS: dict[str, tuple[Any, str, bool]] = {
    "window": (lambda s, d, t: causal() & (places()[:, None] - places() < 5), "c0<=r0 & c0>=r1", False),
    "window both ways": (lambda s, d, t: (places() - places()[:, None]).abs() <= 3, "c0<=r0 & c0>=r1", False),
    "chunks": (lambda s, d, t: causal() & ((places() // 8)[:, None] == places() // 8), "c0<=r0 & c1==r1", False),
    "prefix": (lambda s, d, t: causal() | (places() < 7), "c0<=r0 | c1", False),
    "prefix of each": (lambda s, d, t: causal() | (d == 0)[:, None, None], "c0<=r0 | c1", False),
    "padding": (lambda s, d, t: causal() & s[:, None, None], "c0", True),
    "padding of both": (lambda s, d, t: causal() & s[:, None, None] & s[:, None, :, None], "c0 & r0", True),
    "documents": (lambda s, d, t: causal() & (d[:, None, :, None] == d[:, None, None]), "c0==r0", True),
    "documents by cumsum": (
        lambda s, d, t: (d.diff(prepend=d[:, :1]).cumsum(1)[:, None, :, None] == d.diff(prepend=d[:, :1]).cumsum(1)[
            :, None, None
        ]),
        "c0==r0", False,
    ),
    "documents, window and padding": (
        lambda s, d, t: causal() & ~(places()[:, None] - places() >= 6) & (d[:, None, :, None] == d[:, None, None])
        & s[:, None, None],
        "c0<=r0 & c0>r1 & c1==r2 & c2", False,
    ),
    "places of each": (
        lambda s, d, t: ((p := places().repeat(ROWS, 1))[:, None, :, None] >= p[:, None, None]) & s[:, None, None],
        "c0", True,
    ),
    "places as floats": (
        lambda s, d, t: (places().to(t)[:, None] >= places().to(t)) & s[:, None, None], "c0", True,
    ),
    "row by row": (lambda s, d, t: torch.stack([places() <= i for i in range(TIME)]) & s[:, None, None], "c0", True),
    "a band by numbers": (
        lambda s, d, t: (torch.ones(TIME, TIME).tril() - torch.ones(TIME, TIME).tril(-5)).cumsum(0).cumsum(1).diff(
            dim=0, prepend=torch.zeros(1, TIME)
        ).diff(dim=1, prepend=torch.zeros(TIME, 1)) > 0.5,
        "c0>=r0 & c0<=r1", False,
    ),
    "documents of one": (
        lambda s, d, t: causal() & ((n := torch.zeros(ROWS, TIME).long())[:, None, :, None] == n[:, None, None]) & s[
            :, None, None
        ],
        "c0", True,
    ),
    "looked up": (
        lambda s, d, t: (looked_up(places().expand(ROWS, -1), 1) <= looked_up(places().expand(ROWS, -1), 0)) & (
            looked_up(d, 1) == looked_up(d, 0)
        ),
        "c0==r0", True,
    ),
    "triangle": (lambda s, d, t: torch.ones(TIME, TIME, dtype=torch.bool).tril(-2), "c0<=r0", False),
    "triangle above": (lambda s, d, t: ~torch.ones(TIME, TIME).triu(3).bool() & s[:, None, None], "c0<=r0 & c1", False),
    "added": (lambda s, d, t: additive(causal(), t) + additive(s, t)[:, None, None], "~c0", True),
    "added triangle": (
        lambda s, d, t: torch.full((TIME, TIME), -math.inf, dtype=t).triu(1) + additive(s, t)[:, None, None],
        "~c0", True,
    ),
    "added finite": (
        lambda s, d, t: additive(causal() & (d[:, None, :, None] == d[:, None, None]), t, torch.finfo(t).min),
        "c0==r0", True,
    ),
    "chosen": (lambda s, d, t: torch.where(causal() & s[:, None, None], 0.0, -math.inf).to(t), "c0", True),
    "turned": (lambda s, d, t: (places()[:, None] <= places()).mT & s[:, None, None], "c0", True),
    "hidden": (lambda s, d, t: ~((places()[:, None] < places()) | ~s[:, None, None]), "~c0", True),
    "of numbers": (
        lambda s, d, t: (torch.ones(TIME, TIME).tril() * s[:, None, None].float()) == 1, "c0", True
    ),
}  # fmt: skip


def batch() -> tuple[Tensor, ...]:
    """Padding on either side, so that rows see nothing; documents that end elsewhere in each row."""
    torch.manual_seed(0)
    seen = torch.ones(ROWS, TIME, dtype=torch.bool)
    seen[0, 17:], seen[1, :5], seen[2, ::3] = False, False, False
    document = torch.randint(4, (ROWS, TIME)).sort().values
    return torch.randn(ROWS, TIME, WIDTH), seen, document


def attentions(found: Compiled) -> list[Any]:
    return [node for node in found.program.calls() if "attention.default" in str(node.target)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are blocks of every kind."""
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 4)


MESHES = ("cp=2", "cp=4", "cp=2,tp=2", "dp=2,cp=2")


@pytest.mark.parametrize(("name", "meshes"), list(in_turns(MASKS, MESHES)))
def test_a_mask_is_known_and_a_step_that_of_one_device(name: str, meshes: tuple[str, ...]) -> None:
    mask, condition, is_causal = MASKS[name]
    for _, found in verified(Attending(mask), meshes, None, batch(), attention="gather"):
        (node,) = attentions(found)
        assert str(node.target) == "autopar.compared_attention.default"
        assert node.args[5:7] == (condition, is_causal)
        assert str(record(node).layouts[0].dims[2]) == ("(-2, 'cp')" if is_causal else "('cp',)")
        assert not _is_square(found)


# What shows a mask as it is, or two dims of it as one.
SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda mask: mask[None][0],
    "slice": lambda mask: mask[:, :, :, :TIME],
    "stack": lambda mask: torch.stack([~mask, mask])[1],
    "stack of another dim": lambda mask: torch.stack([mask, ~mask], -1)[..., 0],
    "squeezed": lambda mask: mask.unsqueeze(0).squeeze(),
    "reshaped": lambda mask: mask.reshape(ROWS, TIME, TIME).view(ROWS, 1, TIME, TIME),
    "turned twice": lambda mask: mask.mT.movedim(-1, -2),
    "joined": lambda mask: mask.flatten(2).unflatten(2, (TIME, TIME)),
    "joined, and something done to that": lambda mask: (~(~mask.flatten(2)).unsqueeze(1)).unflatten(3, (TIME, TIME))[
        :, 0
    ],
    "expanded": lambda mask: mask.expand(ROWS, 4, TIME, TIME),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_mask_is_known_through_every_view(name: str) -> None:
    mask, condition, is_causal = MASKS["documents"]
    shown = SHOWN[name]
    found = autopar.compile(Attending(lambda *args: shown(mask(*args))), "cp=2", batch=batch(), attention="gather")
    (node,) = attentions(found)
    assert node.args[5:7] == (condition, is_causal) and not _is_square(found)


def _is_square(found: Compiled) -> bool:
    """Whether the program holds a value of [.., queries, keys]."""
    types = (type_ for node in found.program.calls() for type_ in record(node).types if type_)
    return any(type_.shape[-2:] == (TIME, TIME) for type_ in types)


# What stays a tensor


def _kept(mask: Any) -> None:
    for _, found in verified(Attending(mask), ("cp=2",), None, batch()):
        (node,) = attentions(found)
        assert str(node.target) == "autopar.attention.default" and node.args[3] is not None


UNKNOWN: dict[str, Any] = {
    "a finite number, which would hide nothing if a row saw nothing": lambda s, d, t: additive(
        causal() & (d >= 0)[:, None, None], t, torch.finfo(t).min
    ),
    "a finite number, and a query whose only key is hidden": lambda s, d, t: additive(causal(), t, LEAST).masked_fill(
        places() == 0, LEAST
    ),
    "a small number": lambda s, d, t: additive(causal(), t, -1e4),
    "a bias of the distance": lambda s, d, t: (places() - places()[:, None]).to(t) * 0.1,
    "of a product": lambda s, d, t: (s.to(t)[:, :, None] @ s.to(t)[:, None] > 0)[:, None] & causal(),
    "sums": lambda s, d, t: places()[:, None] + places() < 30,
    "joined from dims of other lengths": lambda s, d, t: (
        ~(torch.arange(TIME // 2)[:, None] > torch.arange(2 * TIME)).flatten()
    ).unflatten(0, (TIME, TIME)),
    "of the keys alone": lambda s, d, t: s[:, None, None],
    "of each sample": lambda s, d, t: causal().expand(ROWS, 1, TIME, TIME).cumsum(0) > 1,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_masks_stay_tensors(name: str) -> None:
    _kept(UNKNOWN[name])


class Crossing(nn.Module):
    """Queries and keys of two lengths, and a mask of positions alone that hides by a finite number."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask, self.project = mask, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k = (self.project(one).unflatten(-1, (4, -1)).transpose(1, 2) for one in (x, y))
        places = torch.arange(x.shape[1])[:, None], torch.arange(y.shape[1])
        return sdpa(q, k, k, attn_mask=additive(self.mask(*places), x.dtype, LEAST)).square().mean()


CROSSED: dict[str, Any] = {
    "from the own on": lambda row, column: column >= row,
    "known vectors": lambda row, column: (column <= row) | ((column % 3 < 2) & (row % 2 < 1)),
}


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.parametrize(("queries", "keys"), [(8, 24), (24, 8)])
def test_a_query_without_a_key_of_its_own_may_see_nothing(name: str, queries: int, keys: int) -> None:
    """A finite number is known to hide where each query sees the key of its own position."""
    given = torch.randn(ROWS, queries, WIDTH), torch.randn(ROWS, keys, WIDTH)
    for _, found in verified(Crossing(CROSSED[name]), ("cp=2",), None, given, steps=1):
        (node,) = attentions(found)
        assert ("compared" in str(node.target)) is (queries < keys)


@pytest.mark.parametrize(
    ("steps", "is_known"), [((0, -5), True), ((TIME - 2, 1 - TIME), True), ((0, -5, -10), False)], ids=str
)
def test_numbers_are_looked_for_where_they_are_few(steps: tuple[int, ...], is_known: bool) -> None:
    """Steps down at diagonals, be it a corner: of what no rule follows, a few numbers are told by their places."""

    def mask(s: Tensor, d: Tensor, t: Tensor) -> Tensor:
        down = torch.stack([torch.ones(1, 1, TIME, TIME).tril(step) for step in steps]).sum(0)
        return down.cumsum(2).diff(dim=2, prepend=torch.zeros(1, 1, 1, TIME)) * s[:, None, None] == 1

    found = autopar.compile(Attending(mask), "cp=2", batch=batch(), attention="gather")
    (node,) = attentions(found)
    assert isinstance(node.args[3], list) is is_known and _is_square(found) is not is_known


def test_a_mask_that_is_causal_alone_is_none() -> None:
    """As transformers makes one for a model without padding."""
    mask = lambda s, d, t: causal()[None, None].expand(ROWS, 1, TIME, TIME)  # noqa: E731
    for _, found in verified(Attending(mask), ("cp=2", "cp=4"), None, batch(), attention="gather"):
        (node,) = attentions(found)
        assert node.args[3:5] == (None, True) and str(record(node).layouts[0]) == "[-,-,2~cp,-]"


def test_a_mask_of_which_rows_hide_nothing_is_that_of_its_columns() -> None:
    """As transformers makes one for a bidirectional model with padding."""
    mask = lambda s, d, t: (places()[:, None] >= 0) & s[:, None, None]  # noqa: E731
    for _, found in verified(Attending(mask), ("cp=2",), None, batch()):
        (node,) = attentions(found)
        assert str(node.target) == "autopar.attention.default"
        assert record(node.args[3]).type.shape == (ROWS, 1, 1, TIME)


# With everything else

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "three": ("cp=3", {}),
    "heads": ("cp=2", {"attention": "ulysses"}),
    "hybrid": ("cp=2,ulysses=2", {}),
    "sequence parallel": ("cp=2,tp=2", {"sequence_parallel": True}),
    "pipeline": ("cp=2,pp=2", {"microbatches": 2}),
    "micro-batches": ("dp=2,cp=2", {"microbatches": 2}),
    "zero": ("dp=2,cp=2", {"zero": 3}),
    "recompute": ("cp=2", {"recompute": "full"}),
    "no cp": ("dp=2,tp=2", {}),
}
KINDS = ("window", "padding of both", "documents, window and padding", "documents", "prefix of each", "chunks", "added")


class Stack(nn.Module):
    """Three layers, of which the first two share a mask."""

    def __init__(self, *masks: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(mask) for mask in masks)

    def forward(self, x: Tensor, seen: Tensor, document: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, layer.mask(seen, document, x.dtype))
        return x.square().mean()


class _Layer(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask, self.project, self.out = mask, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return x + self.out(sdpa(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("name", "kinds"), list(share(3, OPTIONS, (KINDS[:3], KINDS[3:5], KINDS[5:]))), ids=str)
def test_with_the_other_options(name: str, kinds: tuple[str, ...]) -> None:
    mesh, options = OPTIONS[name]
    torch.manual_seed(0)
    model = Stack(*(MASKS[kind][0] for kind in (kinds[0], *kinds)))
    ((_, found),) = verified(model, (mesh,), None, batch(), **options)
    assert not _is_square(found)


def test_dropout_keeps_the_tensor() -> None:
    class Dropped(Attending):
        def forward(self, x: Tensor, seen: Tensor, document: Tensor) -> Tensor:
            q = x.unflatten(-1, (4, -1)).transpose(1, 2)
            mask = self.mask(seen, document, x.dtype)
            return self.out(sdpa(q, q, q, attn_mask=mask, dropout_p=0.3).transpose(1, 2).flatten(2)).square().mean()

    for _, found in verified(Dropped(MASKS["window"][0]), ("cp=2",), None, batch()):
        (node,) = attentions(found)
        assert str(node.target) == "autopar.dropped_attention.default" and node.args[3] is not None


def test_short_floats_compute_the_products() -> None:
    found = autopar.compile(Attending(MASKS["documents"][0]), "cp=2", batch=batch(), precision="bf16")
    (node,) = attentions(found)
    assert [record(one).type.dtype for one in node.args[:3]] == [torch.bfloat16] * 3
    assert [record(one).type.dtype for one in (*node.args[3], *node.args[4])] == [torch.int64] * 2


def test_the_memory_grows_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the estimator: what a longer sequence needs more is in proportion; the same mask as a tensor is not."""
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 256)
    monkeypatch.setitem(globals(), "TIME", 0)

    def peak(time: int, hidden: float) -> int:
        globals()["TIME"] = time
        mask = lambda s, d, t: additive(MASKS["window"][0](s, d, t), t, hidden)  # noqa: E731
        shape = torch.zeros(2, time, dtype=torch.bool)
        found = autopar.compile(Attending(mask), "cp=2", batch=(torch.zeros(2, time, WIDTH), shape, shape.long()))
        return found.memory().peak

    known, tensor = ([peak(time, hidden) for time in (2048, 4096, 8192)] for hidden in (-math.inf, -1e4))
    assert known[2] - known[1] <= 2.05 * (known[1] - known[0])
    assert tensor[2] - tensor[1] >= 3.9 * (tensor[1] - tensor[0]) and tensor[2] > 4 * known[2]


# What is wrong is seen


def test_a_wrong_comparison_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = mask_values._TURNED
    monkeypatch.setattr(mask_values, "_TURNED", honest | {">=": "<"})
    report = autopar.verify(Attending(MASKS["window"][0]), "cp=2", batch=batch())
    assert not report.ok and "attention" in str(report.mismatch)


def test_a_block_that_is_skipped_and_seen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = compared_blocks.bounds

    def wrong(*args: Any) -> Any:
        surely, possibly = honest(*args)
        return surely, possibly & (surely | (torch.arange(surely.shape[-1]) > 0))

    monkeypatch.setattr(compared_blocks, "bounds", wrong)
    report = autopar.verify(Attending(MASKS["documents"][0]), "cp=2", batch=batch())
    assert not report.ok and "attention" in str(report.mismatch)
