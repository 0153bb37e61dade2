"""Ring attention: a step is that of one device, what moves is what the formulas say, and who decides says why."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from models import token_loss
from test_context import KINDS, ROWS, TIME, WIDTH, Attending, compiled, llama, sdpa, tokens
from torch import Tensor, nn
from verified import Once, verified

import autopar
from autopar.compiled import Compiled
from autopar.errors import VerificationError
from autopar.ir.check.check_levels import verify
from autopar.ir.layout import local_part, parse_layout
from autopar.ir.ops.ops import op
from autopar.ir.ops.ring_ops import RING_ATTENTION, RING_ATTENTION_BACKWARD, is_ring, messages_of
from autopar.ir.program import record
from autopar.ir.text.text import parse_program, print_program
from autopar.machines import Machine, named
from autopar.passes.collectives.ring import hidden
from autopar.passes.costs.node_costs import node_times
from autopar.runtime.executor.inputs import inputs_of, slots_of
from autopar.runtime.pipeline.run_pipeline import compile_rank
from autopar.runtime.ranks.recorder import COLLECTIVE, Recorder
from autopar.runtime.ranks.virtual import VirtualMesh

H100 = named("h100-80g")


def rings(found: Compiled) -> list[Any]:
    return [node for node in found.program.calls() if is_ring(node.target)]


MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "cp": ("cp=2", {}),
    "three": ("cp=3", {}),
    "four": ("cp=4", {}),
    "in order": ("cp=8", {}),
    "dp": ("dp=2,cp=2", {}),
    "tp": ("cp=2,tp=2", {}),
    "sequence parallel": ("cp=2,tp=2", {"sequence_parallel": True}),
    "three axes": ("dp=2,cp=2,tp=2", {}),
    "pipeline": ("cp=2,pp=2", {"microbatches": 2}),
    "zero bubble": ("cp=2,pp=2", {"microbatches": 2, "schedule": "zb-h1"}),
    "zero 1": ("fsdp=2,cp=2", {"zero": 1}),
    "zero 2": ("fsdp=2,cp=2", {"zero": 2, "microbatches": 2}),
    "zero 3": ("fsdp=2,cp=2", {"zero": 3}),
    "heads inside": ("cp=4,ulysses=2", {}),
    "recompute": ("cp=4", {"recompute": "full"}),
    "budget": ("cp=4", {"recompute": 0.6}),
}


@functools.cache
def once(kv_heads: int) -> Once:
    return Once.of(llama(4, kv_heads), token_loss, tokens())


@pytest.mark.parametrize("name", MATRIX)
def test_a_step_is_that_of_one_device(name: str) -> None:
    mesh, options = MATRIX[name]
    _, found = once(2).right(mesh, attention="ring", **options)
    assert {node.target for node in rings(found)} == {RING_ATTENTION, RING_ATTENTION_BACKWARD}
    assert not [note for note in found.notes if "ring" in note]


def test_a_short_float() -> None:
    """Within the tolerance of bf16: blocks are joined in float32."""
    report = autopar.verify(
        llama(), "cp=4", loss_fn=token_loss, batch=tokens(), attention="ring", precision="bf16", steps=1
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries(kv_heads: int) -> None:
    _, found = once(kv_heads).right("cp=4", attention="ring")
    assert len(rings(found)) == 4


class Wide(nn.Module):
    """Values wider than keys (multi-head latent attention), and keys of another length."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal, self.project, self.out = causal, nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q, k, v = self.project(x), *self.keys(other).split([WIDTH, 2 * WIDTH], -1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (q, k, v))
        y = sdpa(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize(("causal", "time"), [(True, TIME), (False, TIME), (False, 12), (True, 12), (True, 36)])
def test_widths_and_lengths_that_differ(causal: bool, time: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(ROWS, TIME, WIDTH), torch.randn(ROWS, time, WIDTH)
    for mesh, found in verified(Wide(causal), ["cp=2", "cp=3"], None, batch, attention="ring"):
        assert len(rings(found)) == 2, mesh


GATHERED = {"dropout": "its dropout counts", "dropout of all": "its dropout"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention(kind: str) -> None:
    """It goes round, or a note names the op and the line that keep it from that."""
    torch.manual_seed(0)
    batch = torch.randn(ROWS, TIME, WIDTH), torch.rand(ROWS, TIME) < 0.7, torch.randn(ROWS, TIME // 2, WIDTH)
    ((_, found),) = verified(Attending(KINDS[kind]), ["cp=2"], None, batch, attention="ring")
    notes = [note for note in found.notes if note.startswith("attention='ring': keys and values of %")]
    assert 2 * len(notes) + len(rings(found)) == 2 or kind in ("trained bias", "spelled out", "multihead"), found.notes
    if kind in GATHERED:
        assert GATHERED[kind] in notes[0] and " at test_context.py:" in notes[0] and " and 1 more are " in notes[0]
    if kind in ("causal", "all", "cross"):
        assert not notes


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_bytes_are_those_of_the_formulas(kv_heads: int, dtype: str | None) -> None:
    """(n-1)/n KV forward in n - 1 messages; backward as much and the gradients, in float32, in 2 (n-1)."""
    n, short = 4, 2 if dtype else 4
    found = compiled(f"cp={n}", kv_heads=kv_heads, attention="ring", precision=dtype)
    kv = 2 * ROWS * kv_heads * TIME * (WIDTH // 4)  # elements of a layer
    rows = [row for row in found.collectives if row.op == "shift"]
    assert {row.axis for row in rows} == {"cp"}
    forward = [row for row in rows if row.phase == "forward"]
    backward = [row for row in rows if row.phase == "backward"]
    assert sum(row.times for row in forward) == 2 * (n - 1) and sum(row.times for row in backward) == 2 * 2 * (n - 1)
    assert sum(row.bytes * row.times for row in forward) == 2 * (n - 1) * kv * short // n
    assert sum(row.bytes * row.times for row in backward) == 2 * (n - 1) * kv * (short + 4) // n
    assert not [row for row in found.collectives if row.op in ("all_gather", "reduce_scatter")]


def test_messages_counted_are_the_messages_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `collectives` says, against the requests of a run; of all that is sent at a time."""
    from autopar.runtime.ranks import virtual

    sent: list[tuple[str, int]] = []
    together = virtual.together

    def counted(requests: Any) -> Any:
        target, (x, *_) = requests[0]
        if "shift" in str(target):
            sent.append((str(target), x.nbytes))
        return together(requests)

    monkeypatch.setattr(virtual, "together", counted)
    found = compiled("cp=4", attention="ring")
    report = autopar.verify(llama(), "cp=4", loss_fn=token_loss, batch=tokens(), attention="ring", steps=1)
    assert report.ok
    rows = [row for row in found.collectives if row.op == "shift"]
    assert len(sent) == sum(row.times for row in rows) == 2 * 3 * 3
    assert sum(size for _, size in sent) == 2 * sum(row.times * row.bytes for row in rows), "verified in float64"


def test_one_node_whatever_the_ranks() -> None:
    def nodes(n: int) -> int:
        x = tuple(torch.zeros(1, 128, dtype=torch.long) for _ in range(2))
        torch.manual_seed(0)
        model = type(llama())(2, WIDTH, 4, 2, 48, 40, 128)
        return len(autopar.compile(model, f"cp={n}", loss_fn=token_loss, batch=x, attention="ring").program.nodes)

    assert nodes(2) == nodes(64)


def test_a_budget_repeats_no_ring() -> None:
    found = compiled("cp=2", attention="ring", recompute=0.6)
    assert len(rings(found)) == len(rings(compiled("cp=2", attention="ring"))) == 4
    assert any(record(node).made_by == "recompute" for node in found.program.calls()), "something is computed again"


def _transient(n: int, way: str) -> tuple[int, int]:
    """What attention holds beyond what was there before it, forward and backward, with as long a piece whatever n."""
    found = _attention(256 * n, f"cp={n}", True, 4, attention=way, precision=None)
    before, most = 0, {"forward": 0, "backward": 0}
    for moment in found.memory(device="cpu").timeline:
        if "attention" in moment.node or "all_gather" in moment.node:
            most[moment.phase] = max(most[moment.phase], moment.peak - before)
        before = moment.after if "all_gather" not in moment.node else before
    return most["forward"], most["backward"]


def test_a_ring_holds_two_messages_however_many_ranks() -> None:
    assert _transient(4, "ring") == _transient(16, "ring")
    grown = zip(_transient(16, "gather"), _transient(4, "gather"), strict=True)
    assert all(many > 2 * few for many, few in grown), "what is gathered grows"


def test_the_text_of_a_program_is_read_back() -> None:
    text = compiled("cp=2", attention="ring").text()
    assert "autopar.ring_attention_backward.default(" in text and print_program(parse_program(text)) == text


# -- the choice -----------------------------------------------------------------------------------------------------


def _attention(time: int, mesh: str, causal: bool, heads: int, **options: Any) -> Compiled:
    """Compiled only, on tensors without data."""
    with torch.device("meta"):
        model, batch = _One(causal, heads), torch.empty(1, time, 64, dtype=torch.bfloat16)
    return autopar.compile(model.bfloat16(), mesh, loss_fn=lambda m, x: m(x).float().mean(), batch=batch, **options)


class _One(nn.Module):
    def __init__(self, causal: bool, heads: int) -> None:
        super().__init__()
        self.causal, self.q, self.kv = causal, nn.Linear(64, 16 * heads), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in (self.q(x), *self.kv(x).chunk(2, -1)))
        return sdpa(q, k, v, is_causal=self.causal, enable_gqa=True)


# S/n g / itemsize >= 1 / bytes_per_flop = 1039 on H100: in bf16 S/n g >= 2079 for causal attention, 1039 without a
# mask.
@pytest.mark.parametrize(
    ("time", "causal", "heads", "is_ring"),
    [(4 * 2080, True, 1, True), (4 * 2072, True, 1, False), (4 * 520, True, 4, True), (4 * 512, True, 4, False),
     (4 * 1040, False, 1, True), (4 * 1036, False, 1, False)],
)  # fmt: skip
def test_auto_takes_a_ring_that_hides_its_messages(time: int, causal: bool, heads: int, is_ring: bool) -> None:
    assert 1 / H100.bytes_per_flop("attention") == pytest.approx(1039, rel=1e-3)
    found = _attention(time, "cp=4", causal, heads)
    reasons = [row.reason for row in found.collectives if row.axis == "cp" and row.op in ("shift", "all_gather")]
    times = f"{hidden(time // 4, heads, 2, causal, H100):.3g} times as long as its message"
    assert bool(rings(found)) == is_ring, reasons
    said = f"a ring: a step's products take {times}" if is_ring else f"in a ring a step's products take {times}"
    assert all(said in reason for reason in reasons) and reasons
    keys = next(node for node in dict(found.history)["partition"].calls() if node.target is op("all_gather")).args[0]
    assert said in str(found.explain(f"%{keys}"))


def test_gather_and_ulysses_make_no_ring() -> None:
    assert not rings(_attention(4 * 8000, "cp=4", True, 4, attention="gather"))
    assert not rings(compiled("cp=2", attention="ulysses"))


def test_without_cp_nothing_changes() -> None:
    assert compiled("tp=2", attention="ring").text() == compiled("tp=2").text()


def test_without_attention_nothing_changes() -> None:
    found = autopar.compile(nn.Linear(4, 4), "cp=2", loss_fn=lambda m, x: m(x).mean(), batch=torch.zeros(2, 8, 4))
    names, made = zip(*found.history, strict=True)
    assert made[names.index("ring")] is made[names.index("ring") - 1]


def test_the_time_of_a_ring_is_that_of_the_slower_side() -> None:
    found = compiled("cp=4", attention="ring").program
    node = next(node for node in found.calls() if node.target is RING_ATTENTION)
    (sent,) = messages_of(node, found.mesh)
    slow, fast = (node_times(found, Machine.flat(1.0, 1e9, link, 0.5, 0.0))[node] for link in (1e-6, 1e9))
    assert slow == pytest.approx(sent.times * (sent.type.bytes_ / 1e-6 + 0.5))
    pairs = 1 / 4 * (1 / 2 + 1 / 16)  # half of a rank's, and half of its two squares, which are smaller than a tile
    assert fast == record(node).flops * pairs, "a rank's part of the products"


# -- a run, watched -------------------------------------------------------------------------------------------------


def test_a_recorder_sees_each_message() -> None:
    found = compiled("pp=2,cp=2", attention="ring", microbatches=2)
    program, pipeline = found.program, found.pipeline
    assert pipeline is not None

    def part_of(entry: Any, layout: Any, coord: Any) -> Tensor:
        type_ = record(program.placeholders[program.inputs.index(entry)]).type
        return local_part(torch.zeros(type_.shape, dtype=type_.dtype), layout, program.mesh, coord)

    recorders = [Recorder() for _ in range(4)]
    given = [inputs_of(slots_of(program, pipeline, coord), part_of) for coord in found.mesh.coords()]
    VirtualMesh(found.mesh).run_pipeline([compile_rank(pipeline, place) for place in range(2)], given, recorders)
    for rank, one in enumerate(recorders):
        rows = [row for row in found.collectives if row.op == "shift" and row.place == rank // 2]
        sent = [event for event in one.events if event.name.startswith("shift_start cp %ring_attention")]
        assert len(sent) == sum(row.times for row in rows) == 2 * (1 + 2), "of each of two micro-batches"
        assert sum(event.bytes for event in sent) == sum(row.times * row.bytes for row in rows)
        assert all(event.kind == COLLECTIVE and event.module == f"blocks.{rank // 2}" for event in sent)


# -- what verify sees -----------------------------------------------------------------------------------------------


def _wrong(found: Compiled, change: Any) -> str:
    """What is said of a program of which one ring was changed."""
    program = parse_program(found.text())
    node = next(node for node in program.calls() if node.target is RING_ATTENTION)
    change(node)
    with pytest.raises(VerificationError) as caught:
        verify(program, program.level)
    return str(caught.value)


def test_layouts_of_a_ring_are_checked() -> None:
    found = compiled("cp=4", attention="ring")

    def other(place: int, value: Any) -> Any:
        return lambda node: node.update_arg(place, value)

    assert "sends round pieces over 'cp' at outer 1, and has [-,-,2~cp,-]" in _wrong(found, other(5, 1))
    assert "goes round 2 ranks of 'cp', which mesh 'cp=4' has not" in _wrong(found, other(4, 2))
    assert "goes round 4 ranks of 'tp', which mesh 'cp=4' has not" in _wrong(found, other(3, "tp"))

    def whole(node: Any) -> None:
        k = node.args[1]
        layout = parse_layout("[-,-,-,-]")
        k.meta["autopar"] = record(k).with_(layouts=(layout,))
        operands = record(node).operands
        node.meta["autopar"] = record(node).with_(operands=(operands[0], layout, operands[2]))

    assert "[-,-,-,-]" in _wrong(found, whole)
