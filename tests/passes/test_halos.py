"""Convolutions along a sequence that cp splits: what a piece needs of the pieces beside it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models_special import hybrid
from processes import Ranks
from shares import in_turns
from torch import Tensor, nn
from verified import verified

import autopar
from autopar.compiled import Compiled
from autopar.errors import BatchError, VerificationError
from autopar.ir.plan import Fixed, Plan
from autopar.ir.program import record
from autopar.ir.text.text import parse_program
from autopar.passes.collectives.check_rules import check_rules
from autopar.runtime.collectives import collectives

ROWS, TIME, WIDTH = 4, 24, 8


def moved(compiled: Compiled) -> set[str]:
    """What moves over cp beside sums of scalars and of gradients."""
    return {row.op for row in compiled.collectives if "cp" in row.axis and row.op != "all_reduce"}


def whole(compiled: Compiled) -> list[str]:
    return [note for note in compiled.notes if "replicated" in note or "divides no product" in note]


class Convolving(nn.Module):
    """One convolution between projections, the sequence last."""

    def __init__(self, convolve: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.convolve = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), convolve
        wide: dict[str, Any] = {"groups": WIDTH}
        self.causal, self.plain = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, **wide), nn.Conv1d(WIDTH, WIDTH, 4, **wide)
        self.same, self.halved = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.even, self.dilated = nn.Conv1d(WIDTH, WIDTH, 4, padding=2), nn.Conv1d(WIDTH, WIDTH, 3, dilation=2)
        self.patches, self.back = nn.Conv1d(WIDTH, WIDTH, 2, stride=2), nn.ConvTranspose1d(WIDTH, WIDTH, 2, stride=2)
        self.long, self.grouped = nn.Conv1d(WIDTH, WIDTH, 19, padding=9), nn.Conv1d(WIDTH, WIDTH, 3, groups=2)
        self.sparse = nn.Conv1d(WIDTH, WIDTH, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.convolve(self, self.up(x).transpose(1, 2))
        return self.down(F.silu(h).transpose(1, 2)).square().mean()


KINDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "causal, cut": lambda m, x: m.causal(x)[..., : x.shape[-1]],
    "causal, padded": lambda m, x: m.plain(F.pad(x, (3, 0))),
    "same": lambda m, x: m.same(x),
    "one row too many": lambda m, x: m.even(x)[:, :, :-1],
    "the first rows cut": lambda m, x: m.causal(x)[..., 3:],
    "halved": lambda m, x: m.halved(x),
    "dilated": lambda m, x: m.dilated(F.pad(x, (4, 0))),
    "patches": lambda m, x: m.patches(x),
    "patches and back": lambda m, x: m.back(m.patches(x)),
    "longer than a piece": lambda m, x: m.long(x),
    "grouped, in a row": lambda m, x: m.same(F.silu(m.grouped(F.pad(x, (1, 1))))),
    "every second": lambda m, x: m.sparse(x),
}


@pytest.mark.parametrize(("kind", "meshes"), list(in_turns(KINDS, ("cp=2", "cp=3", "cp=4", "cp=2,tp=2", "dp=2,cp=2"))))
def test_every_kind_of_convolution(kind: str, meshes: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    for _, found in verified(Convolving(KINDS[kind]), meshes, None, (torch.randn(ROWS, TIME, WIDTH),)):
        assert not whole(found), found.notes
        assert moved(found) <= {"halo", "halo_sum"}
        is_apart = kind in ("patches", "patches and back", "every second")
        assert is_apart == (not moved(found)), "rows that no other piece reads do not move"


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "forwards": lambda x: x.cumsum(1),
    "backwards": lambda x: x.flip(1).cumsum(1).flip(1),
    "the last dim": lambda x: x.transpose(1, 2).cumsum(-1).transpose(1, 2),
    "twice": lambda x: x.cumsum(1).tanh().cumsum(1),
}


@pytest.mark.parametrize("kind", SUMS)
def test_every_kind_of_running_sum(kind: str) -> None:
    """Of a sum a rank gets one row of each of the others, and its gradient gets as much."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, TIME, WIDTH)
    for _, found in verified(Shifting(SUMS[kind]), ("cp=2", "cp=3", "dp=2,cp=2"), None, (x,)):
        assert not whole(found) and moved(found) == {"all_gather"}
        ranks = 3 if found.program.mesh["cp"] == 3 else 2
        rows = {tuple(sorted(row.shape)) for row in found.collectives if row.op == "all_gather"}
        assert {shape[0] for shape in rows} == {ranks}, rows


def test_a_running_sum_of_the_batch_alone_is_computed_whole() -> None:
    """Position ids: the batch is there whole, and nothing needs to move."""
    model = Shifting(lambda h: h)
    loss = lambda m, x: (m.down(m.up(x)) * x.cumsum(1)).square().mean()  # noqa: E731
    ((_, found),) = verified(model, ("cp=2",), loss, (torch.randn(ROWS, TIME, WIDTH),))
    assert not moved(found) and not whole(found)


def test_dropout_before_the_cut() -> None:
    """It draws for all 27 places; the convolution is not cut before it."""
    model = Convolving(lambda m, x: F.dropout(m.causal(x), 0.3)[..., : x.shape[-1]])
    for _, found in verified(model, ("cp=2",), None, (torch.randn(ROWS, TIME, WIDTH),)):
        assert whole(found)


def test_a_pad_that_another_op_reads_too() -> None:
    """Its gradient is needed at the length of the pad: what makes it stays whole, and is right."""
    model = Convolving(lambda m, x: m.plain(y := F.pad(x, (3, 0))) + y[..., 3:])
    for _, found in verified(model, ("cp=2",), None, (torch.randn(ROWS, TIME, WIDTH),)):
        assert whole(found)


# Rows that a rank sends over cp=3, of 8 on each: forward, for the gradient of x, and for that of the weight.
SENT = {"same": (2, 2, 2), "causal, padded": (3, 3, 3), "longer than a piece": (24, 24, 24), "halved": (1, 1, 1)}


@pytest.mark.parametrize("kind", SENT)
def test_a_rank_sends_what_its_neighbours_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks there are, and what is said is what moves; all rows where a halo is longer than a piece."""
    sent: list[int] = []
    meet = collectives._meet

    def counted(moves: Any) -> Any:
        if moves[0].primitive in ("shift", "gather", "reduce_scatter") and moves[0].x.ndim:
            sent.append(moves[0].x.nbytes)
        return meet(moves)

    model, x = Convolving(KINDS[kind]), torch.randn(ROWS, TIME, WIDTH)
    monkeypatch.setattr(collectives, "_meet", counted)
    ((_, found),) = verified(model, ("cp=3",), None, (x,), steps=1)
    rows = [row for row in found.collectives if row.op in ("halo", "halo_sum")]
    size = ROWS * WIDTH * 8
    assert [row.bytes for row in rows] == [count * size for count in SENT[kind]]
    if kind != "longer than a piece":  # there a rank gives its piece, and gets all
        assert sum(sent) == sum(row.bytes for row in rows)


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a pad": lambda x: F.pad(x, (0, 0, 1, -1)),
    "ahead": lambda x: F.pad(x, (0, 0, -2, 2)),
    "behind zeros": lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1),
    "before zeros": lambda x: torch.cat([x[:, 3:], x.new_zeros(ROWS, 3, WIDTH)], 1),
    "a slice, padded": lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)),
    "by more than a piece": lambda x: F.pad(x, (0, 0, 13, -13)),
    "around": lambda x: x.roll(3, 1),
    "around, back": lambda x: x.roll(-1, 1),
    "around, by more than a piece": lambda x: x.roll(11, 1),
    "the long way around": lambda x: x.roll(23, 1),
    "around, with the width": lambda x: x.roll((2, 3), (1, 2)),
}


class Shifting(nn.Module):
    def __init__(self, shift: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.shift = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), shift

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.silu(h + self.shift(h))).square().mean()


@pytest.mark.parametrize("kind", SHIFTS)
def test_every_kind_of_shift(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, TIME, WIDTH)
    for _, found in verified(Shifting(SHIFTS[kind]), ("cp=2", "cp=3", "dp=2,cp=2"), None, (x,)):
        assert not whole(found) and moved(found) == {"halo"}, found.notes


TURNED: dict[str, Callable[[Tensor], Tensor]] = {
    "alone": lambda x: x.flip(1),
    "with the width": lambda x: x.flip(1, 2),
    "with a running sum of it": lambda x: (2 * x.flip(1)).cumsum(1),
    "beside a shift": lambda x: x.flip(1) * F.pad(x, (0, 0, 1, -1)),
}


@pytest.mark.parametrize("kind", TURNED)
def test_a_sequence_that_is_turned_round(kind: str) -> None:
    """In mirrored pieces a rank has the first rows and the last: nothing moves but what the other op reads."""
    torch.manual_seed(0)
    more = {"with a running sum of it": {"all_gather"}, "beside a shift": {"halo"}}.get(kind, set())
    for _, found in verified(
        Shifting(TURNED[kind]), ("cp=2", "cp=3", "dp=2,cp=2"), None, (torch.randn(ROWS, TIME, WIDTH),)
    ):
        assert not whole(found) and moved(found) == more
        turned = [node for node in found.program.calls() if node.target is torch.ops.aten.flip.default]
        assert {record(node).layouts[0].dims[1] for node in turned} == {(-2, "cp")}


def test_what_has_no_mirrored_pieces_is_gathered_to_be_turned() -> None:
    """20 positions are not pieces of 8; and a piece that tp divides further is not both ends of the whole."""
    torch.manual_seed(0)
    model = Shifting(lambda x: x.flip(1))
    ((_, found),) = verified(model, ("cp=4",), None, (torch.randn(ROWS, 20, WIDTH),))
    assert moved(found) == {"all_gather"} and not whole(found)
    verified(model, ("cp=2,tp=2",), None, (torch.randn(ROWS, TIME, WIDTH),), sequence_parallel=True)


def _trained(rank: int) -> float:
    """The greatest difference of a gradient from that of the plain step; mirrored pieces beside attention."""
    plain, loss, batch = hybrid(time=1024)
    plain = plain.float()
    loss(plain, *batch).backward()
    model = autopar.parallelize(copy.deepcopy(plain), "cp=4", loss_fn=loss, attention="gather")
    model.forward_backward(*batch)
    assert {row.op for row in model.compiled.collectives} >= {"halo", "halo_sum"}
    found = model.full_gradients().items()  # on rank 0
    return max(((grad - plain.get_parameter(name).grad).abs().max().item() for name, grad in found), default=0.0)


@pytest.mark.gloo
def test_four_processes(four: Ranks) -> None:
    assert 0 < max(four.run(_trained, timeout=200)) < 1e-4


def test_channels_may_stand_before_the_positions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(5, 4, 3, padding=1), nn.GELU(), nn.Conv1d(4, 4, 3, padding=1, stride=2))
    square, signal = lambda m, x: m(x).square().mean(), torch.randn(ROWS, 5, TIME)
    verified(model, ("cp=2", "cp=3"), square, (signal,))
    message = (
        "cp=5 does not divide the 24 positions (dim 2 of batch tensor 0): pad to 25, or use a cp of 1, 2, 3, 4, 6, "
    )
    with pytest.raises(BatchError, match=re.escape(message)):
        autopar.compile(model, "cp=5", loss_fn=square, batch=(signal.double(),))


def test_what_is_not_as_long_as_its_input_stays_whole() -> None:
    """22 places of 24 rows: no piece of one is a piece of the other."""
    found = autopar.compile(
        Convolving(lambda m, x: m.grouped(x)), "cp=2", loss_fn=None, batch=(torch.randn(ROWS, TIME, WIDTH),)
    )
    (note,) = whole(found)
    assert "no split of the positions gets through %convolution" in note or "%convolution" in note


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 6, (4, 4), (4, 4)), nn.Conv2d(6, 6, 7, padding=3, groups=6)
        self.down, self.head = nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, (5, 1), padding=(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.down(F.gelu(self.deep(self.stem(x)))))).square().mean()


def test_rows_of_an_image() -> None:
    """The last of its maps has 4 rows: of two ranks each has two."""
    torch.manual_seed(0)
    for _, found in verified(Image(), ("cp=2", "dp=2,cp=2", "cp=2,tp=2"), None, (torch.randn(ROWS, 3, 32, 48),)):
        assert not whole(found) and moved(found) == {"halo", "halo_sum"}


MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "two": ("cp=2", {}),
    "three": ("cp=3", {}),
    "four": ("cp=4", {"attention": "gather"}),
    "heads": ("cp=2", {"attention": "ulysses"}),
    "hybrid": ("cp=2,ulysses=2", {}),
    "dp and tp": ("dp=2,cp=2,tp=2", {}),
    "sequence parallel": ("cp=2,tp=2", {"sequence_parallel": True}),
    "pipeline": ("cp=2,pp=2", {"microbatches": 2}),
    "pipeline of weights": ("cp=2,pp=2", {"microbatches": 4, "schedule": "zb-h1"}),
    "zero": ("dp=2,cp=2", {"zero": 3}),
    "fsdp": ("fsdp=2,cp=2", {"zero": 2, "microbatches": 2}),
    "recompute": ("cp=4", {"recompute": "full"}),
}


@pytest.mark.parametrize("name", MATRIX)
def test_a_step_is_that_of_one_device(name: str) -> None:
    mesh, options = MATRIX[name]
    model, loss, batch = hybrid()
    ((_, found),) = verified(model, [mesh], loss, batch, **options)
    assert not whole(found), found.notes


def test_further_lengths_take_the_layouts_of_the_first() -> None:
    """As in training: what a halo is does not hang on the length; nine positions are computed whole."""
    decided = dict[Any, Any]()
    for time in (24, 9, 8, 26):
        model, loss, batch = hybrid(time=time)
        fixed = Fixed(uneven=True, decided=decided)
        ((_, found),) = verified(model, ("dp=2,cp=2",), loss, batch, steps=1, fixed=fixed)
        decided.setdefault(*found.decided)
        assert ("halo" in moved(found)) == (time != 9)
    assert len(decided) == 2


def test_mirrored_pieces_are_convolved_as_they_lie() -> None:
    """Attention balances its work with two runs a rank; a convolution takes the rows before each."""
    model, loss, batch = hybrid(time=1024)
    for _, found in verified(model, ("cp=2", "cp=2,tp=2"), loss, batch, attention="gather"):
        convolutions = [node for node in found.program.calls() if ".convolution.default" in str(node.target)]
        assert {str(record(node).layouts[0].dims[2]) for node in convolutions} == {"(-2, 'cp')"} and not found.notes
        assert all(node.kwargs["runs"] == [2] for node in convolutions)
        rows = {row.shape[-1] for row in found.collectives if row.op == "halo" and len(row.shape) == 3}
        assert rows - {WIDTH, WIDTH // 2} == {6}, "three rows before each of a rank's two runs"
    model, loss, batch = hybrid()
    (note,) = autopar.compile(model, "cp=2", loss_fn=loss, batch=batch, attention="gather").notes
    assert note.endswith("24 positions lie in order; balanced, other ops would move more than that costs")


@pytest.mark.parametrize(("layout", "is_right"), [("[-,2~cp]", True), ("[-,cp]", False), ("[-,2:cp]", False)])
def test_a_flip_of_pieces_in_order_is_refused(layout: str, is_right: bool) -> None:
    text = f"""SHARDED program on cp=2
%x: f32[2,8] {layout} = batch "0"
%flip: f32[2,8] {layout} = aten.flip.default(%x, [1])
%all_gather: f32[2,8] [-,-] = aten.neg.default(%flip as [-,-])
return value "y" = %all_gather
"""
    program = parse_program(text)
    with nullcontext() if is_right else pytest.raises(VerificationError, match="flip"):
        check_rules(program, Plan(program.mesh))
