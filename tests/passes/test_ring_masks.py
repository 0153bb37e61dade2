"""Rings under masks that compare queries with keys: which keys are seen is known to each rank, and what nobody sees is
not computed."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import Ranks
from test_context import ROWS, TIME, WIDTH, Attending, sdpa
from test_mask_models import Packed, Padded, loss, made, seen, tokens
from torch import Tensor
from verified import Once, verified

import autopar
from autopar.compiled import Compiled
from autopar.ir.ops.ring_ops import RING_COMPARED, RING_COMPARED_BACKWARD, is_ring
from autopar.runtime.attention import attention_compared, compared_blocks, ring_kernels
from autopar.torch_compat import has_cpp_compiler

needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="Inductor needs a C++ compiler (apt install g++)")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared_blocks, "_SIZE_CPU", 4)


def conditions(found: Compiled) -> list[tuple[str, bool]]:
    """The condition of each ring of the forward pass, and whether it is causal; all attention goes round."""
    assert not [note for note in found.notes if "'ring'" in note], found.notes
    rings = [node for node in found.program.calls() if is_ring(node.target)]
    assert {node.target for node in rings} == {RING_COMPARED, RING_COMPARED_BACKWARD}
    return [(str(node.args[5]), bool(node.args[9])) for node in rings if node.target is RING_COMPARED]


MODELS: dict[str, tuple[dict[str, Any], tuple[str, bool]]] = {
    "llama": ({}, ("c0", True)),
    "mistral": ({"sliding_window": 5}, ("c0>=r0 & c0<=r1 & c1", False)),
    "llama4": (
        {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}, ("c0==r0 & c1", True)
    ),
    "bert": ({}, ("c0", False)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_windows_chunks_and_padding_of_transformers(name: str) -> None:
    sizes, wanted = MODELS[name]
    if name == "bert":
        sizes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    for _, found in verified(
        made(name, **sizes), ("cp=2", "cp=4", "cp=2,tp=2"), loss, (tokens(), seen()), attention="ring"
    ):
        assert conditions(found) == [wanted] * 2


def test_documents_and_windows_of_a_plain_gpt() -> None:
    torch.manual_seed(0)
    step = lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.roll(-1, 1).flatten())  # noqa: E731
    x = tokens()
    x[0, 3] = x[0, 11] = x[1, 17] = x[3, 1] = 1
    once = Once.of(Packed(9), step, (x,))
    for mesh in ("cp=2", "cp=4", "dp=2,cp=3"):
        _, found = once.right(mesh, attention="ring")
        assert all("==" in condition for condition, _ in conditions(found))
    once.right("cp=2,pp=2", microbatches=2, attention="ring")


def test_torch_layers_with_a_triangle_and_padding() -> None:
    torch.manual_seed(0)
    pads = seen() == 0
    pads[1, :7] = False  # a row that sees nothing is NaN in nn.MultiheadAttention
    step = lambda m, x, pads: F.cross_entropy(m(x, pads).flatten(0, 1), x.masked_fill(pads, -100).flatten())  # noqa: E731
    for _, found in verified(Padded(), ("cp=2", "cp=4"), step, (tokens(), pads), attention="ring"):
        assert conditions(found) == [("~c0", True)] * 2


places = torch.arange(TIME)
KINDS: dict[str, Any] = {
    "prefix": lambda m, q, k, v, seen, other: sdpa(q, k, v, attn_mask=(places[:, None] >= places) | (places < 7)),
    "both sides": lambda m, q, k, v, seen, other: sdpa(q, k, v, attn_mask=(places[:, None] - places).abs() <= 4),
    "queries and keys": lambda m, q, k, v, seen, other: sdpa(
        q, k, v, attn_mask=seen[:, None, :, None] & seen[:, None, None]
    ),
    "cross": lambda m, q, k, v, seen, other: sdpa(
        q, *[m.out(other).unflatten(-1, (4, -1)).transpose(1, 2)] * 2, attn_mask=seen[:, None, None, ::2]
    ),
    "a head each": lambda m, q, k, v, seen, other: sdpa(
        q, k, v, attn_mask=(places[:, None] - places)[None] < torch.tensor([3, 5, 24, 1])[:, None, None]
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_masks(kind: str) -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, TIME, WIDTH), torch.rand(ROWS, TIME) < 0.7, torch.randn(ROWS, TIME // 2, WIDTH)
    batch[1][2] = False  # a row of the batch that sees nothing at all
    for _, found in verified(Attending(KINDS[kind]), ["cp=2", "cp=4"], None, batch, attention="ring"):
        if kind != "a head each":
            conditions(found)


@functools.cache
def windowed(width: int) -> Once:
    return Once.of(made("mistral", sliding_window=width), loss, (tokens(), seen()))


def test_recompute_and_micro_batches() -> None:
    for options in ({"recompute": "full"}, {"microbatches": 2}, {"sequence_parallel": True}):
        mesh = "cp=2,tp=2" if "sequence_parallel" in options else "cp=2"
        _, found = windowed(5).right(mesh, attention="ring", **options)
        assert set(conditions(found)) == {("c0>=r0 & c0<=r1 & c1", False)}


def test_bytes_are_those_of_a_ring_without_a_mask() -> None:
    """The vectors of the keys are on every rank: keys and values alone go round."""
    n = 4
    ((_, found),) = verified(made("llama"), [f"cp={n}"], loss, (tokens(), seen()), attention="ring")
    kv = 2 * ROWS * 4 * TIME * 8 * 8  # transformers repeats key heads under a mask: 4 of 8 wide, in float64
    rows = [row for row in found.collectives if row.op == "shift"]
    assert sum(row.times for row in rows) == 2 * (n - 1) * 3
    assert sum(row.bytes * row.times for row in rows) == 2 * (n - 1) * kv * 3 // n
    assert not [row for row in found.collectives if row.op == "all_gather" and row.bytes > ROWS * TIME * 8]


def _seen_back(condition: Any) -> Any:
    """Attention to keys before the query of which a condition of positions holds; computed in the model."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        key = torch.arange(TIME)
        query = key[:, None]
        return sdpa(q, k, v, attn_mask=(query >= key) & condition(query, key))

    return attend


HOPS: dict[str, tuple[Any, int]] = {  # of pieces of 6
    "one piece and a key": (lambda query, key: query - key < 7, 1),
    "two keys more": (lambda query, key: query - key < 9, 2),
    "nearly all": (lambda query, key: query - key < 20, 3),
    "its own key": (lambda query, key: query - key < 1, 0),
    "without the own key": (lambda query, key: (query - key < 7) & (query > key), 1),
    "chunks of four": (lambda query, key: query // 4 == key // 4, 1),
    "chunks of eight": (lambda query, key: query // 8 == key // 8, 2),
    "or the first keys": (lambda query, key: (query - key < 3) | (key < 2), 3),
}


@pytest.mark.parametrize("kind", HOPS)
def test_keys_go_no_farther_than_a_window_is_wide(kind: str) -> None:
    """And their gradients come home from there in one message."""
    torch.manual_seed(0)
    condition, hops = HOPS[kind]
    batch = torch.randn(ROWS, TIME, WIDTH), torch.rand(ROWS, TIME) < 0.7, torch.randn(ROWS, TIME // 2, WIDTH)
    ((_, found),) = verified(Attending(_seen_back(condition)), ["cp=4"], None, batch, attention="ring")
    assert len([node for node in found.program.calls() if is_ring(node.target)]) == 2, found.notes
    assert [row.times for row in found.collectives if row.op == "shift"] == [hops] * (3 if hops else 0)


def test_a_window_of_transformers() -> None:
    for width, hops in ((5, 1), (8, 2)):
        _, found = windowed(width).right("cp=4", attention="ring")
        assert {row.times for row in found.collectives if row.op == "shift"} == {hops}


def test_mirrored_pieces_go_all_the_way_round() -> None:
    """A layer with a window beside one without: of mirrored pieces those beside one lie on both sides."""
    model = made("gemma3", sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    ((_, found),) = verified(model, ["cp=4"], loss, (tokens(), seen()), attention="ring")
    mirrored = [node for node in found.program.calls() if is_ring(node.target) and -2 in node.args]
    rows = [row for row in found.collectives if row.op == "shift"]
    assert {row.times for row in rows} == ({3} if mirrored else {1, 3})


def test_what_nobody_sees_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 4 over pieces of 6 in order: each query of a rank meets its own piece and the end of the one before,
    in blocks of at most 4 queries and keys."""
    pairs = [0]

    def count(q: Tensor, k: Tensor, *rest: Any) -> Any:
        pairs[0] += q.shape[0] * q.shape[2] * k.shape[2]
        return attention(q, k, *rest)

    attention = attention_compared.attention
    monkeypatch.setattr(attention_compared, "attention", count)
    given = Once.of(made("mistral", sliding_window=4), loss, (tokens(), seen() | 1))
    given.right("cp=4", attention="ring", steps=1)
    of_ring, pairs[0] = pairs[0], 0
    given.right("cp=4", attention="gather", steps=1)
    assert 0 < of_ring <= 1.1 * pairs[0] < 0.6 * 2 * ROWS * TIME * TIME


def _trained(rank: int, compiler: str) -> float:
    """The greatest difference of a gradient from that of the plain step. Under Inductor a block is an op."""
    torch.manual_seed(0)
    plain, x = Packed(9), tokens()
    x[0, 3] = x[0, 11] = x[1, 17] = 1
    step = lambda m, x: F.cross_entropy(m(x).flatten(0, 1), x.roll(-1, 1).flatten())  # noqa: E731
    step(plain, x).backward()
    mesh = "cp=2" if compiler == "inductor" else "cp=4"  # where keys of 6 positions go on twice
    model = autopar.parallelize(copy.deepcopy(plain), mesh, loss_fn=step, attention="ring", compile=compiler)
    model.forward_backward(x)
    assert compiler == "executor" or "compared_attention_backward" in str(model.generated_code)
    found = model.full_gradients().items()  # on rank 0
    return max(((grad - plain.get_parameter(name).grad).abs().max().item() for name, grad in found), default=0.0)


@pytest.mark.gloo
def test_four_processes(four: Ranks) -> None:
    assert 0 < max(four.run(_trained, "executor", timeout=200)) < 1e-5


@pytest.mark.slow
@needs_compiler
@pytest.mark.gloo
def test_two_processes_compiled(two: Ranks) -> None:
    assert 0 < max(two.run(_trained, "inductor", timeout=400)) < 1e-5


def test_vectors_of_another_piece_are_found_at_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break it: the vectors of the rank before the one whose keys have come."""
    vectors = ring_kernels._vectors
    monkeypatch.setattr(
        ring_kernels,
        "_vectors",
        lambda rows, columns, ring, count, at, block: vectors(rows, columns, ring, count, (at - 1) % ring.size, block),
    )
    with pytest.raises(AssertionError, match="ring_compared_attention"):
        windowed(5).right("cp=2", attention="ring")
