"""Loops over positions, which a trace unrolls: rolled up again, so that cp divides them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import in_turns
from torch import Tensor, nn
from verified import Once, verified

import autopar
from autopar.compiled import Compiled
from autopar.errors import LayoutError
from autopar.ir.program import record

ROWS, TIME, WIDTH = 4, 16, 6
MESHES = ("cp=2", "cp=4", "dp=2,cp=2", "cp=2,tp=2")


def whole(compiled: Compiled) -> list[str]:
    return [note for note in compiled.notes if "axis 'cp'" in note and "lie in order" not in note]


def nodes(compiled: Compiled, name: str = "reroll") -> list[str]:
    return [str(node.target) for node in dict(compiled.history)[name].calls()]


def is_rolled(compiled: Compiled) -> bool:
    """True if the program does not grow with the sequence."""
    return sum("select" in op or "unbind" in op for op in nodes(compiled)) < 4


class Looping(nn.Module):
    """A loop between projections; `loop` is given the module and the hidden values."""

    def __init__(self, loop: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loop = loop
        self.up, self.gate, self.decay, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.state, self.log_a = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))
        self.cell, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.loop(self, F.silu(self.up(x)))).square().mean()


def gated(m: Any, x: Tensor) -> Tensor:
    """A decay that hangs on the data."""
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        a = torch.sigmoid(m.gate(x[:, t]))
        h = a * h + (1 - a) * m.decay(x[:, t])
        found.append(h)
    return torch.stack(found, 1)


def mamba(m: Any, x: Tensor) -> Tensor:
    """A selective state space: the state has a dim of its own."""
    dt, b, c = F.softplus(m.gate(x)), m.decay(x)[..., :2], m.decay(x)[..., 2:4]
    a, u = torch.exp(-dt[..., None] * m.log_a.exp()), dt[..., None] * b[:, :, None] * x[..., None]
    h, found = x.new_zeros(x.shape[0], WIDTH, 2), []
    for t in range(x.shape[1]):
        h = a[:, t] * h + u[:, t]
        found.append(torch.matmul(h, c[:, t].unsqueeze(-1))[:, :, 0])
    return torch.stack(found, dim=-1).transpose(1, 2)


def linear_attention(m: Any, x: Tensor) -> Tensor:
    """The state is a matrix of each head, which decays; what it gives is written into a tensor."""
    q, k, v = (one.unflatten(-1, (2, -1)) for one in (m.up(x), m.gate(x), m.decay(x)))
    w = torch.exp(-torch.exp(k))
    state, found = x.new_zeros(x.shape[0], 2, WIDTH // 2, WIDTH // 2), torch.empty_like(q)
    for t in range(x.shape[1]):
        state = w[:, t, :, :, None] * state + torch.einsum("bhd,bhe->bhde", k[:, t], v[:, t])
        found[:, t] = torch.einsum("bhd,bhde->bhe", q[:, t], state)
    return found.flatten(2)


def peeled(m: Any, x: Tensor) -> Tensor:
    """The first step has no state."""
    h, found = None, []
    for row in x.unbind(1):
        h = row if h is None else torch.sigmoid(m.log_a[:, 0]) * h + row
        found.append(h)
    return torch.stack(found, 1)


def trained_start(m: Any, x: Tensor) -> Tensor:
    h, found = m.state.expand(x.shape[0], -1), []
    for t in range(x.shape[1]):
        h = torch.sigmoid(x[:, t]) * h + x[:, t]
        found.append(h)
    return torch.stack(found, 1)


def backwards(m: Any, x: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[:, 0]), []
    for t in reversed(range(x.shape[1])):
        h = torch.sigmoid(m.gate(x[:, t])) * h + x[:, t]
        found.insert(0, h)
    return torch.stack(found, 1)


def time_first(m: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    h, found = torch.zeros_like(x[0]), []
    for row in x:
        h = torch.tanh(m.gate(row)) * h + row
        found.append(h)
    return torch.stack(found).transpose(0, 1)


def slices(m: Any, x: Tensor) -> Tensor:
    """Rows that stay a dim of size 1, joined."""
    h, found = torch.zeros_like(x[:, :1]), []
    for t in range(x.shape[1]):
        h = 0.9 * h + m.gate(x[:, t : t + 1])
        found.append(h.tanh())
    return torch.cat(found, 1)


def two_layers(m: Any, x: Tensor) -> Tensor:
    return gated(m, peeled(m, x) + x)


def in_one_loop(m: Any, x: Tensor) -> Tensor:
    """Two layers in one loop: the second reads what the first gives in the same step."""
    h = g = torch.zeros_like(x[:, 0])
    found = []
    for t in range(x.shape[1]):
        h = torch.sigmoid(m.gate(x[:, t])) * h + x[:, t]
        g = torch.sigmoid(m.decay(h)) * g + torch.tanh(h)
        found.append(g)
    return torch.stack(found, 1)


def masked(m: Any, x: Tensor) -> Tensor:
    """A state that some positions leave as it is."""
    keep, h, found = x.sum(-1, keepdim=True) > 0, torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.where(keep[:, t], torch.sigmoid(m.gate(x[:, t])) * h + x[:, t], h)
        found.append(h)
    return torch.stack(found, 1)


def summed(m: Any, x: Tensor) -> Tensor:
    """Nothing decays."""
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = h + m.gate(x[:, t])
        found.append(h.tanh())
    return torch.stack(found, 1)


def along_a_dim(m: Any, x: Tensor) -> Tensor:
    """Calls that name a dim, behind other arguments, and from the front."""
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        y = m.gate(x[:, t])
        scale = 1 + torch.linalg.vector_norm(y, 3, -1, keepdim=True) + torch.linalg.vector_norm(y, 1, 1, keepdim=True)
        h = h / 2 + y / scale
        found.append(F.layer_norm(h, (WIDTH,)) + y.sort(1).values)
    return torch.stack(found, 1)


ROLLED = (
    gated, mamba, linear_attention, peeled, trained_start, backwards, time_first, slices, two_layers, in_one_loop,
    masked, summed, along_a_dim,
)  # fmt: skip


@pytest.mark.parametrize(("loop", "meshes"), list(in_turns(ROLLED, MESHES)))
def test_a_loop_with_a_linear_state(loop: Callable[[Any, Tensor], Tensor], meshes: tuple[str, ...]) -> None:
    x = torch.randn(ROWS, TIME, WIDTH)
    for _, found in verified(Looping(loop), meshes, None, (x,)):
        assert not whole(found), found.notes
        assert is_rolled(found), nodes(found)
        assert len(nodes(found)) < len(nodes(found, "capture")) / 3


def last_state(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        a = torch.sigmoid(m.gate(x[:, t]))
        h = a * h + (1 - a) * x[:, t]
    return h


def test_a_loop_that_keeps_the_last_state() -> None:
    """It is summed out of zeros: no rank is given the states of the others."""
    for _, found in verified(Looping(last_state), MESHES, None, (torch.randn(ROWS, TIME, WIDTH),)):
        assert is_rolled(found)
        gathered = [row for row in found.collectives if row.op == "all_gather" and "cp" in row.axis]
        assert all(row.shape[0] == 2 for row in gathered), "the ends of pieces alone"


def two_back(m: Any, x: Tensor) -> Tensor:
    h = g = torch.zeros_like(x[:, 0])
    found = []
    for t in range(x.shape[1]):
        h, g = torch.sigmoid(m.gate(x[:, t])) * g + x[:, t], h
        found.append(h)
    return torch.stack(found, 1)


def other_step(m: Any, x: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.sigmoid(m.gate(x[:, t])) * h + (x[:, t] if t != 7 else m.decay(x[:, t]))
        found.append(h)
    return torch.stack(found, 1)


def drawn(m: Any, x: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.sigmoid(m.gate(x[:, t])) * h + F.dropout(x[:, t], 0.3)
        found.append(h)
    return torch.stack(found, 1)


def gru(m: Any, x: Tensor) -> Tensor:
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
        found.append(h)
    return torch.stack(found, 1)


def lstm(m: Any, x: Tensor) -> Tensor:
    h = c = torch.zeros_like(x[:, 0])
    found = []
    for t in range(x.shape[1]):
        h, c = m.lstm(x[:, t], (h, c))
        found.append(h)
    return torch.stack(found, 1)


def largest(m: Any, x: Tensor) -> Tensor:
    """As RWKV keeps its exponents small."""
    h, top, found = torch.zeros_like(x[:, 0]), torch.full_like(x[:, 0], -1e38), []
    for t in range(x.shape[1]):
        new = torch.maximum(top - 0.1, x[:, t])
        h = torch.exp(top - 0.1 - new) * h + torch.exp(x[:, t] - new)
        top = new
        found.append(h)
    return torch.stack(found, 1)


def test_a_loop_that_reads_two_steps_back_is_right() -> None:
    """It has all its steps, as written; what hangs on no state is done for all at once."""
    for _, found in verified(Looping(two_back), MESHES, None, (torch.randn(ROWS, TIME, WIDTH),)):
        assert "autopar.linear_scan.default" not in nodes(found) and "autopar.chain.default" not in nodes(found)


@pytest.mark.parametrize("loop", (other_step, drawn), ids=lambda loop: loop.__name__)
def test_what_differs_between_steps_stays_apart(loop: Callable[[Any, Tensor], Tensor]) -> None:
    """What one step does otherwise and what is drawn has all its nodes; the rest has not."""
    kept = {drawn: "autopar.dropout.default"}.get(loop)
    for _, found in verified(Looping(loop), MESHES, None, (torch.randn(ROWS, TIME, WIDTH),)):
        assert "autopar.linear_scan.default" in nodes(found)
        assert kept is None or nodes(found).count(kept) == nodes(found, "capture").count(kept) >= TIME


def test_verify_sees_a_lost_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the tester: pieces that all begin with zeros."""

    def lost(build: Any, own: Any, *_: Any) -> Any:
        return own

    monkeypatch.setattr(sys.modules["autopar.passes.collectives.partition"], "with_states_before", lost)
    with pytest.raises(AssertionError, match="gradient"):
        verified(Looping(gated), ("cp=2",), None, (torch.randn(ROWS, TIME, WIDTH),))


class Mixing(nn.Module):
    """Layers of a recurrence, attention and an MLP, as hybrid language models have them."""

    def __init__(self, attentions: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(Mixer(attentions) for _ in range(2 if attentions == 1 else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Mixer(nn.Module):
    def __init__(self, attentions: int) -> None:
        super().__init__()
        self.attentions = attentions
        self.gate, self.value, self.qkv = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 24)
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        a, u, found = torch.sigmoid(self.gate(x)), self.value(x), []
        h = torch.zeros_like(u[:, 0])
        for t in range(x.shape[1]):
            h = a[:, t] * h + u[:, t]
            found.append(h)
        x = x + self.drop(torch.stack(found, 1))
        for _ in range(self.attentions):
            q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


def tokens_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("cp=2", {}),
    "four": ("cp=4", {"attention": "gather"}),
    "ring": ("cp=4", {"attention": "ring"}),
    "heads": ("cp=2", {"attention": "ulysses"}),
    "dp and tp": ("dp=2,cp=2,tp=2", {}),
    "sequence parallel": ("cp=2,tp=2", {"sequence_parallel": True}),
    "micro-batches": ("cp=2", {"microbatches": 2}),
    "pipeline": ("cp=2,pp=2", {"microbatches": 2}),
    "zero": ("dp=2,cp=2", {"zero": 3}),
    "recompute": ("cp=4", {"recompute": "full"}),
}


@functools.cache
def mixing() -> Once:
    torch.manual_seed(0)
    return Once.of(Mixing(), tokens_loss, (torch.randint(0, 20, (4, 16)), torch.randint(0, 20, (4, 16))))


@pytest.mark.parametrize("name", MATRIX)
def test_a_step_is_that_of_one_device(name: str) -> None:
    mesh, options = MATRIX[name]
    _, found = mixing().right(mesh, **options)
    assert not whole(found), found.notes
    if found.pipeline is None:
        assert is_rolled(found)


def test_mirrored_pieces_go_on_from_each_other() -> None:
    """Attention balances its work with two runs a rank: each is told the state before it."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (2, 256)), torch.randint(0, 20, (2, 256))
    ((_, found),) = verified(Mixing(8), ["cp=2"], tokens_loss, tokens, steps=1, attention="gather")
    scans = [node for node in found.program.calls() if str(node.target) == "autopar.linear_scan.default"]
    assert any(node.kwargs.get("runs") == 2 for node in scans), found.notes


def test_states_are_in_float32_under_a_short_precision() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (4, 16)), torch.randint(0, 20, (4, 16))
    found = autopar.compile(Mixing(), "cp=2", loss_fn=tokens_loss, batch=tokens, precision="bf16")
    scans = [node for node in found.program.calls() if str(node.target) == "autopar.linear_scan.default"]
    assert scans and {record(node).type.dtype for node in scans} == {torch.float32}


@pytest.mark.parametrize("kind", ("loop", "sum", "shift"))
def test_slices_of_a_sequence_are_refused(kind: str) -> None:
    """A rank that computes one slice after another has no others to ask for their states."""
    loop = {"loop": gated, "sum": lambda m, x: x.cumsum(1), "shift": lambda m, x: F.pad(x, (0, 0, 1, -1))}[kind]
    options: Any = {"microbatches": 2, "slices": 2, "schedule": "seq1f1b"}
    with pytest.raises(LayoutError, match="needs the whole sequence"):
        autopar.compile(Stacked(loop), "cp=2,pp=2", loss_fn=None, batch=(torch.randn(ROWS, TIME, WIDTH),), **options)


class Stacked(nn.Module):
    def __init__(self, loop: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.loop, self.gate, self.decay = loop, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.loop(self, layer(x))
        return x.square().mean()


def test_mamba_of_transformers() -> None:
    """Its slow path, as users run it without kernels."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    tokens = torch.randint(0, 40, (2, 32))
    loss = lambda model, tokens: model(input_ids=tokens, labels=tokens).loss  # noqa: E731
    for _, found in verified(model, ("cp=2", "dp=2,cp=2"), loss, (tokens,)):
        assert not whole(found), found.notes
        assert nodes(found).count("autopar.linear_scan.default") == 4, "two layers, forwards and backwards"


def divided(m: Any, x: Tensor) -> Tensor:
    """Beyond the ends stand zeros, by which nothing may divide."""
    z, h, found = x * m.state, x[:, 0], []
    for t in range(x.shape[1]):
        by = z[:, t] ** 2 if t == 0 else z[:, t - 1] ** 2 + z[:, t] ** 2
        h = (h + x[:, t]) / by
        found.append(h)
    return torch.tanh(torch.stack(found, 1))


def test_what_lies_beyond_the_ends_is_not_seen() -> None:
    for _, found in verified(Looping(divided), ("cp=2",), None, (torch.randn(ROWS, TIME, WIDTH) + 3,)):
        assert "autopar.linear_scan.default" in nodes(found)
