"""Context parallelism: the sequence is split; keys and values are gathered, or heads split instead."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Llama, token_loss
from refusals import refused
from torch import Tensor, nn
from verified import Once, verified

import autopar
from autopar.compiled import Compiled
from autopar.errors import LayoutError, MeshError
from autopar.ir.program import record
from autopar.runtime.attention import attention_whole
from autopar.runtime.attention.attention_kernels import AttentionKernel
from autopar.runtime.attention.attention_plain import plain
from autopar.runtime.attention.blocks import AttentionCall
from autopar.runtime.collectives import mesh_ops

ROWS, TIME, WIDTH, VOCABULARY = 4, 24, 32, 40


def llama(heads: int = 4, kv_heads: int = 2, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Llama(layers, WIDTH, heads, kv_heads, 48, VOCABULARY, TIME)


def tokens() -> tuple[Tensor, Tensor]:
    """Ignored labels lie unevenly over rows and positions."""
    x, y = torch.randint(VOCABULARY, (2, ROWS, TIME), generator=torch.Generator().manual_seed(1))
    y[0, 3:9], y[2, :20] = -100, -100
    return x, y


def compiled(mesh: str, *, heads: int = 4, kv_heads: int = 2, **options: Any) -> Compiled:
    return autopar.compile(llama(heads, kv_heads), mesh, loss_fn=token_loss, batch=tokens(), **options)


def layouts_of(found: Compiled, op: str) -> set[str]:
    return {
        str(record(node).layouts[0]) for node in found.program.calls() if str(node.target) == f"autopar.{op}.default"
    }


MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "cp": ("cp=2", {}),
    "three": ("cp=3", {}),
    "four, gathered": ("cp=4", {"attention": "gather"}),
    "heads": ("cp=2", {"attention": "ulysses"}),
    "hybrid": ("cp=2,ulysses=2", {}),
    "dp": ("dp=2,cp=3", {}),
    "tp": ("dp=2,cp=2,tp=2", {}),
    "heads of tp": ("cp=2,tp=2", {"attention": "ulysses"}),
    "sequence parallel": ("cp=2,tp=2", {"sequence_parallel": True}),
    "pipeline": ("cp=2,pp=2", {"microbatches": 2}),
    "pipeline of heads": ("ulysses=2,tp=2,pp=2", {"microbatches": 4, "schedule": "zb-h1"}),
    "zero": ("dp=2,cp=2", {"zero": 3}),
    "fsdp": ("fsdp=2,cp=2", {"zero": 2, "microbatches": 2}),
    "zero of saved keys": ("cp=2,ulysses=2", {"zero": 1, "microbatches": 2}),
    "recompute": ("cp=4", {"recompute": "full"}),
}


@functools.cache
def once(heads: int) -> Once:
    return Once.of(llama(heads, heads // 2), token_loss, tokens())


@pytest.mark.parametrize("name", MATRIX)
def test_a_step_is_that_of_one_device(name: str) -> None:
    mesh, options = MATRIX[name]
    heads = 8 if "ulysses" in mesh or options.get("attention") == "ulysses" else 4
    once(heads).right(mesh, **options)


class Attending(nn.Module):
    """One attention of the kind that `attend` is, between projections."""

    def __init__(self, attend: Any, times: int = 1) -> None:
        super().__init__()
        self.attend, self.project, self.out = attend, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(4, TIME, TIME))
        self.multihead = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor, seen: Tensor, other: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return self.out(self.attend(self, q, k, v, seen, other).transpose(1, 2).flatten(2)).square().mean()


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT / 3 + mask).softmax(-1) @ v


def _causal() -> Tensor:
    return torch.full((TIME, TIME), -torch.inf).triu(1)


def _window() -> Tensor:
    """Of five positions; rows of another shape than columns, so that a mask taken the wrong way round is seen."""
    places = torch.arange(TIME)
    return (places[:, None] >= places) & (places[:, None] - places < 5)


sdpa = F.scaled_dot_product_attention
KINDS: dict[str, Any] = {
    "causal": lambda m, q, k, v, seen, other: sdpa(q, k, v, is_causal=True),
    "all": lambda m, q, k, v, seen, other: sdpa(q, k, v),
    "dropout": lambda m, q, k, v, seen, other: sdpa(q, k, v, dropout_p=0.2, is_causal=True),
    "dropout of all": lambda m, q, k, v, seen, other: sdpa(q, k, v, dropout_p=0.2),
    "padding": lambda m, q, k, v, seen, other: sdpa(q, k, v, attn_mask=seen[:, None, None]),
    "padding and window": lambda m, q, k, v, seen, other: sdpa(q, k, v, attn_mask=_window() & seen[:, None, None]),
    "rows that see nothing": lambda m, q, k, v, seen, other: sdpa(
        q, k, v, attn_mask=seen[:, None, :, None] & _window()
    ),
    "trained bias": lambda m, q, k, v, seen, other: _eager(q, k, v, m.bias),
    "spelled out": lambda m, q, k, v, seen, other: _eager(q, k, v, _causal()),
    "cross": lambda m, q, k, v, seen, other: sdpa(q, *[m.out(other).unflatten(-1, (4, -1)).transpose(1, 2)] * 2),
    "multihead": lambda m, q, k, v, seen, other: (
        m.multihead(*[q.transpose(1, 2).flatten(2)] * 3, attn_mask=_causal(), is_causal=True)[0]
        .unflatten(-1, (4, -1)).transpose(1, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ["gather", "ulysses"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention(kind: str, way: str) -> None:
    torch.manual_seed(0)
    seen = torch.rand(ROWS, TIME) < 0.7
    batch = torch.randn(ROWS, TIME, WIDTH), seen, torch.randn(ROWS, TIME // 2, WIDTH)
    for _, found in verified(Attending(KINDS[kind]), ["cp=2", "cp=2,tp=2"], None, batch, attention=way):
        assert not [note for note in found.notes if "'cp'" in note], found.notes


def test_causal_pieces_are_mirrored_and_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of n computes the same pairs of a query and a key: (2 n - 1) w^2 + w (w + 1), w = S / 2n, and each
    call of a kernel those of one run alone: no pair twice, none that is masked away but above a diagonal."""
    pairs: dict[int, list[int]] = {}
    for n in (2, 3, 4):
        found = compiled(f"cp={n}", attention="gather")
        assert layouts_of(found, "attention") == {"[-,-,2~cp,-]"}
        w = TIME // (2 * n)
        for rank in range(n):
            starts = (rank * w, (2 * n - 1 - rank) * w)
            pairs[rank] = []

            def count(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, rank: int = rank) -> Any:
                s, t = q.shape[2], k.shape[2]
                pairs[rank].append(s * (s + 1) // 2 if call.causal else s * t)
                return plain(q, k, v, call)

            q, k = torch.randn(1, 1, 2 * w, 4), torch.randn(1, 1, TIME, 4)
            kernel = AttentionKernel("counts", lambda _: True, count, count)
            monkeypatch.setattr(attention_whole, "kernel_for", lambda *_, kernel=kernel: kernel)
            attention_whole.attention(q, k, k, None, True, 1.0, starts=starts)
            assert sum(pairs[rank]) == (2 * n - 1) * w**2 + w * (w + 1)
        assert sum(map(sum, pairs.values())) == TIME * (TIME + 1) // 2


def test_the_pieces_of_a_rank_begin_where_the_layout_says() -> None:
    """The positions that the program gives its kernel, rank by rank."""
    n = 3
    found = compiled(f"cp={n}", attention="gather")
    node = next(node for node in found.program.calls() if str(node.target) == "autopar.attention.default")
    for rank in range(n):
        value = functools.partial(_number, rank=rank)
        assert [value(start) for start in node.kwargs["starts"]] == [rank * 4, (2 * n - 1 - rank) * 4]


def _number(node: Any, rank: int) -> int:
    if isinstance(node, int):
        return node
    if str(node.target) == "autopar.coord.default":
        return rank
    return int(node.target(*(_number(arg, rank) for arg in node.args)))


def moved(found: Compiled, op: str, phase: str) -> int:
    return sum(one.bytes for one in found.collectives if one.op == op and one.axis == "cp" and one.phase == phase)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_bytes_of_gathered_keys(kv_heads: int) -> None:
    """Of a layer: KV forward, KV again backward, and KV of gradients that are scattered."""
    found = compiled("cp=4", kv_heads=kv_heads, attention="gather")
    kv = 2 * ROWS * kv_heads * TIME * (WIDTH // 4) * 4 * 2  # of two layers in float32
    assert moved(found, "all_gather", "forward") == kv
    assert moved(found, "all_gather", "backward") == kv
    assert moved(found, "reduce_scatter", "backward") == kv
    assert not moved(found, "all_to_all", "forward")


def test_bytes_of_heads() -> None:
    """Queries, keys and values go to heads, and the output comes back; as many in the backward pass."""
    found = compiled("cp=2", attention="ulysses")
    q, kv = (ROWS * heads * TIME * (WIDTH // 4) * 4 for heads in (4, 2))
    piece = (2 * q + 2 * kv) // 2 * 2  # of two layers, half of each on a rank
    assert moved(found, "all_to_all", "forward") == moved(found, "all_to_all", "backward") == piece
    assert not moved(found, "all_gather", "forward") and layouts_of(found, "attention") == {"[-,cp,-,-]"}


def test_the_search_takes_what_moves_less() -> None:
    """Gathered, a layer moves 3 (n-1)/n KV; over heads 2 (g+1)/n of that: less where n > 2 (g+1)/3."""
    assert layouts_of(compiled("cp=2", kv_heads=4), "attention") == {"[-,cp,-,-]"}  # g = 1
    assert layouts_of(compiled("cp=2", heads=8, kv_heads=2), "attention") == {"[-,-,2~cp,-]"}  # g = 4
    assert layouts_of(compiled("cp=4", heads=8, kv_heads=4), "attention") == {"[-,cp,-,-]"}  # g = 2


def test_an_odd_number_of_pieces_is_not_mirrored() -> None:
    """Of 24 positions 2 x 8 pieces are no whole number: in order, and unbalanced."""
    found = autopar.compile(llama(), "cp=8", loss_fn=token_loss, batch=tokens(), attention="gather")
    assert layouts_of(found, "attention") == {"[-,-,cp,-]"}
    (note,) = found.notes
    assert note.startswith("axis 'cp' (size 8): the last rank does 1.88 times its share of %attention at models.py:")
    assert note.endswith("since 24 positions lie in order; a multiple of 16 balances it")


def test_heads_that_tp_cannot_divide_leave_it_the_sequence_in_order() -> None:
    found = autopar.compile(llama(kv_heads=1), "tp=3", loss_fn=token_loss, batch=tokens(), sequence_parallel=True)
    (note,) = [note for note in found.notes if "times its share" in note]
    assert note.startswith("axis 'tp' (size 3): the last rank does 1.67 times its share of %attention at models.py:")
    assert note.endswith("since 24 positions lie in order; 'cp=3' would balance it")


def test_errors() -> None:
    refused(
        MeshError, "mesh 'tp=2,cp=2': cp and tp split pieces of each other, in this order: write 'cp=2,tp=2'.",
        lambda: compiled("tp=2,cp=2"),
    )  # fmt: skip
    text = (
        r"axis 'ulysses' \(size 4\) splits the heads of every attention, and cannot divide the 4 heads \(2 of keys\) "
    )
    text += r"of %attention at models.py:\d+ in blocks.0: ulysses may be 1 or 2 here"
    with pytest.raises(LayoutError, match=text):
        compiled("ulysses=4")


def test_a_wrong_fold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's piece that is not mirrored: another position, another loss."""
    monkeypatch.setattr(mesh_ops, "mirrored", lambda x, dim: x)
    report = autopar.verify(llama(), "cp=2", loss_fn=token_loss, batch=tokens(), attention="gather")
    assert not report.ok and "all_gather" in str(report.mismatch)


def test_a_sequence_too_short_for_mirrored_pieces_and_tp() -> None:
    """12 positions are 4 mirrored pieces of 3 on cp=2, which tp=2 cannot split further: they lie in order. 6 do not."""
    batch = tuple(each[:, :12] for each in tokens())
    options = {"loss_fn": token_loss, "sequence_parallel": True, "attention": "gather"}
    found = autopar.compile(llama(), "cp=2,tp=2", batch=batch, **options)
    assert layouts_of(found, "attention") == {"[-,tp,cp,-]"}
    assert "[-,cp:tp,-]" in {str(layout) for node in found.program.calls() for layout in record(node).layouts}
    (note,) = found.notes
    assert note.endswith("since 12 positions lie in order; a multiple of 8 balances it")
    assert autopar.verify(llama(), "cp=2,tp=2", batch=batch, **options).ok
    with pytest.raises(LayoutError, match="must be a multiple of 4, or of 8 where attention is causal"):
        autopar.compile(llama(), "cp=2,tp=2", batch=tuple(each[:, :6] for each in tokens()), **options)


class Apart(nn.Module):
    """Attention of a batch [rows, heads, positions, width]: heads are a dim of the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(sdpa(*self.project(x).chunk(3, -1))).square().mean()


@pytest.mark.parametrize(("way", "layouts"), [("gather", {"[-,-,cp,-]"}), ("ulysses", {"[-,cp,-,-]"})])
def test_heads_in_the_batch_are_split_only_if_nobody_forbids(way: str, layouts: set[str]) -> None:
    torch.manual_seed(0)
    ((_, found),) = verified(Apart(), ["cp=2"], None, torch.randn(2, 4, 12, 8), attention=way)
    assert layouts_of(found, "attention") == layouts
