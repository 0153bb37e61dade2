"""Context parallelism of whole models: the ways in which language models shift their labels, lengths and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from models import uneven
from refusals import line_of, refused
from torch import Tensor, nn
from verified import verified

from autopar.api import compile
from autopar.capture import capture
from autopar.compiled import Compiled
from autopar.compiler.compile import lower
from autopar.errors import BatchError, LayoutError
from autopar.ir.mesh import parse_mesh
from autopar.ir.options import StepOptions
from autopar.ir.plan import Fixed
from autopar.ir.program import record
from autopar.verification.verify import verify_compiled

WORDS, BATCH, TIME = 40, 4, 24
Batch = tuple[Tensor, ...]


def gpt() -> nn.Module:
    torch.manual_seed(2)
    return uneven(GPT(GPTConfig(WORDS, TIME + 1, layers=2, heads=4, width=16)))


def tokens(time: int = TIME) -> Tensor:
    return torch.randint(WORDS, (BATCH, time), generator=torch.Generator().manual_seed(3))


def labels(time: int = TIME) -> Tensor:
    """Some ignored: most of one row, some of another, the last one of a third."""
    y = tokens(time).flip(0)
    y[0, 2:7] = y[2, : time - 2] = y[1, -1] = -100
    return y


def logits_cut(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def labels_padded(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """As transformers does."""
    y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(m(x).view(-1, WORDS), y.view(-1), ignore_index=-100)


def batch_cut(m: nn.Module, tokens: Tensor) -> Tensor:
    x, y = tokens[:, :-1], tokens[:, 1:]
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), ignore_index=3)


SHIFTS: dict[str, tuple[Callable[..., Tensor], Batch]] = {
    "logits cut": (logits_cut, (tokens(), labels())),
    "labels padded": (labels_padded, (tokens(), labels())),
    "batch cut": (batch_cut, (tokens(TIME + 1),)),
}


def moved(compiled: Compiled) -> list[Any]:
    """What activations are gathered, or exchanged, over cp."""
    return [row for row in compiled.collectives if row.axis == "cp" and row.op in ("all_gather", "all_to_all")]


@pytest.mark.parametrize("name", SHIFTS)
def test_every_shift_is_right_and_all_products_are_divided(name: str) -> None:
    loss, batch = SHIFTS[name]
    for _, compiled in verified(gpt(), ("cp=2", "cp=3", "dp=2,cp=2", "dp=4,cp=2", "cp=2,tp=2"), loss, batch):
        assert not any("cp" in note for note in compiled.notes)
        assert {len(row.shape) for row in moved(compiled)} == {4}  # of attention, nothing else


@pytest.mark.parametrize("name", SHIFTS)
def test_the_work_of_causal_attention_is_balanced(name: str) -> None:
    loss, batch = SHIFTS[name]
    found = compile(gpt(), "cp=2", loss_fn=loss, batch=batch, attention="gather")
    layouts = {str(record(node).layouts[0]) for node in found.program.calls() if "attention.def" in str(node.target)}
    assert layouts == {"[-,-,2~cp,-]"}


@pytest.mark.parametrize("name", SHIFTS)
def test_beside_sequence_parallelism_stages_and_micro_batches(name: str) -> None:
    loss, batch = SHIFTS[name]
    verified(gpt(), ("cp=2,tp=2",), loss, batch, sequence_parallel=True)
    verified(gpt(), ("cp=2,pp=2",), loss, batch, microbatches=2)


def test_sequence_parallelism_takes_a_sequence_that_is_cut_out_of_the_batch() -> None:
    """The batch itself has 25 positions, of which tp=2 divides none."""
    loss, batch = SHIFTS["batch cut"]
    ((_, compiled),) = verified(gpt(), ("tp=2",), loss, batch, sequence_parallel=True)
    assert any(row.op == "reduce_scatter" for row in compiled.collectives)


# Positions that cp does not divide


def made(mesh: str, name: str = "logits cut", batch: Batch | None = None) -> Compiled:
    loss, given = SHIFTS[name]
    return compile(gpt(), mesh, loss_fn=loss, batch=batch or given)


def test_positions_that_cp_does_not_divide() -> None:
    message = (
        "cp=5 does not divide the 24 positions (dim 1 of batch tensor 0): pad to 25, or use a cp of 1, 2, 3, 4, 6, 8, "
        "12 or 24."
    )
    refused(BatchError, message, lambda: made("cp=5"))
    line = line_of(batch_cut, "x, y = tokens[:, :-1]")
    message = (
        f"cp=5 does not divide the 24 positions (%slice_1 at test_context_models.py:{line}, cut out of the batch): pad "
        "to 25, or use a cp of 1, 2, 3, 4, 6, 8, 12 or 24."
    )
    refused(BatchError, message, lambda: made("dp=2,cp=5", "batch cut"))


def test_later_lengths_that_cp_does_not_divide_are_computed_whole() -> None:
    """As a last batch is that dp does not divide: right, with a note, and the next one is divided again."""
    model, loss, decided = gpt().double(), SHIFTS["logits cut"][0], dict[Any, Any]()
    for time in (24, 9, 8):
        batch = tokens(time), labels(time)
        captured = capture(model, loss, batch, {}, lift=torch.float64)
        found = lower(captured, parse_mesh("dp=2,cp=2"), StepOptions(), Fixed(uneven=True, decided=decided))
        decided.setdefault(*found.decided)
        report = verify_compiled(model, captured, found, loss_fn=loss, batch=batch, steps=1, optimizer=None, seed=0)
        assert report.ok and report.max_error < 1e-10
        said = "axis 'cp' (size 2) cannot divide the positions of this batch: every rank computes all of them"
        assert (said in found.notes) == (time == 9)
        assert bool(moved(Compiled.of(found))) == (time != 9)


# Models that cp is not for


def test_a_model_without_a_sequence_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    batch = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    loss = lambda m, x, y: F.cross_entropy(m(x), y)  # noqa: E731
    with pytest.raises(LayoutError) as error:
        compile(model, "dp=2,cp=2", loss_fn=loss, batch=batch)
    for part in (
        "axis 'cp' (size 2) divides no product: 100 % of the work is done by each of its 2 ranks: %convolution",
        "no split of the positions gets through %convolution at ",
        "'cp' splits a sequence: a dim after the first of batch tensor 0 [4, 3, 8, 8]; batch tensor 1 [4]",
        "give its ranks to another axis, e.g. dp.",
    ):
        assert part in str(error.value)


class Pooled(nn.Module):
    """A sequence that ends at a look along all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(6, 8), nn.Linear(8, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.head(h.cummax(1).values)


def test_a_note_names_the_op_that_stops_the_split() -> None:
    found = compile(Pooled(), "cp=2", loss_fn=lambda m, x: m(x).square().mean(), batch=(torch.randn(2, TIME, 6),))
    (note,) = found.notes
    assert "axis 'cp' (size 2) leaves 3 of 5 products replicated" in note and " in head" in note
    line = line_of(Pooled.forward, "h.cummax")
    assert f"; no split of the positions gets through %cummax at test_context_models.py:{line}" in note
