"""Slices of different length: a step is that of one device, and all that is said of a pipeline knows their lengths."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Llama, token_loss
from refusals import refused
from test_slices import llama, nll, once, sliced, tied, tied_once, tokens, words
from torch import Tensor, nn
from verified import Once, verified

import autopar
from autopar.compiled import Compiled
from autopar.errors import BatchError, MeshError, PlanError, ScheduleError, VerificationError
from autopar.ir.layout import local_part, parse_layout
from autopar.ir.mesh import SLICE, Mesh, parse_mesh
from autopar.ir.ops.measure import local_type
from autopar.ir.options import read_slices
from autopar.ir.plan import Fixed
from autopar.ir.program import Record, TensorType, record
from autopar.ir.schedule import Action
from autopar.ir.text.text import parse_program
from autopar.machines import named
from autopar.passes.collectives.sized import Sized
from autopar.passes.pipeline.with_lengths import sized_graphs
from autopar.passes.rules.rule import Reading, starts_of
from autopar.report.inspection_pipeline import saved_bytes
from autopar.report.timeline.show_timeline import picture_of
from autopar.runtime.kernels.counter import Counters, PieceRuns
from autopar.runtime.pipeline import microbatches

LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("pp=2", sliced([14, 10])),
    "four": ("pp=2", sliced([10, 6, 5, 3])),
    "growing": ("pp=2", sliced([3, 5, 6, 10])),
    "some alike": ("pp=2", sliced([8, 4, 8, 4])),
    "one micro-batch": ("pp=2", sliced([10, 6, 5, 3], 1)),
    "gpipe": ("pp=2", sliced([10, 6, 5, 3], schedule="gpipe")),
    "stages on each rank": ("pp=2", sliced([14, 10], schedule="gpipe", chunks=2)),
    "four stages": ("pp=4", sliced([10, 6, 5, 3], 4)),
    "dp": ("dp=2,pp=2", sliced([14, 10])),
    "tp": ("pp=2,tp=2", sliced([10, 6, 5, 3])),
    "tp first": ("tp=2,dp=2,pp=2", sliced([14, 10])),
    "sequence parallel": ("pp=2,tp=2", sliced([12, 8, 4], sequence_parallel=True)),
    "cp": ("pp=2,cp=2", sliced([16, 8], attention="gather")),
    "cp of four stages": ("pp=4,cp=2", sliced([12, 8, 4], attention="gather")),
    "heads of cp": ("pp=2,cp=2", sliced([16, 8], attention="ulysses")),
    "zero 1": ("dp=2,pp=2", sliced([14, 10], zero=1)),
    "zero 3": ("dp=2,pp=2", sliced([14, 10], zero=3)),
    "zero of cp": ("cp=2,pp=2", sliced([16, 8], zero=2)),
    "recompute": ("pp=2", sliced([10, 6, 5, 3], recompute="full")),
    "selective": ("pp=4", sliced([10, 6, 5, 3], recompute="selective")),
    "budget": ("pp=2", sliced([10, 6, 5, 3], recompute=0.6)),
    "recompute of cp": ("pp=2,cp=2", sliced([16, 8], recompute="full", attention="gather")),
}
CHUNKED: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("pp=2", sliced([40, 24], chunked_loss=True)),
    "one sample": ("pp=2", sliced([40, 24], 4, chunked_loss=1)),
    "four": ("pp=2", sliced([24, 16, 16, 8], 1, chunked_loss=True)),
    "cp": ("pp=2,cp=2", sliced([40, 24], chunked_loss=13000, attention="gather")),
    "tp": ("pp=2,tp=2", sliced([40, 24], chunked_loss=4000)),
}
DROPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("pp=2", sliced([7, 4, 3, 2])),
    "dropout, one micro-batch": ("pp=2", sliced([9, 7], 1)),
    "dropout of cp": ("pp=2,cp=2", sliced([12, 4], attention="gather")),
    "dropout of tp": ("pp=2,tp=2", sliced([10, 6], sequence_parallel=True)),
    "dropout computed again": ("dp=2,pp=2", sliced([7, 4, 3, 2], recompute="full")),
}


@pytest.mark.parametrize("name", LLAMA)
def test_a_step_is_that_of_one_device(name: str) -> None:
    """Loss, every gradient and the weights after two steps of AdamW, in float64."""
    mesh, options = LLAMA[name]
    layers = 4 if "pp=4" in mesh or "chunks" in options else 2
    _, found = once(layers).right(mesh, **options)
    assert found.plan.slice_lengths == tuple(options["slices"]) and not found.notes
    assert found.pipeline is not None and set(found.pipeline.sized) == {*options["slices"][1:]} - {options["slices"][0]}


@functools.cache
def wordy() -> Once:
    torch.manual_seed(0)
    x, y = (part.repeat(1, 3)[:, :64] for part in tokens())
    return Once.of(Llama(2, 16, 4, 2, 24, 96, 64), token_loss, (x, y))


@pytest.mark.parametrize("name", CHUNKED)
def test_a_loss_in_chunks_is_that_of_one_device(name: str) -> None:
    """Logits of a vocabulary of twice the width or more."""
    mesh, options = CHUNKED[name]
    _, found = wordy().right(mesh, **options)
    assert not found.notes and any(node.name.endswith("_chunk1") for node in found.program.calls())


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_is_that_of_one_device(name: str) -> None:
    """In attention, and elsewhere."""
    mesh, options = DROPPED[name]
    tied_once(16).right(mesh, **options)


def test_what_leaves_beside_the_loss() -> None:
    """Values of positions, of sequences, and what the batch alone gives."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = model(x)
        return nll(model, x, y), logits, logits.square().sum((1, 2)), (y >= 0).sum(1), y >= 0, logits.flatten(0, 1)

    given = Once.of(tied(16, 0.0), loss_fn, words(16))
    for count, mesh in ((1, "pp=2"), (4, "dp=2,pp=2"), (1, "dp=2,pp=2")):
        given.right(mesh, **sliced([10, 6], count))


def test_a_loss_that_weighs_each_sequence() -> None:
    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(model(x).transpose(1, 2), y, ignore_index=-1, reduction="none")
        return (each.sum(1) / (y >= 0).sum(1)).mean()

    verified(tied(16), ["pp=2"], loss_fn, words(16), **sliced([10, 6]))


def test_labels_that_the_loss_shifts_are_divided() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    verified(tied(16), ["pp=2"], loss_fn, words(16)[:1], **sliced([7, 4, 3, 2]))


def test_a_short_float() -> None:
    report = autopar.verify(
        llama(), "pp=2", loss_fn=token_loss, batch=tokens(), precision="bf16", **sliced([10, 6, 5, 3])
    )
    assert report.ok, report


def test_a_wrong_start_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where causal attention takes the first query for another: each slice begins a position late."""
    answer = microbatches.local_answer

    def late(mesh: Mesh, coord: Any, target: object, args: tuple[object, ...]) -> Any:
        return answer(mesh, coord, target, args) + (target == microbatches.COORD)  # type: ignore[operator]

    monkeypatch.setattr(microbatches, "local_answer", late)
    assert not once().report(once().compiled("pp=2", **sliced([10, 6, 5, 3]))).ok


# -- the choice --------------------------------------------------------------------------------------------------------


class Long(nn.Module):
    """Mostly attention, if the sequence is long."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x.square().mean()


def square(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def long(time: int, **options: Any) -> Compiled:
    return autopar.compile(Long(), "pp=2", batch=(torch.empty(2, time, 32),), **options)


@pytest.mark.parametrize("schedule", ["seq1f1b", "gpipe"])
def test_lengths_are_chosen_where_they_gain(schedule: str) -> None:
    found = long(2**16, **sliced(4, 1, schedule))
    lengths = found.plan.slice_lengths
    assert sum(lengths) == 2**16 and not any(length % 16 for length in lengths)
    assert list(lengths) == sorted(lengths, reverse=True) and lengths[0] > 1.5 * lengths[-1]
    assert found.pipeline is not None
    costs = found.pipeline.costs
    times = [costs.time_us(Action(0, "F", part)) + costs.time_us(Action(0, "B", part)) for part in range(4)]
    assert max(times) < 1.1 * min(times), times
    assert long(64, **sliced(4, 1, schedule)).plan.slice_lengths == ()  # calls as short as calls are
    assert long(2**16, compile="inductor", **sliced(4, 1, schedule)).plan.slice_lengths == lengths


def test_a_choice_is_that_of_one_device() -> None:
    batch = (torch.randn(2, 512, 32, generator=torch.Generator().manual_seed(0)),)
    ((_, found),) = verified(Long(), ["pp=2"], None, batch, fixed=Fixed(machine=named("cpu")), **sliced(4, 2))
    assert len(set(found.plan.slice_lengths)) > 1


def test_the_number_is_chosen() -> None:
    """The best simulated; one where slices gain nothing, or cannot be."""
    found = long(2**16, **sliced("auto", 1))
    assert found.plan.slices == 8 and found.plan.slice_lengths and "slices='auto' is 8 (simulated: " in found.notes[-1]
    short = long(64, **sliced("auto", 1))
    assert short.plan.slices == 1 and "slices='auto' is 1" in short.notes[-1]
    model = nn.Sequential(nn.Linear(32, 32), nn.Softmax(1), nn.Linear(32, 32))
    whole = autopar.compile(model, "pp=2", loss_fn=square, batch=(torch.empty(2, 64, 32),), **sliced("auto", 1))
    assert whole.plan.slices == 1 and "needs the whole sequence" in whole.notes[-1]
    with pytest.raises(ScheduleError, match="schedule '1f1b' does not run the slices"):
        long(64, slices="auto")


def test_a_chosen_number_is_that_of_one_device() -> None:
    batch = (torch.randn(2, 512, 32, generator=torch.Generator().manual_seed(0)),)
    ((_, found),) = verified(Long(), ["pp=2"], None, batch, fixed=Fixed(machine=named("cpu")), **sliced("auto", 2))
    assert found.plan.slices > 1
    ((_, found),) = verified(Long(), ["dp=2"], None, batch, slices="auto")
    assert found.plan.slices == 1


# -- what is said ------------------------------------------------------------------------------------------------------


def test_a_rank_holds_what_its_slices_leave() -> None:
    """The values of a slice are as long as it is; messages too."""
    found = once().compiled("pp=2", **sliced([12, 6, 4, 2]))
    pipeline = found.pipeline
    assert pipeline is not None
    first, *others = (saved_bytes(pipeline, 0, slice_) for slice_ in range(4))
    assert others == pytest.approx([first / 2, first / 3, first / 6], rel=0.02)
    sent = [line.types[0].shape for line in pipeline.lists[0] if line.op == "SEND"]
    assert sent[:4] == [(2, length, 32) for length in (12, 6, 4, 2)]
    assert "(12, 6, 4, 2 positions)" in pipeline.parts_text
    assert {one.name: one.times for one in pipeline.every_graph()}["forward_0_of_6"] == 2
    assert found.memory(0).peak > 0
    blocks = [block for lane in picture_of(found).lanes for block in lane.blocks if block.action == Action(0, "F", 5)]
    assert "micro-batch 1, slice 1 (6 positions)" in blocks[0].title()


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    found = once().compiled("pp=2", **sliced([10, 6, 5, 3]))
    found.save(tmp_path)
    again = autopar.load(tmp_path)
    assert again.pipeline is not None and found.pipeline is not None
    assert again.pipeline.flow == found.pipeline.flow and again.pipeline.costs == found.pipeline.costs
    assert again.pipeline.time == found.pipeline.time and again.plan.slice_lengths == (10, 6, 5, 3)
    assert again.lines() == found.lines()


def test_errors() -> None:
    def compiled(**options: Any) -> Compiled:
        return autopar.compile(tied(16), "pp=2", loss_fn=nll, batch=words(16), **options)

    refused(
        BatchError,
        "slices=[8, 4] are 12 positions, but there are 16 (dim 1 of batch tensor 0). Give lengths that add up to 16, "
        "or slices=2.",
        lambda: compiled(**sliced([8, 4])),
    )
    refused(
        BatchError,
        "slices=3 does not divide the 16 positions (dim 1 of batch tensor 0): pad to 18, or use slices of 1, 2, 4, 8 "
        "or 16.",
        lambda: compiled(**sliced([8, 4, 4])),
    )
    refused(
        PlanError,
        "slices=[10, 6]: the layouts of the step (and the chunks of its logits) divide slices into 4 parts, but one "
        "has 10 positions. Use multiples of 4, or slices=2.",
        lambda: autopar.compile(
            tied(16), "pp=2,cp=2", loss_fn=nll, batch=words(16), attention="gather", **sliced([10, 6])
        ),
    )
    for wrong in ([8, 0], [], [8, "8"], True, "many"):
        with pytest.raises(BatchError, match=r"write a number of 1 or more, the positions of each: \[1024, 512\], or"):
            compiled(slices=wrong)


def test_lengths_of_another_batch_are_not_used() -> None:
    ((_, found),) = verified(tied(16), ["pp=2"], nll, words(8), fixed=Fixed(uneven=True), **sliced([10, 6]))
    assert found.plan.slices == 1


def test_equal_lengths_are_what_they_were() -> None:
    lines = [once().compiled("pp=2", **sliced(slices)).lines() for slices in (2, [12, 12])]
    assert lines[0] == lines[1]
    asked = long(2**16, **sliced([2**14] * 4, 1))
    assert asked.plan.slice_lengths == () and asked.plan.slices == 4


def test_the_command_line() -> None:
    assert [read_slices(text) for text in ("4", "16,8", "auto")] == [4, (16, 8), "auto"]


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_a_mesh_is_spelled_with_its_lengths() -> None:
    mesh = Mesh((("mb", 2), ("sl", 3)), (5, 2, 1))
    assert str(mesh) == "mb=2,sl=5+2+1" and parse_mesh(str(mesh)) == mesh and mesh.granule == 1
    with pytest.raises(MeshError, match="has 2 lengths"):
        replace(mesh, lengths=(5, 3))


@pytest.mark.parametrize("text", ["[mb:sl,-]", "[mb:2:sl,-]", "[mb,sl:2~cp]", "[-,mb:2:sl:cp]"])
def test_parts_of_slices_are_pieces_of_the_whole(text: str) -> None:
    """In the order of slices, within what lies outside of them; cp cuts each slice."""
    mesh, layout = Mesh((("mb", 2), ("sl", 3), ("cp", 2)), (12, 8, 4)), parse_layout(text)
    shape = {"[mb:sl,-]": (48, 2), "[mb:2:sl,-]": (96, 2), "[mb,sl:2~cp]": (2, 24), "[-,mb:2:sl:cp]": (2, 96)}[text]
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    found: dict[int, list[Tensor]] = {}
    for coord in mesh.coords():
        if "cp" in text or coord["cp"] == 0:
            found.setdefault(coord["sl"], []).append(local_part(whole, layout, mesh, coord))
    sizes = {slice_: sum(part.numel() for part in parts) for slice_, parts in found.items()}
    assert [sizes[slice_] * 24 for slice_ in range(3)] == [length * whole.numel() for length in mesh.lengths]
    every = torch.cat([part.flatten() for parts in found.values() for part in parts])
    assert every.sort().values.equal(whole.flatten())
    rows = {"[mb:sl,-]": [*range(12, 20)], "[mb:2:sl,-]": [*range(12, 20), *range(36, 44)], "[mb,sl:2~cp]": [0],
            "[-,mb:2:sl:cp]": [0, 1]}[text]  # fmt: skip
    columns = {"[mb,sl:2~cp]": [12, 13, 18, 19], "[-,mb:2:sl:cp]": [*range(12, 16), *range(36, 40)]}.get(text, [0, 1])
    assert local_part(whole, layout, mesh, {"mb": 0, "sl": 1, "cp": 0}).equal(whole[rows][:, columns])


def test_positions_of_a_slice_are_counted_from_where_it_begins() -> None:
    """Of a dim that reads (2, positions), the second of three slices, of which cp has mirrored pieces."""
    mesh, layout = Mesh((("sl", 3), ("cp", 2)), (12, 8, 4)), parse_layout("[2:sl:2~cp]")
    for rank in range(2):
        expected = local_part(torch.arange(48), layout, mesh, {"sl": 1, "cp": rank}).tolist()
        reading: Reading = ((2, 2, 0), (6, -2, 3), (2, 2, 0), (-2, 1, rank), (2, 2, 0))
        whole, local, offsets = ([cut[i] for cut in reading] for i in range(3))
        runs = PieceRuns.of(whole, local, offsets)
        starts = Counters.of(runs, torch.device("cpu")).starts.flatten().tolist()
        assert [start + i for start in starts for i in range(runs.width)] == expected
        places = [first + sum(factor * offset for factor, offset in terms) for first, terms in starts_of(reading)]
        assert [place + i for place in places for i in range(2)] == expected


def test_types_of_a_slice_are_its_own() -> None:
    found = once().compiled("pp=2,cp=2", attention="gather", **sliced([16, 8]))
    assert found.pipeline is not None
    for slice_, length in enumerate((16, 8)):
        graph = found.pipeline.graph(Action(0, "F", slice_))
        embedded = next(node for node in graph.calls() if node.name == "embedding")
        assert str(record(embedded).layout) == "[mb,sl:2~cp,-]" and record(embedded).type.shape == (4, 2 * length, 32)
        assert local_type(embedded, graph.mesh).shape == (2, length // 2, 32)


@pytest.mark.parametrize(("layout", "size", "flops"), [("[sl,-]", 4, 50), ("[dp,-]", 8, 100)])
def test_only_what_is_sliced_costs_less_in_a_shorter_slice(layout: str, size: int, flops: int) -> None:
    sized = Sized(4, 8, Mesh(((SLICE, 2),)), 4, 1, {}, frozenset())
    known = Record((TensorType((8, 6), torch.float32),), layouts=(parse_layout(layout),), flops=100)
    found = sized.record(known, [frozenset({0}) if size == 4 else frozenset()])
    assert (found.type.shape, found.flops) == ((size, 6), flops)


OF_EIGHT = """LOCAL program on sl=2
%x: f32[8] of [16] [sl] = batch "0"
%w: f32[5] [-] = parameter "w"
%exp: f32[8] of [16] [sl] = aten.exp.default(%x)
%neg: f32[5] [-] = aten.neg.default(%w)
return value "y" = %exp
return value "z" = %neg
"""
OF_FOUR = OF_EIGHT.replace("f32[8] of [16] [sl]", "f32[4] of [8] [sl]")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("neg.default", "abs.default"),
        ("%neg", "%other"),
        ("f32[4] of [8] [sl] = batch", "f32[6] [-] = batch"),
    ],
)
def test_what_has_no_slices_needs_no_twin(old: str, new: str) -> None:
    """What lies whole in the program of slices of another length tells nothing of a slice."""
    sized = Sized(4, 8, Mesh(((SLICE, 2),)), 4, 1, {}, frozenset())
    (found,) = sized_graphs(
        {(0, "F"): parse_program(OF_EIGHT)}, parse_program(OF_FOUR.replace(old, new)), sized
    ).values()
    assert [(node.name, record(node).type.shape) for node in found.graph.nodes if node.op != "output"] == [
        ("x", (8,)), ("w", (5,)), ("exp", (8,)), ("neg", (5,)),
    ]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), [("%exp", "%other"), ("exp.default", "sin.default")])
def test_a_call_of_slices_without_a_twin_is_a_fault(old: str, new: str) -> None:
    sized = Sized(4, 8, Mesh(((SLICE, 2),)), 4, 1, {}, frozenset())
    with pytest.raises(VerificationError, match=r"^%exp \(aten.exp.default\) has no twin in the program of slices of"):
        sized_graphs({(0, "F"): parse_program(OF_EIGHT)}, parse_program(OF_FOUR.replace(old, new)), sized)
