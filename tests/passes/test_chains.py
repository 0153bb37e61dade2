"""Recurrences that are not linear: one step as text, which the ranks of cp compute in turns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shares import in_turns
from test_reroll import Looping, gru, largest, lstm, tokens_loss, whole
from torch import Tensor, nn
from verified import Once, verified

import autopar
from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.check_options import options_of
from autopar.compiler.compile import batch_arguments, lower
from autopar.compiler.meshes import mesh_of
from autopar.errors import VerificationError
from autopar.ir.check.check_levels import verify
from autopar.ir.layout import local_shape
from autopar.ir.ops.ops import op
from autopar.ir.program import Level, record
from autopar.ir.text.text import parse_program, print_program
from autopar.runtime.kernels import run_chain as turns
from autopar.verification.verify import verify_compiled

ROWS, TIME, WIDTH = 4, 16, 6
MESHES = ("cp=2", "cp=4", "dp=2,cp=2", "cp=2,tp=2")
CHAIN, TURNS = "autopar.chain.default", "autopar.chain_in_turns.default"


def chains(compiled: Compiled) -> list[Any]:
    """The chains of the program of a rank."""
    found = [node for one in compiled.ranks[0].programs.values() for node in one.calls()]
    return [node for node in found if str(node.target) in (CHAIN, TURNS)]


def check_is_divided(compiled: Compiled, count: int) -> None:
    """There are so many chains, in all of which ranks have rows of their own, and the text is read again."""
    assert [str(node.target) for node in chains(compiled)] == [TURNS] * count, compiled.notes
    for program in compiled.ranks[0].programs.values():
        text = print_program(program)
        assert print_program(parse_program(text)) == text


class Recurrent(nn.Module):
    """One of torch's, between projections; `last` gives the last state alone."""

    def __init__(self, kind: type[nn.RNNBase], last: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.time_first = last, not options.get("batch_first", False)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.cell = kind(WIDTH, WIDTH, **options)
        self.down = nn.Linear(WIDTH * (2 if options.get("bidirectional") else 1), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        found, _ = self.cell(x.transpose(0, 1) if self.time_first else x)
        found = found.transpose(0, 1) if self.time_first else found
        return self.down(found[:, -1] if self.last else found).square().mean()


OF_TORCH: dict[str, tuple[type[nn.RNNBase], dict[str, Any], int]] = {
    "lstm": (nn.LSTM, {"batch_first": True}, 2),
    "lstm, time first": (nn.LSTM, {}, 2),
    "two layers": (nn.LSTM, {"batch_first": True, "num_layers": 2}, 4),
    "both ways": (nn.LSTM, {"batch_first": True, "bidirectional": True}, 4),
    "gru": (nn.GRU, {"batch_first": True}, 2),
    "rnn": (nn.RNN, {"batch_first": True}, 2),
    "last state": (nn.LSTM, {"batch_first": True, "last": True}, 2),
}


@pytest.mark.parametrize(("name", "meshes"), list(in_turns(OF_TORCH, MESHES)))
def test_the_recurrences_of_torch(name: str, meshes: tuple[str, ...]) -> None:
    kind, options, count = OF_TORCH[name]
    for _, found in verified(Recurrent(kind, **options), meshes, None, (torch.randn(ROWS, TIME, WIDTH),)):
        check_is_divided(found, count)
        assert not whole(found) or "last" in options, found.notes  # one row is read by products alone


class InFloat32(nn.Module):
    """What torch has as one op a layer on a CPU, with a trained start; all that it gives is read."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.LSTM(3, 5, 2, bidirectional=True, **options)
        self.start, self.down = nn.Parameter(torch.randn(5)), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(4, x.shape[0], 5).contiguous()
        found, (h, c) = self.cell(x.transpose(0, 1), (start, start * 2))
        return self.down(found).square().mean() + h.sum() + c.square().sum()


@pytest.mark.parametrize("bias", (True, False))
def test_layers_of_one_op(bias: bool) -> None:
    model, batch = InFloat32(bias=bias), (torch.randn(ROWS, 8, 3),)
    captured = capture(model, None, *batch_arguments(batch))
    assert "aten.mkldnn_rnn_layer.default" in {str(node.target) for node in captured.program.calls()}
    for mesh in ("cp=2", "dp=2,cp=4"):
        found = lower(captured, mesh_of(mesh), options_of(), None)
        report = verify_compiled(model, captured, found, loss_fn=None, batch=batch, steps=2, optimizer=None, seed=0)
        assert report.ok and report.max_error < 3e-6, f"\n{report}"
        check_is_divided(found, 8)
        assert not found.notes


@pytest.mark.parametrize("mesh", ("dp=1", "dp=2", "dp=2,tp=2", "tp=5"))
def test_layers_of_one_op_where_nothing_divides_a_sequence(mesh: str) -> None:
    """Red before: the op keeps what its gradient reads only where autograd is on, and a rank's step runs without
    ("Expected a proper Tensor but got None ... 'workspace'", found by benchmarks.journeys)."""
    model, batch = InFloat32(), (torch.randn(ROWS, 8, 3),)
    captured = capture(model, None, *batch_arguments(batch))
    found = lower(captured, mesh_of(mesh), options_of(), None)
    report = verify_compiled(model, captured, found, loss_fn=None, batch=batch, steps=2, optimizer=None, seed=0)
    assert report.ok and report.max_error < 3e-6, f"\n{report}"
    if mesh == "dp=2":
        chains = [node for node in found.program.calls() if node.target is op("chain")]
        assert {record(node).layouts[0].dims[1] for node in chains} == {("dp",)}, "rows are split"


def own_cell(m: Any, x: Tensor) -> Tensor:
    """An LSTM's step in Python, with a trained state before the first one."""
    h = c = m.state.expand(x.shape[0], -1)
    found = []
    for t in range(x.shape[1]):
        i, f, o, g = m.gate(h), m.decay(x[:, t]), m.up(h), m.gate(x[:, t] + h)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        found.append(h)
    return torch.stack(found, 1)


def matrix_state(m: Any, x: Tensor) -> Tensor:
    """The state is a matrix of each row of the batch, which is multiplied by one."""
    h, found = x.new_zeros(x.shape[0], 2, WIDTH), []
    for t in range(x.shape[1]):
        h = torch.tanh(m.gate(h) + x[:, t, None] * m.log_a.T)
        found.append(h.sum(1))
    return torch.stack(found, 1)


def in_heads(m: Any, x: Tensor) -> Tensor:
    """Matrices of each head, which do not meet: a head may be split as a row of the batch."""
    w, h, found = m.gate.weight[:2, :2], x.new_zeros(x.shape[0], 2, WIDTH // 2), []
    for row in x.unflatten(-1, (2, -1)).unbind(1):
        h = torch.tanh(torch.einsum("bhd,hg->bgd", h, w) + row)
        found.append(h.flatten(1))
    return torch.stack(found, 1)


def without_first(m: Any, x: Tensor) -> Tensor:
    """The first step has no state."""
    h, found = None, []
    for row in x.unbind(1):
        h = torch.tanh(row) if h is None else torch.tanh(m.gate(h) + row)
        found.append(h)
    return torch.stack(found, 1)


def last_of_two(m: Any, x: Tensor) -> Tensor:
    """From the end, and of it the last state alone."""
    h = torch.zeros_like(x[:, 0])
    for t in reversed(range(x.shape[1])):
        h = torch.tanh(m.gate(h) + x[:, t])
    return h[:, None] + x


LOOPS = (lstm, gru, largest, own_cell, matrix_state, in_heads, without_first, last_of_two)


@pytest.mark.parametrize(("loop", "meshes"), list(in_turns(LOOPS, MESHES)))
def test_loops_in_python(loop: Callable[[Any, Tensor], Tensor], meshes: tuple[str, ...]) -> None:
    for _, found in verified(Looping(loop), meshes, None, (torch.randn(ROWS, TIME, WIDTH),)):
        check_is_divided(found, 2)
        assert not whole(found) or loop is own_cell, found.notes  # gradients of weights before the first state


class Mixing(nn.Module):
    """Layers of an LSTM, attention and an MLP."""

    def __init__(self, layers: int = 2, attentions: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(Mixer(attentions) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Mixer(nn.Module):
    def __init__(self, attentions: int) -> None:
        super().__init__()
        self.attentions = attentions
        self.lstm, self.qkv, self.drop = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 24), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.lstm(x)[0])
        for _ in range(self.attentions):
            q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("cp=2", {}),
    "four": ("cp=4", {"attention": "gather"}),
    "ring": ("cp=4", {"attention": "ring"}),
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
    assert {str(node.target) for node in chains(found)} == {TURNS} and not whole(found), found.notes


def test_mirrored_pieces_are_there_and_back() -> None:
    """Attention balances its work with two runs a rank: the last rank computes both of its runs in a row."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (2, 128)), torch.randint(0, 20, (2, 128))
    ((_, found),) = verified(Mixing(1, 8), ["cp=2"], tokens_loss, tokens, steps=1, attention="gather")
    assert [node.args[-1] for node in chains(found)] == [-2, -2], found.notes


def test_verify_sees_a_state_that_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test the tester: every rank goes on from its own."""

    def kept(ask: Any, states: Any, *_: Any) -> Any:
        return states
        yield

    monkeypatch.setattr(turns, "_handed_on", kept)
    with pytest.raises(AssertionError, match="gradient"):
        verified(Looping(gru), ("cp=2",), None, (torch.randn(ROWS, TIME, WIDTH),))


GIVEN = """LOCAL program on cp=2
%h: f64[4,2] [-,-] = batch "0"
%x: f64[4,4,2] of [8,4,2] [cp,-,-] = batch "1"
%chain: (f64[4,4,2] of [8,4,2] [cp,-,-]) = autopar.chain_in_turns.default([%h], [%x], [], "v0 = aten.maximum.default(h0, x0); rows = [v0]; states = [v0]", False, "cp", 2, 1)
return value "h" = %h
"""  # noqa: E501


@pytest.mark.parametrize(
    ("what", "instead", "message"),
    (
        (
            "x0); rows = [v0]; states = [v0]",
            "x0); v1 = aten.sum.default(v0); rows = [v0]; states = [v1]",
            r"%h0 is .*\(4, 2\).*, and .* after the step",
        ),
        ("rows = [v0]", "rows = [v0, v0]", r"its step gives .*, .*, and it says torch.float64\[4, 4, 2\]"),
        ("aten.maximum.default(h0, x0)", "os.system.default(x0)", "not an op that a program may hold"),
        ("aten.maximum.default(h0, x0)", "h0 +", "cannot be read"),
        ('"cp", 2, 1)', '"cp", 4, 1)', "4 ranks of 'cp' take turns, of which mesh 'cp=2' has 2"),
        ('"cp", 2, 1)', '"cp", 2, -2)', "not in -2 pieces over 'cp'"),
        ("%h: f64[4,2] [-,-]", "%h: f64[4,2] of [8,2] [cp,-]", "%h is split over 'cp', and all its ranks read it"),
        ("%h: f64[4,2] [-,-]", "%h: f64[2,2] of [4,2] [cp,-]", "its step gives|cannot be computed|after the step"),
    ),
)
def test_a_wrong_chain_is_caught(what: str, instead: str, message: str) -> None:
    verify(parse_program(GIVEN), Level.LOCAL)
    with pytest.raises(VerificationError, match=message):
        verify(parse_program(GIVEN.replace(what, instead)), Level.LOCAL)


def test_programs_are_saved(tmp_path: Path) -> None:
    found = autopar.compile(Looping(lstm), "cp=2", loss_fn=None, batch=(torch.randn(ROWS, TIME, WIDTH),))
    found.save(tmp_path / "saved")
    assert autopar.load(tmp_path / "saved").text() == found.text()


def test_states_are_in_float32_under_a_short_precision() -> None:
    batch = (torch.randn(ROWS, TIME, WIDTH),)
    found = autopar.compile(Looping(lstm), "cp=2", loss_fn=None, batch=batch, precision="bf16")
    types = [type_ for node in chains(found) for type_ in record(node).types]
    assert len(types) == 8 and {type_.dtype for type_ in types} == {torch.float32}


def test_a_program_does_not_grow_with_the_sequence() -> None:
    """Nor does what a rank keeps of the steps of others."""
    sizes, work = [], []
    for time in (16, 64):
        found = autopar.compile(Looping(lstm), "cp=2", loss_fn=None, batch=(torch.randn(ROWS, time, WIDTH),))
        sizes.append(len(list(found.program.calls())))
        work.append(sum(record(node).flops for node in chains(found)))
        local = {
            local_shape(record(node).types[0].shape, record(node).layouts[0], found.mesh) for node in chains(found)
        }
        assert {shape[0] for shape in local} == {time // 2}
    assert sizes[0] == sizes[1] and work[1] == 4 * work[0] > 0
